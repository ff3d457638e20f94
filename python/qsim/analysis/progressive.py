"""Progressive quantization: operations join one by one, and the metric after each shows where accuracy breaks."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qsim.analysis.metric import Metric, broken_in, told_of_broken
from qsim.analysis.scores import ScoreFile
from qsim.analysis.sensitivity import measure, members_of, value_with
from qsim.close_names import close_names
from qsim.loggers.figures import Figures
from qsim.options import check_flag, check_number, shown
from qsim.pages import drawing
from qsim.pages.chart import Axis, Chart, Series
from qsim.pages.markup import Cell, Column, Fact, Line, finite, name_cell, problems, table, tiles
from qsim.pages.page import Page
from qsim.pages.report import Report
from qsim.pages.subject import about
from qsim.progress import progress
from qsim.runs.report_subject import subject_of
from qsim.runs.sharding import sharded_around
from qsim.runs.snapshot import unchanged
from qsim.simulation.simulation import Simulation
from qsim.table import text_table

ORDERS = ("sensitivity", "forward", "backward")


@dataclass(frozen=True)
class ProgressiveStep:
    """One operation more that is quantized.

    Attributes
    ----------
    operation : str
    keys : tuple of str
        Its quantizers.
    value : float
        The metric with it and all before it quantized.
    drop : float
        How much worse than before it joined; negative where it is better.
    lost : float
        How much worse than float.
    """

    operation: str
    keys: tuple[str, ...]
    value: float
    drop: float
    lost: float

    @property
    def broken(self) -> int:
        """Of a value in dB: how many results are NaN or Inf and finite in float, which makes it -Inf."""
        return broken_in(self.value)


@dataclass(frozen=True)
class Progressive(Report):
    """What `QuantSim.progressive` returns; ``print`` shows every step.

    Attributes
    ----------
    steps : list of ProgressiveStep
        In the order in which they joined. Where `max_drop` ended it, the last one was too much.
    baseline : float
        The metric in float.
    higher_is_better : bool
    left : list of str
        Operations that did not join, the one that was too much among them, in the order of the model.
    note : str
        Why it ended early; "" if all joined.
    ranges : str
        As of `Sensitivity`.

    Examples
    --------
    >>> import tempfile
    >>> from torch import nn
    >>> sim = qsim.QuantSim(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.zeros(1, 4))
    >>> report = sim.calibrate([torch.randn(32, 4)], progress=False)
    >>> progressive = sim.progressive([torch.randn(32, 4)], progress=False)
    >>> len(progressive.steps), progressive.breaks in progressive.steps, progressive.left
    (3, True, [])
    >>> progressive.save(tempfile.mktemp(".html"))
    """

    steps: list[ProgressiveStep]
    baseline: float
    higher_is_better: bool
    left: list[str]
    note: str = ""
    ranges: str = ""

    @property
    def breaks(self) -> ProgressiveStep | None:
        """The step with the largest drop, NaN before all; None if no step can be compared with the one before it."""
        known = [step for step in self.steps if not math.isinf(step.drop) or math.isinf(step.value)]
        return max(known, key=lambda step: (math.isnan(step.drop), step.drop), default=None)

    def __str__(self) -> str:
        better = "higher" if self.higher_is_better else "lower"
        lines = [f"metric ({better} is better): float {self.baseline:.6g}; one more quantized in each line:"]
        worst = self.breaks
        rows = [
            (str(i), step.operation, f"{step.value:.6g}", _drop(step), _number(step.lost), "largest drop" if step is worst else "")
            for i, step in enumerate(self.steps, 1)
        ]
        columns = ("step", "joined", "metric", "drop", "lost", "")
        lines.append(text_table(columns, rows, ("step", "metric", "drop", "lost")))
        return "\n".join([*lines, *self._notes])

    @property
    def _notes(self) -> list[str]:
        """What a person should know."""
        found = next((step for step in self.steps if step.broken), None)
        told = [] if found is None else [f"with '{found.operation}' {told_of_broken(found.broken)}"]
        return [*told, *filter(None, (self.note, self.ranges))]

    def figures(self) -> Figures:
        """The metric in float, with all that joined, and what each lost when it did."""
        drops = {f"drop/{step.operation}": step.drop for step in self.steps}
        last = {"metric/quantized": self.steps[-1].value} if self.steps else {}
        return Figures({"metric/float": self.baseline, **last, **drops})

    def page(self) -> Page:
        """See `Report.page`."""
        return progressive_page(self)


def _drop(step: ProgressiveStep) -> str:
    return f"{step.drop:.3g}" if math.isinf(step.value) else _number(step.drop)


def _number(value: float) -> str:
    return "" if math.isinf(value) else f"{value:.3g}"  # beside +Inf dB nothing can be said


@dataclass(frozen=True)
class Limits:
    """When to stop: what may be lost, in units of the metric, and how long it may take."""

    max_drop: float | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None:
                check_number("QuantSim.progressive", name, value, least=0, otherwise="None for no limit")


def join(
    sim: Simulation,
    data: Any,
    metric: Metric,
    order: str | Sequence[str],
    *,
    higher_is_better: bool,
    limits: Limits,
    file: ScoreFile,
    show: bool,
) -> Progressive:
    """See `QuantSim.progressive`."""
    check_flag("QuantSim.progressive", "higher_is_better", higher_is_better)
    began = time.monotonic()
    if isinstance(data, Iterator):
        raise TypeError(
            f"QuantSim.progressive: got data of type {type(data).__name__}, which is used up after one pass; every step needs one: "
            "give a list or a DataLoader"
        )
    quantizers = {key: quantizer for key, quantizer in sim.quantizers().items() if quantizer.enabled}
    members = members_of({key: sim.decisions.quantizers[key].operation for key in quantizers}, "operation")
    wanted = _in_order(order, list(members))

    def score(name: str, on: set[str]) -> float:
        if name not in file.scores:
            with sharded_around(sim), unchanged(sim), torch.no_grad():
                sim.eval()
                file.add(name, value_with(sim, quantizers, on, metric, data, "QuantSim.progressive"))
        return file.scores[name]

    baseline = score("(float)", set())
    if limits.max_drop is not None and not math.isfinite(baseline):
        raise ValueError(
            f"QuantSim.progressive: got max_drop={limits.max_drop}, and the metric is {baseline} in float, from which nothing can be "
            "lost; give a metric that is finite in float, or leave max_drop out"
        )
    if order == "sensitivity":
        alone = measure(sim, data, metric, higher_is_better=higher_is_better, groups="operation", file=file, show=show)
        wanted = [found.name for found in reversed(alone.ranked())]
    sign = 1 if higher_is_better else -1
    steps: list[ProgressiveStep] = []
    on, before = set[str](), baseline
    left, note = [name for name in members if name not in wanted], ""
    for i, name in enumerate(progress(wanted, total=len(wanted), title="progressive", unit="operation", show=show)):
        if limits.seconds is not None and time.monotonic() - began >= limits.seconds:
            left, note = [*left, *wanted[i:]], f"the budget of {limits.seconds:g} seconds is spent after {i} of {len(wanted)} operations"
            break
        on.update(members[name])
        value = score(_name(wanted[: i + 1]), on)
        steps.append(ProgressiveStep(name, tuple(members[name]), value, sign * _less(before, value), sign * _less(baseline, value)))
        before = value
        if limits.max_drop is not None and not steps[-1].lost <= limits.max_drop:
            left, note = [*left, *wanted[i:]], f"'{name}' is too much: {steps[-1].lost:.4g} lost, of {limits.max_drop:g} allowed"
            break
    remaining = [name for name in members if name in left]
    return Progressive(steps, baseline, higher_is_better, remaining, note, subject=subject_of(sim.model, sim.config))


def _less(before: float, value: float) -> float:
    return 0.0 if before == value else before - value  # two that are infinite are equal


def _in_order(order: str | Sequence[str], operations: list[str]) -> list[str]:
    if isinstance(order, str):
        if order not in ORDERS:
            raise ValueError(
                f"QuantSim.progressive: got order={shown(order)}; expected one of {', '.join(map(repr, ORDERS))}, or operations"
            )
        return operations[::-1] if order == "backward" else operations
    if unknown := [name for name in order if name not in operations]:
        close = close_names(unknown[0], operations) or operations[:5]
        raise ValueError(f"QuantSim.progressive: no operation {unknown[0]!r} is quantized; close to it: {', '.join(map(repr, close))}")
    return list(dict.fromkeys(order))


def _name(joined: Sequence[str]) -> str:
    """What a score file calls a step: who joined last, and a digest of all."""
    return f"{joined[-1]} too: {len(joined)} joined ({hashlib.sha256(repr(sorted(joined)).encode()).hexdigest()[:16]})"


def progressive_page(progressive: Progressive) -> Page:
    """The metric while operations join, in their order."""
    worst, steps = progressive.breaks, progressive.steps
    columns = [Column("step", number=True, ascending=True), Column("joined", wide=True)]
    columns += [
        Column("metric", number=True, ascending=progressive.higher_is_better),
        Column("drop", number=True),
        Column("lost", number=True),
    ]
    most = max([*(finite(abs(step.drop)) for step in steps), 1e-30])
    lines = [
        Line(
            [
                Cell(str(i), i),
                name_cell(step.operation, ", ".join(step.keys)),
                Cell(f"{step.value:.6g}", step.value),
                Cell(markup=f"{step.drop:.3g}" + drawing.bar(finite(step.drop) / most, bad=True), value=step.drop),
                Cell(f"{step.lost:.3g}", step.lost),
            ],
            severity="error" if step is worst and step.drop > 0 else "",
        )
        for i, step in enumerate(steps, 1)
    ]
    values = [progressive.baseline, *(step.value for step in steps)]
    axes = Axis("operations that are quantized"), Axis("metric")
    along, rows = list(range(len(values))), [None, *range(len(steps))]
    chart = Chart("The metric as operations join", *axes, [Series("metric", "inside", values)], rows, along, only="float", points=True)
    facts: list[Fact] = [
        ("float", f"{progressive.baseline:.6g}"),
        ("joined", str(len(steps))),
        ("left in float", str(len(progressive.left))),
    ]
    if worst is not None:
        facts.append(("largest drop", f"{worst.drop:.3g}", worst.operation))
    better = "higher" if progressive.higher_is_better else "lower"
    note = f"The metric, {better} is better, with one operation more quantized in each line; lost beside float."
    body = tiles(facts) + problems(progressive._notes) + table("Operations", note, columns, lines, chart)
    return Page("Progressive quantization", "Where accuracy breaks", body, about(progressive.subject), chart)
