"""Calibration: run data through a simulated model and note what reaches each quantizer, without leaving a trace in the model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from itertools import chain, islice
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from qsim.errors import CalibrationError
from qsim.graph.snapshot import unchanged
from qsim.progress import progress
from qsim.quantizers.observer import Counts, Observer
from qsim.quantizers.quantizer import Quantizer
from qsim.report.summary import Summary
from qsim.sim.hooks import hooked
from qsim.sim.memory import PeakMemory
from qsim.stages import Stages, seconds_text

Forward = Callable[[nn.Module, Any], Any]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_NESTS = (tuple, list, Mapping)


@dataclass(frozen=True)
class CalibrationReport:
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
        had to be raised for the bias.
    seconds : dict of str to float
        Time by stage: "data" (waiting for batches), "forward" (the model), "observing" (its tensors; only on the CPU: a device works
        behind the host's back, and "forward" is then both), "search" (choosing the encodings).
    memory : dict of str to PeakMemory
        Peak memory of the "process", and of each CUDA device by its name.
    summary : callable
        `QuantSim.summary` of the simulation that was calibrated.
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
        return "\n".join([head, f"{len(self.problems)} problems:", *(f"  {problem}" for problem in self.problems)])

    def times(self) -> str:
        """Seconds by stage, and peak memory, as text."""
        return ", ".join([seconds_text(self.seconds)] + [f"peak memory of {name} {peak}" for name, peak in self.memory.items()])

    def save(self, path: str | PathLike[str]) -> None:
        """Write one HTML page that needs no network: problems, times, and a histogram of every tensor with its range.

        Counts and times are those of this report; histograms and ranges those of the simulation at the time of writing, so a page that
        is written after `QuantSim.set_method` shows the new ranges.

        Parameters
        ----------
        path : path-like
            Such as "report.html"; an existing file is replaced.
        """
        from qsim.report.pages import calibration_page

        calibration_page(self).write(path)


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
) -> Observation:
    """Run the model in eval mode, without gradients and without quantization on every batch, while the `watched` quantizers observe.

    The model and the random number generators are afterwards as they were, also when a batch raises; what was observed until then
    stays observed.
    """
    noted = Observation()
    observers = {key: quantizers[key].observer for key in watched}
    with unchanged(model), torch.no_grad(), _observing(quantizers, watched), _clocked([quantizers[key] for key in watched], noted.seconds):
        model.eval()
        first = _FirstNonfinite(observers)
        for batch in _timed(batches, noted.seconds):
            with noted.seconds.stage("forward"):
                run(batch)
                first.look(noted.batches)
            noted.batches += 1
        with noted.seconds.stage("forward"):
            noted.first_nonfinite = first.batches()  # waits for the device
    return noted


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


def iterate(data: Iterable[Any], max_batches: int | None, show: bool, caller: str) -> Iterator[Any]:
    """The batches of `data`, with a progress bar where tqdm is installed. `caller`: who wants them, for errors: "QuantSim.calibrate"."""
    if isinstance(data, (Tensor, Mapping, str)) or not isinstance(data, Iterable):
        raise TypeError(
            f"{caller}: got data of type {type(data).__name__}; expected an iterable of batches, such as a DataLoader or a list: [batch]"
        )
    if max_batches is not None and max_batches < 1:
        raise ValueError(f"{caller}: got max_batches={max_batches}; expected at least 1, or None for all")
    return _batches(data, max_batches, show, caller)


def _batches(data: Iterable[Any], max_batches: int | None, show: bool, title: str) -> Iterator[Any]:
    length = len(data) if isinstance(data, Sized) else None
    total = max_batches if length is None else min(length, max_batches or length)
    # islice only now: a DataLoader draws random numbers when its iteration begins
    yield from progress(islice(data, max_batches), total=total, title=title.rpartition(".")[2], unit="batch", show=show)


def arguments_of(batch: Any, examples: Sequence[Arguments]) -> Arguments:
    """The model's arguments out of a batch as a DataLoader gives it: those of the example that takes most of it.

    Parameters
    ----------
    batch : Tensor, tuple, list or dict
        A dict gives the keyword arguments that the example has. A sequence fills as many arguments as the example has, and what is
        left (targets) is ignored; when its first entry is a sequence or dict where the example has a tensor, that entry holds the
        inputs: ``((image, depth), target)``.
    examples : sequence of (tuple, dict)
        Arguments of the example calls; what the tensors are does not matter.
    """
    found, refused = [], []
    for example in examples:
        try:
            found.append(_arguments_as(batch, example))
        except ValueError as error:
            refused.append(error)
    if not found:
        raise refused[0]
    return max(found, key=lambda arguments: len(arguments[0]) + len(arguments[1]))


def _arguments_as(batch: Any, example: Arguments) -> Arguments:
    args, kwargs = example
    if isinstance(batch, Mapping):
        if args:
            raise _unfit(f"a dict with {', '.join(map(repr, batch))}", f"{len(args)} positional")
        if missing := [name for name in kwargs if name not in batch]:
            raise _unfit(f"a dict without {', '.join(map(repr, missing))}", "keyword")
        return (), {name: batch[name] for name in kwargs}
    values = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
    wanted = list(args) or list(kwargs.values())
    if values and wanted and isinstance(values[0], _NESTS) and not isinstance(wanted[0], _NESTS):
        return _arguments_as(values[0], example)
    if len(values) < len(wanted):
        raise _unfit(f"{len(values)} values", f"{len(wanted)}")
    return (values[: len(args)], {}) if args else ((), dict(zip(kwargs, values, strict=False)))


def _unfit(got: str, wanted: str) -> ValueError:
    return ValueError(f"QuantSim: got a batch of {got}, and example_inputs had {wanted} arguments; pass forward=lambda model, batch: ...")


def to_device(arguments: Arguments, model: nn.Module) -> Arguments:
    """Arguments on the device of the model's first parameter or buffer, as DataLoaders leave them on the CPU."""
    first = next(chain(model.parameters(), model.buffers()), None)
    if first is None:
        return arguments
    device = first.device
    moved: Arguments = tree_map_only(Tensor, lambda value: value.to(device), arguments)
    return moved


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


def failure(problems: list[str]) -> CalibrationError:
    """The error that lists every quantizer without a range."""
    lines = "\n  ".join(problems)
    return CalibrationError(
        f"QuantSim: {len(problems)} quantizers got no range; all others have theirs, and what was observed is kept.\n  {lines}"
    )
