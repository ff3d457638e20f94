"""Comparing every tensor of the simulation with its float counterpart, in bounded memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from qsim.analysis.deviation import ZEROS, Deviation, kept_floats
from qsim.analysis.metric import told_of_broken
from qsim.graph.plan.actions import PlannedQuantizer
from qsim.loggers.figures import Figures
from qsim.options import shown
from qsim.pages import drawing
from qsim.pages.chart import Axis, Chart, Limit, Series
from qsim.pages.markup import Cell, Column, Fact, Line, count_cell, name_cell, problems, table, tiles
from qsim.pages.page import Page
from qsim.pages.report import Report
from qsim.pages.subject import about
from qsim.quantizers.quantizer import Quantizer
from qsim.runs.hooks import hooked
from qsim.runs.mapped import release
from qsim.runs.memory import give_back
from qsim.runs.report_subject import subject_of
from qsim.runs.sharding import sharded_around, whole
from qsim.runs.snapshot import unchanged
from qsim.simulation.simulation import Simulation
from qsim.table import counted, decibel, text_table

_LIMITS = (  # as powers: what is noise, beside the signal
    Limit(10.0, "error", "below 10 dB: noise of more than a tenth of the signal's power"),
    Limit(20.0, "warning", "below 20 dB: more than a hundredth"),
)

_Call = tuple[str, int]  # a quantizer's key, and which of its calls: modules may be used repeatedly


@dataclass(frozen=True)
class TensorError:
    """How far one tensor of the simulation is from float.

    Attributes
    ----------
    key, role, op : str
        The quantizer's, as in `Summary`.
    local : Deviation
        What this quantizer alone does: the float model's tensor, quantized, beside itself.
    accumulated : Deviation
        The simulation's tensor, with everything upstream quantized, beside the float model's. Of a weight, the same as `local`.
    """

    key: str
    role: str
    op: str
    local: Deviation
    accumulated: Deviation


@dataclass(frozen=True)
class Comparison(Report):
    """What `QuantSim.compare` returns; ``print`` shows the tensors, those that quantization hurts most by themselves first.

    Attributes
    ----------
    rows : list of TensorError
        In the order of the model.
    output : Deviation
        What the model returns, simulated beside float: all floating-point tensors in it.
    notes : list of str
        Tensors that could not be compared, and why.

    Examples
    --------
    >>> import tempfile
    >>> sim = qsim.QuantSim(torch.nn.Linear(3, 2), torch.zeros(1, 3))
    >>> x = torch.randn(64, 3)
    >>> report = sim.calibrate([x], progress=False)
    >>> comparison = sim.compare(x)
    >>> comparison.output.sqnr > 20, comparison.worst()[0].local.sqnr == min(row.local.sqnr for row in comparison.rows)
    (True, True)
    >>> comparison.save(tempfile.mktemp(".html"))
    """

    rows: list[TensorError]
    output: Deviation
    notes: list[str] = field(default_factory=list)

    def __getitem__(self, key: str) -> TensorError:
        """The row of a quantizer."""
        found = next((row for row in self.rows if row.key == key), None)
        if found is None:
            raise KeyError(f"Comparison: no quantizer {key!r} was compared; see comparison.rows")
        return found

    def worst(self, by: str = "local") -> list[TensorError]:
        """The rows, smallest SQNR first, those without one before all.

        Parameters
        ----------
        by : "local" or "accumulated"
        """
        if by not in ("local", "accumulated"):
            raise ValueError(f"Comparison.worst: got by={shown(by)}; expected 'local' or 'accumulated'")
        ratios = {row.key: getattr(row, by).sqnr for row in self.rows}
        return sorted(self.rows, key=lambda row: (not math.isnan(ratios[row.key]), ratios[row.key]))

    def __str__(self) -> str:
        head = ("quantizer", "role", "operation", "local dB", "accumulated dB", "local max", "accumulated max", "NaN, Inf")
        rows = [
            (
                *(row.key, row.role, row.op, decibel(row.local.sqnr), decibel(row.accumulated.sqnr)),
                *(f"{row.local.max_error:.3g}", f"{row.accumulated.max_error:.3g}", str(row.accumulated.nonfinite or "")),
            )
            for row in self.worst()
        ]
        output = f"{len(rows)} tensors; SQNR of the output {decibel(self.output.sqnr)} dB, largest error {self.output.max_error:.3g}"
        return "\n".join([output, text_table(head, rows, head[3:]), *(f"note: {note}" for note in counted(self.notes))])

    def figures(self) -> Figures:
        """SQNR in dB of every tensor, by its own quantizer and accumulated, and of the output."""
        found = {"sqnr/output": self.output.sqnr}
        for row in self.rows:
            found |= {f"sqnr_local/{row.key}": row.local.sqnr, f"sqnr_accumulated/{row.key}": row.accumulated.sqnr}
        return Figures(found)

    def page(self, beside: Comparison | None = None) -> Page:
        """See `Report.page`; with another run beside it, of which it shows what was gained."""
        return comparison_page(self, beside)

    def save(self, path: str | PathLike[str], beside: Comparison | None = None) -> None:
        """Write it as one HTML page that needs no network, or its curve as a picture.

        Parameters
        ----------
        path : path-like
            Such as "comparison.html", or "comparison.png" or "comparison.csv" as in `Report.save`; an existing file is replaced.
        beside : Comparison, optional
            Another run, such as that of another config: the page then has its accumulated SQNR too, and what this one gains over it.
        """
        if beside is not None and not isinstance(beside, Comparison):
            raise TypeError(f"Comparison.save: got beside={shown(beside)}; expected another comparison, other_sim.compare(batch)")
        self._write(lambda: self.page(beside), path)


def compare(sim: Simulation, planned: Mapping[str, PlannedQuantizer], run: Callable[[], Any], memory: int) -> Comparison:
    """Run the model in float and simulated, over and over, each time comparing as many tensors as fit into `memory`.

    The first pass of each pair stores float tensors until they fill `memory`, the second compares and drops them; the next pair goes on
    behind. At least one tensor fits always. Most models need one pair, others about ``bytes of all tensors / memory`` pairs.

    Parameters
    ----------
    sim : Simulation
        With every enabled quantizer calibrated.
    planned : mapping of str to PlannedQuantizer
        Of its quantizers, by key.
    run : callable
        Runs the model on the batch.
    memory : int
        Bytes.
    """
    return _Walk(sim, planned, run).compare(memory)


class _Walk:
    def __init__(self, sim: Simulation, planned: Mapping[str, PlannedQuantizer], run: Callable[[], Any]) -> None:
        self.sim, self.run = sim, run
        self.quantizers, self.released = sim.quantizers(), sim.released()
        self.rows = {key: TensorError(key, plan.role, plan.op, Deviation(), Deviation()) for key, plan in planned.items()}
        self.weights = {key: whole(attrgetter(plan.parameter)(sim.model)) for key, plan in planned.items() if plan.parameter}
        self.activations = [quantizer for key, quantizer in self.quantizers.items() if key not in self.weights]
        self.subject = subject_of(sim.model, sim.config)
        self.seen: dict[_Call, bool] = {}  # calls of the float model, and whether the simulation made them too

    def compare(self, memory: int) -> Comparison:
        with torch.no_grad():
            for key, weight in self.weights.items():
                quantized = self.quantizers[key].quantize(weight, fallback=self.released.get(key))
                self.rows[key].local.add(weight, quantized)
                self.rows[key].accumulated.add(weight, quantized)
                del quantized
                if release(weight):
                    give_back()
            complete = False
            while not complete:
                stored, complete, expected, returned = self._float_pass(memory)
                self.seen |= dict.fromkeys(stored, False)
                found = self._simulated_pass(stored)
        output = Deviation()
        for x, y in zip(expected, found, strict=False):
            if x.shape == y.shape:
                output.add(x, y)
        lost = dict.fromkeys(key for (key, _), met in self.seen.items() if not met)
        notes = [f"'{key}' could not be compared in all its calls: the simulation took another path, or other shapes" for key in lost]
        notes += _about_output(output, returned)
        compared = self.weights.keys() | {key for key, _ in self.seen}
        return Comparison([row for key, row in self.rows.items() if key in compared], output, notes, subject=self.subject)

    def _float_pass(self, memory: int) -> tuple[dict[_Call, Tensor], bool, list[Tensor], str]:
        """Tensors of the float model that were not met before, as many as fit; whether these are all; what the model returns, and of which
        class that is."""
        stored: dict[_Call, Tensor] = {}
        room, full = memory, False
        enabled = {key for key, quantizer in self.quantizers.items() if quantizer.enabled}

        number = _Numbered(self.quantizers)

        def look(quantizer: Quantizer, args: tuple[Tensor, ...]) -> None:
            nonlocal room, full
            call, x = number(quantizer), args[0]
            if call in self.seen or full:
                return
            room -= x.numel() * x.element_size()
            if stored and room < 0:
                full = True
                return
            stored[call] = x.clone()  # a statement in place may change it
            quantizer.enabled = call[0] in enabled
            self.rows[call[0]].local.add(x, quantizer.quantize(x, fallback=self.released.get(call[0])))
            quantizer.enabled = False

        in_float = self.sim.switch.turned(True, falls_back=False)
        with sharded_around(self.sim), unchanged(self.sim), hooked(self.activations, before=look), in_float:
            self.sim.eval()
            for quantizer in self.quantizers.values():
                quantizer.enabled = False
            result = self.run()
            return stored, not full, kept_floats(result), type(result).__name__

    def _simulated_pass(self, stored: dict[_Call, Tensor]) -> list[Tensor]:
        """Compare with what is stored, and drop it. Returns what the model returns."""

        number = _Numbered(self.quantizers)

        def look(quantizer: Quantizer, _: object, y: Tensor) -> None:
            call = number(quantizer)
            expected = stored.pop(call, None)
            if expected is not None and expected.shape == y.shape:
                self.seen[call] = True
                self.rows[call[0]].accumulated.add(expected, y)

        with sharded_around(self.sim), unchanged(self.sim), hooked(self.activations, after=look):
            self.sim.eval()
            return kept_floats(self.run())


class _Numbered:
    """Adds to a hook's quantizer which of its calls it is: (key, 1), (key, 2) ..."""

    def __init__(self, quantizers: Mapping[str, Quantizer]) -> None:
        self._keys = {id(quantizer): key for key, quantizer in quantizers.items()}
        self._calls: Counter[str] = Counter()

    def __call__(self, quantizer: Quantizer) -> _Call:
        key = self._keys[id(quantizer)]
        self._calls[key] += 1
        return key, self._calls[key]


