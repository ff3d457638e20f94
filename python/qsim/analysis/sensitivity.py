"""What each quantizer costs by itself: the metric with that one on and all others off."""

from __future__ import annotations

import glob
import hashlib
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from qsim.analysis.metric import Metric, broken_in, told_of_broken, value_of
from qsim.analysis.scores import ScoreFile, digest
from qsim.loggers.figures import Figures
from qsim.options import check_flag, check_whole, shown
from qsim.pages import drawing
from qsim.pages.chart import Axis, Chart, Series
from qsim.pages.markup import Cell, Column, Line, count_cell, finite, name_cell, problems, table, tiles
from qsim.pages.page import Page
from qsim.pages.report import Report
from qsim.pages.subject import about
from qsim.progress import progress
from qsim.quantizers.quantizer import Quantizer
from qsim.runs.report_subject import subject_of
from qsim.runs.sharding import sharded_around, whole
from qsim.runs.snapshot import unchanged
from qsim.simulation.simulation import Simulation
from qsim.table import decibel, percent, text_table

_MUCH = 0.1  # share of the noise of all quantizers together that is marked
GROUPS = ("quantizer", "operation")


@dataclass(frozen=True)
class Score:
    """The metric with one group of quantizers on.

    Attributes
    ----------
    name : str
        The quantizer's key, or with ``groups="operation"`` the operation's name.
    keys : tuple of str
        The quantizers that were on.
    operation : str
        Name of the operation that they belong to, as a pattern for `Config.override`.
    value : float
    """

    name: str
    keys: tuple[str, ...]
    operation: str
    value: float

    @property
    def broken(self) -> int:
        """Of a value in dB: how many results are NaN or Inf and finite in float, which makes it -Inf."""
        return broken_in(self.value)


