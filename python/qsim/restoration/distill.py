"""Training against the float model's results, which takes no labels, and keeps only what gains on data that was held back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qsim.analysis.deviation import Deviation, float_tensors
from qsim.loggers.figures import Figures
from qsim.pages.chart import Axis, Chart, Series
from qsim.pages.markup import Cell, Column, Fact, Line, table, tiles
from qsim.pages.page import Page
from qsim.pages.report import Report
from qsim.pages.subject import about
from qsim.progress import progress
from qsim.runs.report_subject import subject_of
from qsim.runs.snapshot import beginning_alike, rewriting
from qsim.simulation.restored_weights import TRAINED, has_free_scale
from qsim.simulation.simulation import Simulation
from qsim.table import decibel

DistillationLoss = Callable[[Any, Any], Tensor]
Call = Callable[[], Any]

_TRAVEL = 4.0  # steps of its grid that a weight may go in all, of 200 steps or more
_STRETCH = 0.3  # the part of itself that a scale or any other parameter may change by
_FULL = 200  # with fewer steps all go less far: what moves faster only jitters
_LOOKS = 8  # so often is measured whether it gains

NOTHING_LEARNS = (
    "nothing can be learned: no parameter requires a gradient, and no quantizer has a scale that training may move; "
    "sim.model.requires_grad_(True) has weights and biases learned"
)


@dataclass(frozen=True)
class Distilled(Report):
    """What a distillation came to; `save` writes a page, with the loss of every step.

    Attributes
    ----------
    steps : int
        How many were made.
    kept : int
        After how many the parameters were best on the data that was held back: those are kept. 0: nothing gained, nothing changed.
    levels : dict of int to float
        SQNR in dB of the model's results to the float model's on the data that was held back, by step.
    losses : list of float
        Of each step.

    Examples
    --------
    >>> x = torch.randn(256, 16)
    >>> sim = qsim.QuantSim(torch.nn.Linear(16, 8), x[:1], qsim.int4())
    >>> report = sim.calibrate(x.split(32), progress=False)
    >>> distilled = sim.distill(x.split(32), steps=10, progress=False)
    >>> distilled.steps, len(distilled.losses)
    (10, 10)
    >>> import tempfile
    >>> distilled.save(tempfile.mktemp(".html"))
    """

    steps: int
    kept: int
    levels: dict[int, float]
    losses: list[float]

    def __str__(self) -> str:
        before, after = self.levels[0], self.levels[self.kept]
        if self.kept == 0:
            return f"distillation: {self.steps} steps gained nothing on what was held back ({before:.1f} dB); nothing is changed"
        return f"distillation: {before:.1f} -> {after:.1f} dB to float on what was held back, after {self.kept} of {self.steps} steps"

    def figures(self) -> Figures:
        """SQNR on what was held back, before and after, the first and the last loss, and the steps that were kept."""
        found = {"sqnr/before": self.levels[0], "sqnr/after": self.levels[self.kept], "steps/made": self.steps, "steps/kept": self.kept}
        ends = {f"loss/{when}": self.losses[at] for when, at in (("first", 0), ("last", -1)) if self.losses}
        return Figures({name: float(value) for name, value in (found | ends).items()})

    def page(self) -> Page:
        """See `Report.page`."""
        facts: list[Fact] = [("dB to float before", decibel(self.levels[0])), ("dB to float after", decibel(self.levels[self.kept]))]
        facts.append(("steps kept", str(self.kept), f"of {self.steps}"))
        columns = [Column("step", number=True, ascending=True), Column("dB to float", number=True, ascending=True)]
        lines = [Line([Cell(str(step), step), Cell(decibel(level), level)]) for step, level in self.levels.items()]
        rows = {step: row for row, step in enumerate(self.levels)}
        chart = Chart(
            "Loss of every step",
            Axis("step"),
            Axis("loss", logarithmic=True),
            [Series("loss", "inside", self.losses)],
            [rows.get(step) for step in range(1, len(self.losses) + 1)],
            only="a step between two measurements",
        )
        note = "What was measured on the data that was held back; the best is kept. The curve is the loss of each step, on its batch."
        body = tiles(facts) + table("Steps", note, columns, lines, chart if self.losses else None)
        return Page("Distillation", str(self), body, about(self.subject), chart)


def relative_error(got: Any, wanted: Any) -> Tensor:
    """Squared error over all results, each by the power of what it should be."""
    pairs = list(zip(float_tensors(got), float_tensors(wanted), strict=True))
    return sum(((y - x).square().sum() / x.square().sum().clamp_min(1e-12) for y, x in pairs), start=torch.zeros(()))


def train(
    sim: Simulation,
    calls: Sequence[Call],
    measures: Sequence[bool],
    wanted: Sequence[Any],
    *,
    steps: int,
    loss: DistillationLoss,
    seed: int,
    show: bool,
) -> Distilled:
    """Train what computes the model's results, in eval mode, so that they become `wanted`; `Simulation.restored` says if weights did.

    Weights move by their grid's step, scales of quantizers and everything else by their own size: Adam normalises gradients, so that a
    learning rate is a distance, and neither layers nor bit widths need their own. Where it raises, what was trained is there: the caller
    takes it back.

    Parameters
    ----------
    sim : Simulation
        Calibrated, in eval mode.
    calls, measures, wanted
        What runs the model on each batch, whether it is held back, and what the float model returns there.
    """
    training = [i for i, held in enumerate(measures) if not held]
    held = [i for i, held in enumerate(measures) if held] or training
    generator = torch.Generator().manual_seed(seed)
    levels = {0: _level(sim, calls, wanted, held)}
    losses: list[float] = []
    kept = 0
    with _learning(sim) as groups:
        tensors = [t for group in groups for t in group["params"]]
        best = [t.detach().clone() for t in tensors]
        optimizer = torch.optim.Adam(groups)
        rates = [group["lr"] for group in groups]
        order: list[int] = []
        every = max(1, steps // _LOOKS)
        for step in progress(range(1, steps + 1), total=steps, title="distill", unit="step", show=show):
            order = order or [training[i] for i in torch.randperm(len(training), generator=generator)]
            batch = order.pop()
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * 2 * (1 - (step - 1) / steps) / max(steps, _FULL)
            with beginning_alike(sim.model), torch.enable_grad():
                error = loss(calls[batch](), wanted[batch])
                if not isinstance(error, Tensor) or error.numel() != 1:
                    got = f"a tensor of shape {tuple(error.shape)}" if isinstance(error, Tensor) else f"a {type(error).__name__}"
                    raise TypeError(f"QuantSim.distill: the loss returned {got}; expected a tensor of one number, such as a mean")
                if not error.requires_grad:
                    raise ValueError(
                        "QuantSim.distill: the loss does not depend on the simulation through any gradient; nothing can be learned"
                    )
                optimizer.zero_grad()
                error.backward()  # type: ignore[no-untyped-call]
            losses.append(float(error.detach()))
            if not math.isfinite(losses[-1]) or not all(bool(t.grad.isfinite().all()) for t in tensors if t.grad is not None):
                continue  # one bad batch costs nothing but itself
            scales = [(t, t.detach().clone()) for group in groups if group["name"] == "scale" for t in group["params"]]
            optimizer.step()
            with torch.no_grad():
                for scale, was in scales:
                    scale.clamp_(was / 2, was * 2)  # and so stays positive
            if step % every == 0 or step == steps:
                levels[step] = _level(sim, calls, wanted, held)
                if levels[step] > levels[kept]:
                    kept, best = step, [t.detach().clone() for t in tensors]
        with rewriting():
            for t, value in zip(tensors, best, strict=True):
                t.copy_(value)
        if kept and any(group["name"] == "parameter" for group in groups):
            sim.note_restored(["", *_moved(sim, tensors)], TRAINED)
    return Distilled(steps, kept, levels, losses, subject=subject_of(sim.model, sim.config))


def _moved(sim: Simulation, learned: Sequence[Tensor]) -> list[str]:
    """The weights that were learned, or whose scales were."""
    known, quantizers = {id(t) for t in learned}, sim.quantizers()
    return [key for key, weight in sim.weights().items() if known & {id(weight), id(quantizers[key].grid_tensors[0])}]


def is_frozen(t: Tensor | None) -> bool:
    """Whether it is a parameter that distillation leaves as it is: ``requires_grad_(False)``. Buffers, which require no gradient, are not.

    Examples
    --------
    >>> layer = nn.Linear(2, 2)
    >>> _ = layer.bias.requires_grad_(False)
    >>> is_frozen(layer.weight), is_frozen(layer.bias), is_frozen(None)
    (False, True, False)
    """
    return isinstance(t, nn.Parameter) and not t.requires_grad


def learnable(sim: Simulation) -> tuple[list[nn.Parameter], list[Tensor]]:
    """The parameters and the scales that are learned: none that is frozen."""
    parameters = [p for p in sim.model.parameters() if p.is_floating_point() and not is_frozen(p)]
    return parameters, [q.grid_tensors[0] for q in sim.quantizers().values() if has_free_scale(q) and not is_frozen(q.grid_tensors[0])]


@contextmanager
def _learning(sim: Simulation) -> Iterator[list[dict[str, Any]]]:
    """Groups for an optimizer of what is learned, and how far each may go; afterwards what requires a gradient is what did, and has the
    gradient that it had."""
    quantizers, weights = sim.quantizers(), sim.weights()
    steps = {id(weights[key]): float(quantizers[key].grid_scale.detach().mean()) for key in weights if quantizers[key].spec.has_scale}
    parameters, scales = learnable(sim)
    every = {id(t): t for t in (*sim.parameters(), *scales)}.values()
    was = [(t, t.requires_grad, t.grad) for t in every]
    groups = [
        {"params": [p], "lr": _TRAVEL * steps[id(p)] if id(p) in steps else _STRETCH * _size(p), "name": "parameter"} for p in parameters
    ]
    groups += [{"params": [s], "lr": _STRETCH * float(s.detach().mean()), "name": "scale"} for s in scales]
    try:
        for t in every:
            t.grad = None
        for scale in scales:
            scale.requires_grad_(True)
        yield groups
    finally:
        for t, required, gradient in was:
            t.requires_grad_(required)
            t.grad = gradient


def _size(p: Tensor) -> float:
    return float(p.detach().double().square().mean().sqrt()) if p.numel() else 0.0


def _level(sim: Simulation, calls: Sequence[Call], wanted: Sequence[Any], batches: Sequence[int]) -> float:
    found = Deviation()
    with torch.no_grad():
        for i in batches:
            with beginning_alike(sim.model):
                for got, reference in zip(float_tensors(calls[i]()), float_tensors(wanted[i]), strict=True):
                    found.add(reference, got)
    return found.sqnr
