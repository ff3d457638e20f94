"""Calibration: run data through a simulated model and note what reaches each quantizer, without leaving a trace in the model."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from qsim.errors import CalibrationError
from qsim.graph.snapshot import unchanged
from qsim.observer import Counts, Observer
from qsim.quantizer import Quantizer

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
        Time by stage: "data" (waiting for batches), "forward" (the model, observing), "encodings" (choosing them).
    """

    batches: int
    counts: dict[str, Counts]
    problems: list[str]
    seconds: dict[str, float]

    def __str__(self) -> str:
        times = ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in self.seconds.items())
        head = f"calibrated {len(self.counts)} quantizers on {self.batches} batches ({times})"
        if not self.problems:
            return f"{head}\nno NaN, no Inf"
        return "\n".join([head, f"{len(self.problems)} problems:", *(f"  {problem}" for problem in self.problems)])


@dataclass
class Observation:
    """What one pass over the data noted: number of batches, the batch in which each quantizer first met NaN or Inf, seconds."""

    batches: int = 0
    first_nonfinite: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=lambda: {"data": 0.0, "forward": 0.0})


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
    with unchanged(model), torch.no_grad(), _observing(quantizers, watched):
        model.eval()
        first = _FirstNonfinite(observers)
        for batch in _timed(batches, noted.seconds):
            started = time.perf_counter()
            run(batch)
            first.look(noted.batches)
            noted.batches += 1
            noted.seconds["forward"] += time.perf_counter() - started
    noted.first_nonfinite = first.batches()
    return noted


def _timed(batches: Iterator[Any], seconds: dict[str, float]) -> Iterator[Any]:
    while True:
        started = time.perf_counter()
        try:
            batch = next(batches)
        except StopIteration:
            return
        finally:
            seconds["data"] += time.perf_counter() - started
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


def iterate(data: Iterable[Any], max_batches: int | None, progress: bool) -> Iterator[Any]:
    """The batches of `data`, with a progress bar where tqdm is installed."""
    if isinstance(data, (Tensor, Mapping, str)) or not isinstance(data, Iterable):
        raise TypeError(
            f"QuantSim.calibrate: got data of type {type(data).__name__}; expected an iterable of batches, such as a DataLoader or "
            "a list: [batch]"
        )
    if max_batches is not None and max_batches < 1:
        raise ValueError(f"QuantSim.calibrate: got max_batches={max_batches}; expected at least 1, or None for all")
    return _batches(data, max_batches, _bar() if progress else None)


def _batches(data: Iterable[Any], max_batches: int | None, bar: Any) -> Iterator[Any]:
    batches = islice(data, max_batches)  # only now: a DataLoader draws random numbers when its iteration begins
    if bar is None:
        yield from batches
    else:
        length = len(data) if isinstance(data, Sized) else None
        total = max_batches if length is None else min(length, max_batches or length)
        yield from bar(batches, total=total, desc="calibrate", unit="batch", leave=False)


def _bar() -> Any:
    try:
        from tqdm.auto import tqdm
    except ImportError:  # an optional extra: qsim[report]
        return None
    return tqdm


def arguments_of(batch: Any, example: Arguments) -> Arguments:
    """The model's arguments out of a batch as a DataLoader gives it.

    Parameters
    ----------
    batch : Tensor, tuple, list or dict
        A dict gives the keyword arguments that the example has. A sequence fills as many arguments as the example has, and what is
        left (targets) is ignored; when its first entry is a sequence or dict where the example has a tensor, that entry holds the
        inputs: ``((image, depth), target)``.
    example : (tuple, dict)
        Arguments of the example inputs; what the tensors are does not matter.
    """
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
        return arguments_of(values[0], example)
    if len(values) < len(wanted):
        raise _unfit(f"{len(values)} values", f"{len(wanted)}")
    return (values[: len(args)], {}) if args else ((), dict(zip(kwargs, values, strict=False)))


def _unfit(got: str, wanted: str) -> ValueError:
    return ValueError(
        f"QuantSim.calibrate: got a batch of {got}, and example_inputs had {wanted} arguments; pass forward=lambda model, batch: ..."
    )


def to_device(arguments: Arguments, model: nn.Module) -> Arguments:
    """Arguments on the device of the model's first parameter or buffer, as DataLoaders leave them on the CPU."""
    first = next(chain(model.parameters(), model.buffers()), None)
    if first is None:
        return arguments
    device = first.device
    moved: Arguments = tree_map_only(Tensor, lambda value: value.to(device), arguments)
    return moved


def report_of(noted: Observation, quantizers: Mapping[str, Quantizer], problems: list[str]) -> CalibrationReport:
    """The report on what `quantizers` hold after a pass, on top of the `problems` that choosing encodings met."""
    counts = {key: quantizer.counts for key, quantizer in quantizers.items()}
    problems = list(problems)
    for key, count in counts.items():
        if count.nonfinite:
            where = f", first in batch {noted.first_nonfinite[key]}" if key in noted.first_nonfinite else ""
            problems.append(f"'{key}' met {count}{where}; its range comes from the finite ones")
    problems += [problem for key, quantizer in quantizers.items() if (problem := _overflow(key, quantizer))]
    return CalibrationReport(noted.batches, counts, problems, dict(noted.seconds))


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