def _about_output(output: Deviation, returned: str) -> list[str]:
    """What keeps the SQNR of the output from telling anything."""
    if not output.elements:
        return [f"nothing of what the model returns ({returned}) was compared: it has no floating-point tensors of the same shapes"]
    if not output.compared:
        return ["nothing of what the model returns was compared: it is NaN or Inf throughout"]
    if output.broken:
        return [told_of_broken(output.broken)]
    if not output.signal:
        return [f"{ZEROS} for this batch: the SQNR of the output says nothing"]
    return []


def comparison_page(comparison: Comparison, beside: Comparison | None = None) -> Page:
    """Errors of all tensors, in the order of the model; those of another run beside them."""
    columns = [
        Column("quantizer", wide=True),
        *(Column(head, number=True, ascending=True) for head in ("local dB", "accumulated dB")),
        *(Column(head, number=True) for head in ("local max", "accumulated max", "NaN, Inf")),
    ]
    others = {} if beside is None else {row.key: row.accumulated for row in beside.rows}
    if beside is not None:
        columns += [Column(head, number=True, ascending=True) for head in ("beside dB", "gained dB")]
    rows = comparison.rows
    finite = [d.sqnr for row in rows for d in (row.local, row.accumulated) if math.isfinite(d.sqnr)]
    top = max([*finite, 1.0])
    lines = [
        Line(
            [
                name_cell(row.key, f"{row.role} · {row.op}"),
                *(_ratio_cell(deviation, top) for deviation in (row.local, row.accumulated)),
                *(Cell(f"{d.max_error:.3g}", d.max_error) for d in (row.local, row.accumulated)),
                count_cell(row.accumulated.nonfinite),
                *([] if beside is None else _beside_cells(row.accumulated, others.get(row.key))),
            ],
            severity=_severity(row),
        )
        for row in rows
    ]
    facts: list[Fact] = [("tensors", str(len(rows))), ("SQNR of the output", f"{decibel(comparison.output.sqnr)} dB")]
    facts.append(("largest error of the output", f"{comparison.output.max_error:.3g}"))
    known = about(comparison.subject)
    if beside is not None:
        gained = decibel(comparison.output.sqnr - beside.output.sqnr)
        facts.append(("SQNR of the other run's output", f"{decibel(beside.output.sqnr)} dB", f"{gained} dB gained"))
        known += [(f"other run's {name}", text) for name, text in about(beside.subject) if (name, text) not in known]
    note = "Local: the float tensor beside itself quantized. Accumulated: with everything before it quantized too. Higher dB is closer."
    chart = _curve(rows, others)
    body = tiles(facts) + problems(comparison.notes) + table("Tensors", note, columns, lines, chart)
    title = "How far each tensor is from what the float model computes"
    return Page("Comparison with float", title, body, known, chart)