@dataclass(frozen=True)
class Sensitivity(Report):
    """What `QuantSim.sensitivity` returns; ``print`` shows the most sensitive first.

    Attributes
    ----------
    scores : list of Score
        One per group, in the order of the model.
    baseline : float
        The metric with every quantizer off.
    quantized : float
        With all on that were on.
    higher_is_better : bool
    unit : str
        "dB" where the metric is qsim's own, the SQNR of the results; "" of a user's metric.
    ranges : str
        Whether the simulation had ranges that its config does not give; "" where it had not.

    Examples
    --------
    >>> import tempfile
    >>> from torch import nn
    >>> sim = qsim.QuantSim(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.zeros(1, 4))
    >>> report = sim.calibrate([torch.randn(32, 4)], progress=False)
    >>> sensitivity = sim.sensitivity([torch.randn(32, 4)], progress=False)
    >>> first = sensitivity.ranked()[0]
    >>> first.value == min(score.value for score in sensitivity.scores), len(sensitivity.worst(2))
    (True, 2)
    >>> 0 < sensitivity.lost(first.value) <= 30, 0 <= sensitivity.share(first.value) <= 1.5, sensitivity.best >= first.value
    (True, True, True)
    >>> sensitivity.save(tempfile.mktemp(".html"))
    """

    scores: list[Score]
    baseline: float
    quantized: float
    higher_is_better: bool
    unit: str = ""
    ranges: str = ""

    def ranked(self) -> list[Score]:
        """The scores, most sensitive first; NaN before all, then what breaks most results. Equals stay in the order of the model."""
        sign = 1 if self.higher_is_better else -1
        return sorted(self.scores, key=lambda score: (not math.isnan(score.value), -score.broken, sign * score.value))

    def worst(self, count: int) -> list[str]:
        """Names of the `count` most sensitive operations, as patterns for `Config.override`.

        Examples
        --------
        >>> scores = [Score("fc.weight", ("fc.weight",), "fc", 0.91), Score("stem.weight", ("stem.weight",), "stem", 0.62)]
        >>> Sensitivity(scores, baseline=0.95, quantized=0.6, higher_is_better=True).worst(1)
        ['stem']
        """
        check_whole("Sensitivity.worst", "count", count, least=0)
        return list(dict.fromkeys(score.operation for score in self.ranked()))[:count]

    @property
    def best(self) -> float:
        """What losses are counted from: the metric in float; where that is infinite (dB), the best finite one of a group alone."""
        if not math.isinf(self.baseline):
            return self.baseline
        finite = [score.value for score in self.scores if math.isfinite(score.value)]
        return (max if self.higher_is_better else min)(finite, default=math.nan)

    def lost(self, value: float) -> float:
        """How much worse than `best` a value of the metric is; negative where it is better. In dB, where float is infinitely good: what the
        SQNR with all quantized would win back without this noise, if noises add up; at most 30 dB."""
        if self.unit == "dB" and math.isinf(self.baseline):
            share = self.share(value)
            return math.nan if math.isnan(share) else 10 * math.log10(1 / max(1 - share, 1e-3))
        return (self.best - value) * (1 if self.higher_is_better else -1)

    def share(self, value: float) -> float:
        """Of an SQNR in dB: its noise as a part of that with all quantized, ``10 ** ((quantized - value) / 10)``; NaN of other metrics.

        The shares need not add up to 1: errors of tensors may cancel, and what is quantized changes what comes after it. Where results are
        broken (-Inf dB), what breaks some by itself has all of the noise, and everything else none.
        """
        if self.unit != "dB" or math.isnan(value) or math.isnan(self.quantized) or self.quantized == math.inf:
            return math.nan
        return 1.0 if value == self.quantized else 10 ** (min(self.quantized - value, 300.0) / 10)

    def __str__(self) -> str:
        better = "higher" if self.higher_is_better else "lower"
        if self.unit == "dB":
            head = f"SQNR of the results: {self.quantized:.1f} dB with all quantized; one at a time, lost: what it would win back in float:"
            columns = ("quantized alone", "SQNR dB", "lost dB", "of all noise", *(["NaN, Inf"] if self._breaks else []))
            rows = [
                (s.name, decibel(s.value), _number(self.lost(s.value)), _share(self.share(s.value)), str(s.broken or ""))[: len(columns)]
                for s in self.ranked()
            ]
            return "\n".join([head, text_table(columns, rows, columns[1:]), *self._notes])
        head = f"metric ({better} is better): float {self.baseline:.6g}, quantized {self.quantized:.6g}; one at a time:"
        plain = [(score.name, f"{score.value:.6g}", _number(self.lost(score.value))) for score in self.ranked()]
        return "\n".join([head, text_table(("quantized alone", "metric", "lost"), plain, ("metric", "lost")), *self._notes])

    @property
    def _breaks(self) -> bool:
        return any(broken_in(value) for value in (self.quantized, *(score.value for score in self.scores)))

    @property
    def _notes(self) -> list[str]:
        """What a person should know."""
        told = told_of_broken(broken_in(self.quantized))
        return [*([f"with all quantized {told}"] if told else []), *([self.ranges] if self.ranges else [])]

    def figures(self) -> Figures:
        """What each group loses alone, and the metric."""
        lost = {f"lost_alone/{score.name}": self.lost(score.value) for score in self.scores}
        return Figures({"metric/float": self.baseline, "metric/quantized": self.quantized, **lost})

    def page(self) -> Page:
        """See `Report.page`."""
        return sensitivity_page(self)


