"""Calibration: run data through a simulated model and note what reaches each quantizer, without leaving a trace in the model."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qsim.errors import CalibrationError
from qsim.graph.plan.actions import PlannedQuantizer
from qsim.graph.record.containers import compute_parameters
from qsim.loggers.figures import Figures
from qsim.options import check_function, shown
from qsim.pages.markup import Fact, problems, tiles
from qsim.pages.page import Page
from qsim.pages.report import Report
from qsim.pages.subject import about
from qsim.quantizers.observer import Counts, Observer
from qsim.quantizers.quantizer import Quantizer
from qsim.runs.batches import Forward, iterate
from qsim.runs.hooks import hooked
from qsim.runs.memory import MemoryWatch, PeakMemory
from qsim.runs.sharding import sharded_around, sharded_modules
from qsim.runs.snapshot import Snapshot, evaluating, unchanged
from qsim.runs.unfit import UnfitBatchError, signature
from qsim.simulation.block_by_block import block_by_block, blocks_named
from qsim.simulation.range_choice import choose_encodings
from qsim.simulation.simulation import Simulation
from qsim.simulation.summary import Summary, facts_of, ranges_of, tensors_of
from qsim.stages import Stages, seconds_text
from qsim.table import counted


@dataclass(frozen=True)
class CalibrationReport(Report):
    """What a calibration saw. ``print(report)`` names every problem.

    Attributes
    ----------
    batches : int
        Batches of this call.
    counts : dict of str to Counts
        For every quantizer, what it has observed so far, earlier calls included: elements, NaN, +Inf, -Inf. For a weight, those of
        the weight.
    problems : list of str
        One sentence for each quantizer that met NaN or Inf, for each whose values overflow its float format, and for each whose scale
        had to be raised for the bias; and for each weight that no batch has read yet, unless the model is compiled. One for all weights
        that keep the scales that `restore` and its kin found.
    seconds : dict of str to float
        Time by stage: "data" (waiting for batches), "forward" (the model), "observing" (its tensors; only on the CPU: a device works
        behind the host's back, and "forward" is then both), "search" (choosing the encodings).
    memory : dict of str to PeakMemory
        Peak memory of the "process", and of each CUDA device by its name.
    summary : callable
        `QuantSim.summary` of the simulation that was calibrated.

    Examples
    --------
    >>> import tempfile
    >>> sim = qsim.QuantSim(torch.nn.Linear(3, 2), torch.zeros(1, 3))
    >>> report = sim.calibrate([torch.ones(4, 3), torch.zeros(4, 3)], progress=False)
    >>> report.batches, report.counts["input"].elements, report.problems
    (2, 24, [])
    >>> "forward" in report.times()
    True
    >>> report.save(tempfile.mktemp(".html"))
    """

    batches: int
    counts: dict[str, Counts]
    problems: list[str]
    seconds: dict[str, float]
    memory: dict[str, PeakMemory] = field(compare=False)
    summary: Callable[[], Summary] = field(repr=False, compare=False)

    def __str__(self) -> str:
        head = f"calibrated {len(self.counts)} quantizers on {self.batches} batches ({self.times()})"
        if not self.problems:
            return f"{head}\nno NaN, no Inf"
        return "\n".join([head, f"{len(self.problems)} problems:", *(f"  {problem}" for problem in counted(self.problems))])

    def times(self) -> str:
        """Seconds by stage, and peak memory, as text."""
        return ", ".join([seconds_text(self.seconds)] + [f"peak memory of {name} {peak}" for name, peak in self.memory.items()])

    def figures(self) -> Figures:
        """Those of the summary, batches and seconds."""
        found = self.summary().figures()
        seconds = {f"seconds/{stage}": seconds for stage, seconds in self.seconds.items()}
        return Figures({"batches": float(self.batches), **seconds, **found.scalars}, found.histograms)

    def page(self) -> Page:
        """Counts and times are those of this report; histograms and ranges those of the simulation now, so a page that is written after
        `QuantSim.set_method` shows the new ranges."""
        return calibration_page(self)


def calibrate(
    sim: Simulation,
    data: Iterable[Any],
    forward: Forward | None,
    *,
    max_batches: int | None,
    progress: bool,
    blocks: str | Sequence[str] | None = None,
    folder: str | os.PathLike[str] | None = None,
) -> CalibrationReport:
    """`QuantSim.calibrate` documents it."""
    stops = _blocks(sim, blocks, folder)
    quantizers = sim.quantizers()
    sim.weights()  # an error where the model was changed, before anything is observed
    memory = MemoryWatch(quantizer.scale.device for quantizer in quantizers.values())
    watched = [key for key, planned in sim.decisions.quantizers.items() if planned.parameter is None]
    if forward is not None:
        check_function("QuantSim.calibrate", "forward", forward, "forward(model, batch)")
    run = sim.forward_batch if forward is None else forward
    called, read = sim.called(), set[str]()
    observed_anew = sim.observed_with.anew(sim, {key: quantizers[key] for key in watched})
    with sim.switch.turned(True, falls_back=False), sharded_around(sim), _reading(sim, read), observed_anew:
        noted = observe(
            sim.model,
            quantizers,
            watched,
            iterate(data, max_batches, progress, "QuantSim.calibrate"),
            lambda batch: run(called, batch),
            stops,
            None if folder is None else Path(folder),
        )
    if noted.batches == 0:
        raise CalibrationError("QuantSim: calibrate got no batch. Is the iterator used up, or the data set empty?")
    _observe_unreached(sim)
    if not _is_compiled(sim.model):
        sim.read = (sim.read or frozenset()) | read
    with noted.seconds.stage("search"):
        problems = choose_encodings(sim)
    problems += filter(None, [sim.told_of_bound()])
    problems += _single_numbers(sim.decisions.quantizers, quantizers)
    problems += [
        f"'{key}' was read by no batch: what is computed with it was not seen. Calibrate with data that reach it" for key in sim.unread()
    ]
    problems += [
        f"'{key}' was reached by no batch since the parameters changed, and keeps its range. Calibrate with data that reach it"
        for key in watched
        if key in sim.observed_with.outdated and quantizers[key].enabled
    ]
    return report_of(noted, quantizers, problems, memory.peaks(), sim.summary)


def _blocks(sim: Simulation, blocks: str | Sequence[str] | None, folder: object) -> list[nn.Module]:
    """The modules that all batches pass one after the other."""
    if blocks is None:
        if folder is not None:
            raise ValueError(f"QuantSim.calibrate: got folder={shown(folder)} without blocks; say which: blocks='model.layers.*'")
        return []
    if _is_compiled(sim.model) or sharded_modules(sim):
        raise ValueError("QuantSim.calibrate: got blocks of a model that is compiled, or sharded by fully_shard; expected neither of them")
    return blocks_named(sim.model, [blocks] if isinstance(blocks, str) else blocks)


def _single_numbers(planned: Mapping[str, PlannedQuantizer], quantizers: Mapping[str, Quantizer]) -> Iterator[str]:
    """A sentence for each input of the model that had one value in all batches, as blank images and data that were never loaded have, and
    one for all activations that had, as masks of batches without padding have."""
    seen = {key: quantizers[key].observer for key, found in planned.items() if found.role in ("input", "activation")}
    alone = {
        key: f"{float(observer.lowest):g}"
        for key, observer in seen.items()
        if observer.counts.elements > 1 and observer.lowest.numel() == 1 and bool(observer.lowest == observer.highest)
    }
    inputs = {key for key in alone if planned[key].role == "input"}
    for key in inputs:
        yield f"'{key}' was {alone[key]} throughout, and its range is that of one number: calibrate with data as the model will meet them"
    others = [f"'{key}' {value}" for key, value in alone.items() if key not in inputs]
    if others and not inputs:
        more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
        yield (
            f"one value throughout, as a mask has in batches without padding: {', '.join(others[:_NAMED])}{more}. What else stands there "
            "later is cut to that range: calibrate with data in which they vary, or leave the operation in float (docs/calibrate.md)"
        )


_NAMED = 4


def _observe_unreached(sim: Simulation) -> None:
    """Observe the weights that layers compute which no example reached, as other weights are wherever they are read."""
    attributes = {key: planned.attribute for key, planned in sim.decisions.quantizers.items() if planned.attribute is not None}
    if not attributes:
        return
    with unchanged(sim.model), torch.no_grad(), sim.switch.turned(False, falls_back=False):
        sim.model.eval()
        for key, attribute in attributes.items():
            compute_parameters(sim.model.get_submodule(attribute.rpartition(".")[0]))
            sim.quantizers()[key].observe(attrgetter(attribute)(sim.model))


@contextlib.contextmanager
def _reading(sim: Simulation, read: set[str]) -> Iterator[None]:
    """Note the keys of the weights that are read within the context. Not of a compiled model, which a hook would have compiled again."""
    quantizers = {} if _is_compiled(sim.model) else {sim.quantizers()[key]: key for key in sim.decisions.weight_keys}
    with hooked(quantizers, lambda quantizer, _: read.add(quantizers[quantizer])):
        yield


def _is_compiled(model: nn.Module) -> bool:
    return any(module._compiled_call_impl is not None for module in model.modules())


@dataclass
class Observation:
    """What one pass over the data noted: number of batches, the batch in which each quantizer first met NaN or Inf, seconds."""

    batches: int = 0
    first_nonfinite: dict[str, int] = field(default_factory=dict)
    seconds: Stages = field(default_factory=lambda: Stages("data", "forward", "observing"))


def observe(
    model: nn.Module,
    quantizers: Mapping[str, Quantizer],
    watched: Collection[str],
    batches: Iterator[Any],
    run: Callable[[Any], object],
    blocks: Sequence[nn.Module] = (),
    folder: Path | None = None,
) -> Observation:
    """Run the model in eval mode, without gradients and without quantization on every batch, while the `watched` quantizers observe.

    The model and the random number generators are afterwards as they were, also when a batch raises; what was observed until then
    stays observed, but nothing of that batch if it is the first of its shapes and dtypes. With `blocks` nothing at all stays then.
    """
    noted = Observation()
    observers = {key: quantizers[key].observer for key in watched}
    with (
        unchanged(model, whole=False),
        torch.no_grad(),
        torch.compiler.set_stance("force_eager"),  # clocks and counts are Python's: a part that is compiled is so from the next call on
        evaluating(model),
        _observing(quantizers, watched),
        _clocked([quantizers[key] for key in watched], noted.seconds),
    ):
        first = _FirstNonfinite(observers)
        known = set[tuple[Any, ...]]()  # kinds of batches that the model has run on
        every = list(_timed(batches, noted.seconds)) if blocks else []
        if every:
            with noted.seconds.stage("forward"), _whole_or_not_at_all([quantizers[key] for key in watched]):
                for number in block_by_block(model, blocks, run, every, {key: quantizers[key] for key in watched}, folder):
                    first.look(number)
            noted.batches = len(every)
        for batch in _timed(batches, noted.seconds):
            with noted.seconds.stage("forward"):
                kind = signature(batch)
                with contextlib.nullcontext() if kind in known else _whole_or_not_at_all([quantizers[key] for key in watched]):
                    try:
                        run(batch)
                    except UnfitBatchError as error:
                        raise error.numbered("QuantSim.calibrate", noted.batches) from error.__cause__
                known.add(kind)
                first.look(noted.batches)
            noted.batches += 1
        with noted.seconds.stage("forward"):
            noted.first_nonfinite = first.batches()  # waits for the device
    return noted


@contextlib.contextmanager
def _whole_or_not_at_all(quantizers: Sequence[Quantizer]) -> Iterator[None]:
    """What they observe within the context is forgotten if it ends with an error: half a batch would be in the ranges."""
    before = [Snapshot(quantizer) for quantizer in quantizers]
    try:
        yield
    except Exception:
        for held in before:
            held.restore()
        raise


@contextlib.contextmanager
def _clocked(quantizers: Sequence[Quantizer], seconds: Stages) -> Iterator[None]:
    """Count the time that the quantizers take as "observing"; without that stage where the host does not wait for them."""
    if any(quantizer.scale.device.type != "cpu" for quantizer in quantizers):
        del seconds["observing"]
        yield
        return
    with hooked(quantizers, lambda *_: seconds.begin("observing"), lambda *_: seconds.end()):
        yield


def _timed(batches: Iterator[Any], seconds: Stages) -> Iterator[Any]:
    while True:
        with seconds.stage("data"):
            try:
                batch = next(batches)
            except StopIteration:
                return
        yield batch


@contextlib.contextmanager
def _observing(quantizers: Mapping[str, Quantizer], watched: Collection[str]) -> Iterator[None]:
    was = [(quantizer, quantizer.enabled, quantizer.observing, quantizer.training) for quantizer in quantizers.values()]
    for key, quantizer in quantizers.items():
        quantizer.enabled, quantizer.observing = False, key in watched
        quantizer.train(key in watched)  # running ranges follow batches in training mode alone
    try:
        yield
    finally:
        for quantizer, enabled, observing, training in was:
            quantizer.enabled, quantizer.observing = enabled, observing
            quantizer.train(training)


class _FirstNonfinite:
    """Finds the first batch in which each observer meets NaN or Inf, without waiting for the device in between."""

    def __init__(self, observers: Mapping[str, Observer]) -> None:
        self._observers = observers
        self._before = self._nonfinite()
        self._first = torch.full_like(self._before, -1)

    def _nonfinite(self) -> Tensor:
        counters = [observer.counters for observer in self._observers.values()]
        if not counters:
            return torch.zeros(0, dtype=torch.int64)
        return torch.stack([c.to(counters[0].device) for c in counters])[:, 1:].sum(1)

    def look(self, batch: int) -> None:
        self._first = torch.where((self._first < 0) & (self._nonfinite() > self._before), batch, self._first)

    def batches(self) -> dict[str, int]:
        return {key: first for key, first in zip(self._observers, self._first.tolist(), strict=True) if first >= 0}


def report_of(
    noted: Observation,
    quantizers: Mapping[str, Quantizer],
    problems: list[str],
    memory: dict[str, PeakMemory],
    summary: Callable[[], Summary],
) -> CalibrationReport:
    """The report on what `quantizers` hold after a pass, on top of the `problems` that choosing encodings met."""
    counts = {key: quantizer.counts for key, quantizer in quantizers.items()}
    problems = list(problems)
    for key, count in counts.items():
        if count.nonfinite:
            where = f", first in batch {noted.first_nonfinite[key]}" if key in noted.first_nonfinite else ""
            problems.append(f"'{key}' met {count}{where}; its range comes from the finite ones")
    problems += [problem for key, quantizer in quantizers.items() if (problem := _overflow(key, quantizer))]
    return CalibrationReport(noted.batches, counts, problems, dict(noted.seconds), memory, summary)


def _overflow(key: str, quantizer: Quantizer) -> str | None:
    found = quantizer.format_counts
    if found is None or not found.overflows:
        return None
    largest = torch.maximum(-quantizer.min, quantizer.max).item()
    return f"'{key}': {found.overflows} of {found.elements} values overflow {quantizer.spec.dtype} (largest magnitude {largest:.6g})"


def calibration_page(report: CalibrationReport) -> Page:
    """What a calibration saw, and the ranges it led to."""
    summary = report.summary()
    facts: list[Fact] = [("batches", str(report.batches)), *facts_of(summary)]
    stages = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in report.seconds.items())
    facts.append(("seconds", f"{sum(report.seconds.values()):.2f}", stages))
    for device, peak in report.memory.items():
        facts.append((f"peak memory of {device}", f"{peak.peak / 2**20:.0f} MiB", f"raised by {peak.raised / 2**20:.0f} MiB"))
    body = tiles(facts) + problems(report.problems) + tensors_of(summary)
    return Page("Calibration", "What was observed, and the ranges that were chosen", body, about(summary.subject), ranges_of(summary.rows))