def _curve(rows: Sequence[TensorError], others: Mapping[str, Deviation]) -> Chart | None:
    """SQNR along the model, of all tensors but weights, which have no error of others."""
    places = [i for i, row in enumerate(rows) if row.role != "weight"]
    if not places:
        return None
    path = [rows[i] for i in places]
    series = [
        Series("local", "inside", [row.local.sqnr for row in path]),
        Series("accumulated", "second", [row.accumulated.sqnr for row in path]),
    ]
    if others:
        beside = [others[row.key].sqnr if row.key in others else math.nan for row in path]
        series.append(Series("accumulated of the other run", "third", beside))
    axes = Axis("tensor, in the order of the model"), Axis("SQNR to float", "dB")
    return Chart("SQNR of every tensor along the model", *axes, series, places, limits=_LIMITS)


def _severity(row: TensorError) -> str:
    """That of the lowest limit that its own SQNR, or the accumulated one, misses; NaN and Inf are errors."""
    if row.accumulated.nonfinite:
        return "error"
    ratios = (row.local.sqnr, row.accumulated.sqnr)
    return next((limit.severity for limit in _LIMITS if any(ratio < limit.value for ratio in ratios)), "")


def _beside_cells(mine: Deviation, other: Deviation | None) -> list[Cell]:
    if other is None:
        return [Cell(value=math.nan), Cell(value=math.nan)]
    gained = mine.sqnr - other.sqnr
    return [Cell(decibel(other.sqnr), other.sqnr), Cell(decibel(gained), gained, bad=gained < 0)]


def _ratio_cell(deviation: Deviation, top: float) -> Cell:
    text = decibel(deviation.sqnr)
    return Cell(markup=text + drawing.bar(deviation.sqnr / top), value=deviation.sqnr) if text else Cell(value=math.nan)
