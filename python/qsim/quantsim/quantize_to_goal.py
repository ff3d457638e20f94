"""One call from a float model to a simulation that reaches a goal: what is cheap is tried first."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain
from typing import Any

import torch
from torch import nn

from qsim.analysis.bit_costs import Budget
from qsim.analysis.metric import Metric, metric_of, value_of
from qsim.call_fit import tells_arguments
from qsim.config.config import Config
from qsim.config.named import config_of
from qsim.config.presets import int8
from qsim.equalization import equalize
from qsim.errors import CalibrationError
from qsim.loggers.figures import Figures
from qsim.options import check_flag, check_function, check_number
from qsim.pages import markup
from qsim.pages.markup import Cell, Column, Line
from qsim.pages.page import Page
from qsim.pages.report import Report
from qsim.pages.subject import about
from qsim.progress import progress as progress_bar
from qsim.quantsim.quantsim import QuantSim
from qsim.restoration.distill import is_frozen
from qsim.runs.batches import Forward, iterate
from qsim.runs.offloaded import own_copy
from qsim.runs.report_subject import subject_of
from qsim.runs.runnable import check_module
from qsim.table import text_table

_METHODS = ("mse", "percentile", "minmax")
_DISTILLATION = 200  # steps
_EQUALIZATION = ("cross_layer", "smooth_quant")
_LOOKED_AT = 8  # batches, by equalization
_MANY = 8  # bits: what a few tensors get where the others have fewer
_SHARE = 0.1  # of the tensors
_PROBES = 60  # evaluations of the metric for what stays in float


@dataclass(frozen=True)
class Tried:
    """One attempt: what it was, the metric, and the seconds that it took."""

    name: str
    metric: float
    seconds: float


@dataclass(frozen=True)
class Quantized(Report):
    """What `quantize` returns; ``print`` shows the trail, `save` writes a page.

    Attributes
    ----------
    sim : QuantSim
        The first that reached the goal, or else the best.
    config : Config
        Of it.
    trail : list of Tried
        What was tried, in order.
    in_float : float
        The metric of the float model.
    goal : float
        What the metric was to reach.
    reached : bool
        Whether it did.
    notes : list of str
        What was not tried, and why.

    Examples
    --------
    >>> model, x = torch.nn.Linear(16, 4).eval(), torch.randn(256, 16)
    >>> labels = model(x).argmax(1)
    >>> def accuracy(network, data):
    ...     return float((network(x).argmax(1) == labels).float().mean())
    >>> quantized = qsim.quantize(model, x[:1], x.split(32), accuracy, goal=0.9, progress=False)
    >>> quantized.in_float, len(quantized.trail)
    (1.0, 1)
    >>> import tempfile
    >>> quantized.save(tempfile.mktemp(".html"))
    """

    sim: QuantSim
    config: Config
    trail: list[Tried]
    in_float: float
    goal: float
    reached: bool
    notes: list[str]

    def __str__(self) -> str:
        rows = [(each.name, f"{each.metric:.6g}", f"{each.seconds:.1f}") for each in self.trail]
        table = text_table(("tried", "metric", "seconds"), rows, ("metric", "seconds"))
        return "\n".join([table, self._fate, *self.notes])

    @property
    def _fate(self) -> str:
        fate = "reached" if self.reached else "not reached: the best of these is returned"
        return f"float {self.in_float:.6g}, goal {self.goal:.6g}: {fate}"

    def figures(self) -> Figures:
        """The metric in float, what it was to reach, and what each attempt reached and took."""
        found = {"metric/float": self.in_float, "metric/goal": self.goal, "reached": float(self.reached)}
        for each in self.trail:
            found |= {f"metric/{each.name}": each.metric, f"seconds/{each.name}": each.seconds}
        return Figures(found)

    def page(self) -> Page:
        """See `Report.page`."""
        columns = [Column("tried", wide=True), Column("metric", number=True), Column("seconds", number=True)]
        lines = [
            Line([Cell(each.name), Cell(f"{each.metric:.6g}", each.metric), Cell(f"{each.seconds:.1f}", each.seconds)], each.name)
            for each in self.trail
        ]
        facts = [("in float", f"{self.in_float:.6g}"), ("goal", f"{self.goal:.6g}"), ("reached", "yes" if self.reached else "no")]
        body = markup.tiles(facts) + markup.problems(self.notes) + markup.table("Tried", "In order.", columns, lines)
        return Page("To a goal", self._fate, body, about(self.subject))


@dataclass(frozen=True)
class _Attempt:
    """A simulation and what it was made by."""

    name: str
    sim: QuantSim


@tells_arguments("qsim.quantize")
def quantize(
    model: nn.Module,
    example_inputs: Any,
    data: Iterable[Any],
    metric: Metric,
    *,
    goal: float = 0.99,
    higher_is_better: bool = True,
    target: str = "onnxruntime",
    config: Config | str | None = None,
    forward: Forward | None = None,
    seconds: float | None = None,
    train: Callable[[QuantSim], object] | None = None,
    progress: bool = True,
) -> Quantized:
    """Quantize a model so that a metric keeps its value.

    Tried are range methods, restoring, distillation, equalization, more bits for the first and last operation and for a tenth of the
    tensors, the fewest operations in float, and training.

    What is cheap comes first, and it ends where the goal is reached. Every attempt begins with the float model, which stays as it is.

    Parameters
    ----------
    model, example_inputs
        As of `QuantSim`.
    data : iterable of batches
        For calibration, as `QuantSim.calibrate` takes them; no labels needed. Read once and kept.
    metric : callable
        ``metric(sim, data) -> float``; the sim is called like the model, in eval mode and without gradients. What data it measures on is
        its own affair: it is handed the calibration data, and better looks at others.
    goal : float, above 0, at most 1
        The part of the float model's metric that is to be kept: 0.99 of an accuracy, or of a loss, which is lower where it is better,
        1/0.99 of it.
    higher_is_better : bool
    target : str
        As `Config.target`; of the default config.
    config : Config, optional
        What to begin with, or the name of a preset; `qsim.int8` for the target by default.
    forward : callable, optional
        As in `QuantSim.calibrate`, which calibration, restoring and equalization run the model by.
    seconds : float, optional
        Nothing new begins after so long.
    train : callable, optional
        ``train(sim)`` retrains a simulation (QAT); the last thing that is tried.
    progress : bool
        Show a progress bar where tqdm is installed.

    Returns
    -------
    Quantized
        ``.sim`` is the simulation, ``.trail`` what was tried.

    Raises
    ------
    CalibrationError
        There is no data.
    ValueError
        The float model's metric is not finite, or not above 0: then there is no part of it to keep.

    Examples
    --------
    >>> from torch import nn
    >>> model, x = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).eval(), torch.randn(256, 16)
    >>> labels = model(x).argmax(1)
    >>> def accuracy(network, data):
    ...     return float((network(x).argmax(1) == labels).float().mean())
    >>> quantized = quantize(model, x[:1], x.split(32), accuracy, goal=0.97, progress=False)
    >>> quantized.reached
    True
    """
    check_module(model, "qsim.quantize")
    metric_of(metric, None, "qsim.quantize")
    batches = list(iterate(data, None, False, "qsim.quantize"))
    if not batches:
        raise CalibrationError("qsim.quantize: got no batch. Is the iterator used up, or the data set empty?")
    check_number("qsim.quantize", "goal", goal, least=0)
    check_flag("qsim.quantize", "higher_is_better", higher_is_better)
    if seconds is not None:
        check_number("qsim.quantize", "seconds", seconds, least=0, otherwise="None for no limit")
    if train is not None:
        check_function("qsim.quantize", "train", train, "train(sim)")
    if not 0 < goal <= 1:
        raise ValueError(f"qsim.quantize: got goal={goal}; expected the part of the float model's metric to keep, above 0 and at most 1")
    began = time.monotonic()
    in_float = _measured(metric, own_copy(model).eval(), batches)
    if not (math.isfinite(in_float) and in_float > 0):
        raise ValueError(
            f"qsim.quantize: the float model's metric is {in_float}; expected a finite number above 0, of which a part is kept"
        )
    wanted = in_float * goal if higher_is_better else in_float / goal
    sign = 1 if higher_is_better else -1
    first = int8(target) if config is None else config_of(config, "qsim.quantize")
    trail: list[Tried] = []
    best: _Attempt | None = None
    ends = math.inf if seconds is None else began + seconds
    maker = _Attempts(model, example_inputs, batches, first, sign, trail, forward)
    attempts = chain(maker.as_configured(), maker.equalized(), maker.mixed(), maker.in_float(metric, wanted, ends), maker.trained(train))
    since = time.monotonic()
    for attempt in progress_bar(attempts, total=None, title="quantize", unit="attempt", show=progress):
        value = _measured(metric, attempt.sim, batches)
        best_value = trail[_best(trail, sign)].metric if trail else -sign * math.inf
        trail.append(Tried(attempt.name, value, time.monotonic() - since))
        if best is None or sign * value > sign * best_value:
            best = _Attempt(attempt.name, copy.deepcopy(attempt.sim))
        if sign * value >= sign * wanted or time.monotonic() > ends:
            break
        since = time.monotonic()
    assert best is not None
    reached = sign * trail[_best(trail, sign)].metric >= sign * wanted
    subject = subject_of(best.sim.model, best.sim.config)
    return Quantized(best.sim, best.sim.config, trail, in_float, wanted, reached, maker.notes, subject=subject)


def _best(trail: list[Tried], sign: int) -> int:
    """The first of the best; NaN is worse than anything."""
    return max(range(len(trail)), key=lambda i: (not math.isnan(trail[i].metric), sign * trail[i].metric, -i))


def _measured(metric: Metric, network: nn.Module, batches: list[Any]) -> float:
    was = network.training
    network.eval()
    with torch.no_grad():
        value = value_of(metric, network, batches, "qsim.quantize")
    network.train(was)
    return value


class _Attempts:
    """What is tried, in order; each is made when it is asked for, and may look at the trail so far."""

    def __init__(
        self,
        model: nn.Module,
        example_inputs: Any,
        batches: list[Any],
        config: Config,
        sign: int,
        trail: list[Tried],
        forward: Forward | None,
    ) -> None:
        self.model, self.example_inputs, self.batches, self.forward = model, example_inputs, batches, forward
        self.config, self.sign, self.trail = config, sign, trail
        self.notes: list[str] = []
        if frozen := sum(map(is_frozen, model.parameters())):
            told = "(requires_grad=False): distillation keeps their values; model.requires_grad_(True) has them changed"
            self.notes.append(f"{frozen} parameters are frozen {told}")
        self.method: str | None = None  # of ranges, if another is better than the config's

    def calibrated(self, config: Config, model: nn.Module | None = None) -> QuantSim:
        sim = QuantSim(self.model if model is None else model, self.example_inputs, config)
        sim.calibrate(self.batches, self.forward, progress=False)
        if self.method is not None:
            sim.set_method(self.method)
        return sim

    def as_configured(self) -> Iterator[_Attempt]:
        sim = self.calibrated(self.config)
        yield _Attempt("calibrate", sim)
        for method in _METHODS:
            sim.set_method(method)
            yield _Attempt(f"ranges by {method}", sim)
        best = _best(self.trail, self.sign)
        self.method = _METHODS[best - 1] if best else None
        ranges = f", ranges by {self.method}" if self.method else ""
        for steps in (0, _DISTILLATION):
            sim = self.calibrated(self.config)
            sim.restore(self.batches, self.forward, steps=steps, progress=False)
            yield _Attempt(f"restore{f' and {steps} steps' if steps else ''}{ranges}", sim)

    def equalized(self) -> Iterator[_Attempt]:
        model = own_copy(self.model)
        try:
            report = equalize(model, self.example_inputs, self.batches, methods=_EQUALIZATION, max_batches=_LOOKED_AT, forward=self.forward)
        except ValueError as error:  # half precision, sharded: it says so
            self.notes.append(f"not equalized: {error}")
            return
        if not report.changes or report.put_back:
            self.notes.append(f"not equalized: {report.put_back or 'there is nothing to scale'}")
            return
        sim = self.calibrated(self.config, model)
        sim.restore(self.batches, self.forward, progress=False)
        yield _Attempt("equalize, restore", sim)

    def mixed(self) -> Iterator[_Attempt]:
        specs = [spec for spec in (self.config.weight, self.config.activation) if spec is not None and not spec.is_float]
        bits = {spec.bits for spec in specs}
        if min(bits, default=_MANY) >= _MANY:
            return
        mixed = self.config.override(position="first", bits=_MANY).override(position="last", bits=_MANY)
        sim = self.calibrated(mixed)
        sim.restore(self.batches, self.forward, steps=_DISTILLATION, progress=False)
        yield _Attempt(f"first and last operation at {_MANY} bits, restore and {_DISTILLATION} steps", sim)
        if len(bits) > 1:  # what has 8 bits already would count among those that get them
            return
        if find_spec("scipy") is None:
            self.notes.append('bits were not searched: pip install "qsim[search]"')
            return
        budget = Budget(tensors=_SHARE)
        search = self.calibrated(self.config).search_bits(
            self.batches, budget=budget, candidates=(*bits, _MANY), forward=self.forward, progress=False
        )
        sim = self.calibrated(search.config)
        sim.restore(self.batches, self.forward, steps=_DISTILLATION, progress=False)
        yield _Attempt(f"a tenth of the tensors at {_MANY} bits, restore and {_DISTILLATION} steps", sim)

    def in_float(self, metric: Metric, wanted: float, ends: float) -> Iterator[_Attempt]:
        sim = self.calibrated(self.config)
        left = None if ends == math.inf else max(ends - time.monotonic(), 1.0)
        plan = sim.float_plan(
            self.batches, metric, target=wanted, higher_is_better=self.sign > 0, probes=_PROBES, seconds=left, progress=False
        )
        sim = self.calibrated(self.config.with_plan(plan))
        sim.restore(self.batches, self.forward, progress=False)
        yield _Attempt(f"restore, {len(plan.keep)} operations in float", sim)

    def trained(self, train: Callable[[QuantSim], object] | None) -> Iterator[_Attempt]:
        if train is not None:
            sim = self.calibrated(self.config)
            sim.restore(self.batches, self.forward, progress=False)
            train(sim)
            yield _Attempt("restore and train", sim)
