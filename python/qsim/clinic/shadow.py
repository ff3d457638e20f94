"""The shadow: a model run as its target would run it, beside what it computes in float32."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from qsim.calibration import Forward
from qsim.clinic.half import HalfPrecision
from qsim.clinic.subject import Subject
from qsim.clinic.targets import Target
from qsim.deviation import Deviation
from qsim.graph.functions import ALIAS, Function, route_name
from qsim.ops.round_to_format import count_format_


@dataclass(frozen=True)
class Outcome:
    """What became of the model's output in a shadow execution.

    Attributes
    ----------
    ok : bool
        Finite wherever float32 is finite, and close enough to it.
    sqnr : float
        dB of the worst output tensor over all batches; +Inf where nothing differs, -Inf where nothing could be compared.
    nonfinite : int
        Elements of the output that are NaN or Inf and finite in float32.
    first : str or None
        The first operation with more NaN and Inf in its result than in float32; None if there is none.
    error : str
        What the model raised, which it does not raise in float32; "" if it ran.
    """

    ok: bool
    sqnr: float
    nonfinite: int
    first: str | None
    error: str = ""


class Shadow:
    """Runs a model on the same batches again and again, each time with other operations kept in float32.

    Parameters
    ----------
    subject : Subject
    target : Target
        With a float format.
    batches : sequence
        All of them are kept, with the model's float32 outputs.
    forward : callable, optional
        As for `QuantSim.calibrate`.
    sqnr : float, optional
        dB that an output needs to be ok; the target's by default.

    Attributes
    ----------
    probes : int
        How often the model was run in half precision.
    seconds : float
        How long that took.
    """

    def __init__(
        self, subject: Subject, target: Target, batches: Sequence[Any], forward: Forward | None = None, *, sqnr: float | None = None
    ) -> None:
        if target.format is None:
            raise ValueError(f"Shadow: target {target.name!r} has no float format narrower than float32")
        self.subject, self.target, self.format = subject, target, target.format
        self.sqnr = target.sqnr if sqnr is None else sqnr
        self.probes, self.seconds = 0, 0.0
        self._batches, self._forward = batches, forward
        self._rows = {name: i for i, name in enumerate(subject.sites)}
        self._weights: dict[int, tuple[Tensor, int, Tensor]] = {}
        self._random = torch.get_rng_state(), random.getstate()
        self._device = next((t.device for t in (*subject.model.parameters(), *subject.model.buffers())), torch.device("cpu"))
        counts = self._counts()
        self._outputs = [self._run(batch, _Counting(self.format, counts)) for batch in batches]
        self._nonfinite = self._broken(counts)

    def probe(self, keep: frozenset[str] = frozenset()) -> Outcome:
        """Run every batch with the operations named in `keep` in float32. Stops at the first batch whose output is broken."""
        began = time.perf_counter()
        counts = self._counts()
        visitor = HalfPrecision(self.format, keep, counts, self._weights)
        deviations: dict[int, Deviation] = {}
        nonfinite, error = 0, ""
        for batch, expected in zip(self._batches, self._outputs, strict=True):
            try:
                out = self._run(batch, visitor)
            except Exception as e:  # a model that checks its numbers, or takes indices from them
                error = f"{type(e).__name__}: {e}"
                break
            nonfinite += _compare(expected, out, deviations)
            if nonfinite:
                break
        self.probes += 1
        self.seconds += time.perf_counter() - began
        sqnr = (
            -math.inf if error else min((d.sqnr if d.elements > d.nonfinite else -math.inf for d in deviations.values()), default=math.inf)
        )
        return Outcome(not error and not nonfinite and sqnr >= self.sqnr, sqnr, nonfinite, self._first(counts), error)

    def _run(self, batch: Any, visitor: Any) -> list[Tensor]:
        with self._same_random_numbers(), self.subject.visited(visitor):
            out = self.subject.run(tree_map_only(Tensor, torch.clone, batch), self._forward)
        return [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]

    @contextmanager
    def _same_random_numbers(self) -> Iterator[None]:
        """Every execution draws the numbers that the first one drew."""
        before = random.getstate()
        with torch.random.fork_rng():
            torch.set_rng_state(self._random[0])
            random.setstate(self._random[1])
            try:
                yield
            finally:
                random.setstate(before)

    def _counts(self) -> dict[str, Tensor]:
        return dict(zip(self._rows, torch.zeros(len(self._rows), 6, dtype=torch.int64, device=self._device).unbind(), strict=True))

    def _broken(self, counts: dict[str, Tensor]) -> list[int]:
        """By operation, how many of the results' elements are not finite before rounding."""
        return torch.stack([*counts.values()])[:, 1:3].sum(1).tolist() if counts else []

    def _first(self, counts: dict[str, Tensor]) -> str | None:
        rounded = torch.stack([*counts.values()])[:, 1:4].sum(1).tolist() if counts else []  # NaN, Inf, and what overflows
        more = (name for name, found, expected in zip(counts, rounded, self._nonfinite, strict=True) if found > expected)
        return next(more, None)


class _Counting:
    """Runs the model as it is, and counts what its operations return."""

    def __init__(self, format: str, counts: dict[str, Tensor]) -> None:
        self._format, self._counts = format, counts

    def operation(self, name: str, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and t.is_floating_point() and t.layout is torch.strided:
                count_format_(t, self._format, self._counts[name])
        return out

    def passed(self, path: str, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return ALIAS.get(route_name(func), func)(*args, **kwargs)


def _compare(expected: list[Tensor], out: list[Tensor], deviations: dict[int, Deviation]) -> int:
    """Add the outputs of a batch to the deviations by output; how many elements are broken. Other shapes are broken as a whole.

    Indices and masks are compared where there is nothing else: that a class number is another one is not a matter of degree.
    """
    floats = [i for i, t in enumerate(expected) if t.is_floating_point()]
    broken = 0
    for i in floats or range(len(expected)):
        if i >= len(out) or out[i].shape != expected[i].shape:
            broken += expected[i].numel() or 1
            continue
        deviation = deviations.setdefault(i, Deviation())
        deviation.add(expected[i], out[i])
        broken += int((expected[i].isfinite() & ~out[i].isfinite()).sum())
    return broken