def _number(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else ""  # a group that costs nothing has +Inf dB


def _share(share: float) -> str:
    return "" if math.isnan(share) else "none" if share < 1e-6 else "> 1000 %" if share > 10 else percent(share)


def measured(sim: Simulation, metric: Metric, groups: str) -> dict[str, str]:
    """What tells measurements apart; the data are not looked at."""
    quantizers = sim.quantizers()
    return {
        "config": hashlib.sha256(sim.config.to_json().encode()).hexdigest(),
        "weights": digest((name, whole(tensor)) for name, tensor in sim.model.state_dict().items()),
        "encodings": digest(
            (f"{key}.{name}", whole(getattr(q, name))) for key, q in quantizers.items() for name in ("scale", "zero_point")
        ),
        "enabled quantizers": hashlib.sha256(repr([key for key, q in quantizers.items() if q.enabled]).encode()).hexdigest(),
        "groups": groups,
        "metric": getattr(metric, "__qualname__", type(metric).__qualname__),
    }


def measure(
    sim: Simulation, data: Any, metric: Metric, *, higher_is_better: bool, groups: str, file: ScoreFile, show: bool, unit: str = ""
) -> Sensitivity:
    """The metric of the sim in float, as it is, and with the enabled quantizers of each group alone."""
    check_flag("QuantSim.sensitivity", "higher_is_better", higher_is_better)
    if isinstance(data, Iterator):
        raise TypeError(
            f"QuantSim.sensitivity: got data of type {type(data).__name__}, which is used up after one pass; every quantizer needs one: "
            "give a list or a DataLoader"
        )
    quantizers = {key: quantizer for key, quantizer in sim.quantizers().items() if quantizer.enabled}
    operations = {key: sim.decisions.quantizers[key].operation for key in quantizers}
    members = members_of(operations, groups)

    def score(name: str, on: Collection[str]) -> float:
        if name not in file.scores:
            file.add(name, value_with(sim, quantizers, on, metric, data, "QuantSim.sensitivity"))
        return file.scores[name]

    with sharded_around(sim), unchanged(sim), torch.no_grad():
        sim.eval()
        whole = score("(float)", ()), score("(quantized)", quantizers)
        each = progress(members.items(), total=len(members), title="sensitivity", unit="group", show=show)
        scores = [Score(name, tuple(keys), glob.escape(operations[keys[0]]), score(name, keys)) for name, keys in each]
    return Sensitivity(scores, *whole, higher_is_better, unit, subject=subject_of(sim.model, sim.config))


def value_with(sim: Simulation, quantizers: Mapping[str, Quantizer], on: Collection[str], metric: Metric, data: Any, caller: str) -> float:
    """The metric with those of the `quantizers` on whose keys are in `on`, the others off. With none what falls back is in float too."""
    for key, quantizer in quantizers.items():
        quantizer.enabled = key in on
    with sim.switch.turned(sim.switch.on and bool(on)):
        return value_of(metric, sim, data, caller)


def members_of(operations: Mapping[str, str], groups: str) -> dict[str, list[str]]:
    """Keys of quantizers by group; `operations` are theirs by key."""
    if groups not in GROUPS:
        raise ValueError(f"QuantSim.sensitivity: got groups={shown(groups)}; expected one of {', '.join(map(repr, GROUPS))}")
    found: dict[str, list[str]] = {}
    for key, operation in operations.items():
        found.setdefault(key if groups == "quantizer" else operation, []).append(key)
    return found


def sensitivity_page(sensitivity: Sensitivity) -> Page:
    """The metric with each group alone, the most sensitive first."""
    ranked = sensitivity.ranked()
    unit = f" {sensitivity.unit}" if sensitivity.unit else ""
    loss = [sensitivity.lost(score.value) for score in ranked]
    most = max([*(abs(finite(lost)) for lost in loss), 1e-30])
    measured = "SQNR" if unit else "metric"
    columns = [Column("quantized alone", wide=True), Column(measured + unit, number=True, ascending=sensitivity.higher_is_better)]
    columns += [Column("lost" + unit, number=True), *([Column("of all noise", number=True)] if unit else [])]
    columns += [Column("NaN, Inf", number=True)] if sensitivity._breaks else []
    lines = [
        Line(
            [
                name_cell(score.name, ", ".join(score.keys) if len(score.keys) > 1 else ""),
                Cell(f"{score.value:.6g}", score.value),
                Cell(markup=_number(lost) + drawing.bar(abs(finite(lost)) / most, bad=True), value=lost),
                *([Cell(_share(sensitivity.share(score.value)), sensitivity.share(score.value))] if unit else []),
                *([count_cell(score.broken)] if sensitivity._breaks else []),
            ],
            severity="error" if math.isnan(score.value) or score.broken else "warning" if sensitivity.share(score.value) >= _MUCH else "",
        )
        for score, lost in zip(ranked, loss, strict=True)
    ]
    facts = [("float", f"{sensitivity.baseline:.6g}"), ("quantized", f"{sensitivity.quantized:.6g}"), ("groups", str(len(ranked)))]
    better = "higher" if sensitivity.higher_is_better else "lower"
    note = f"The metric, {better} is better, with one group quantized and everything else in float."
    if unit:
        note += " Lost: what the SQNR with all quantized would win back with the group in float, if noises add up."
        note += f" Marked: at least {percent(_MUCH)} of all noise."
    places = {score.name: i for i, score in enumerate(ranked)}
    values = [sensitivity.lost(score.value) for score in sensitivity.scores]
    axes = Axis("group, in the order of the model"), Axis("lost by it alone", sensitivity.unit)
    rows = [places[score.name] for score in sensitivity.scores]
    chart = Chart("What each group loses alone", *axes, [Series("lost", "inside", values)], rows) if rows else None
    body = tiles(facts) + problems(sensitivity._notes) + table("Groups", note, columns, lines, chart)
    return Page("Sensitivity", "What each quantizer costs by itself", body, about(sensitivity.subject), chart)
