"""The shadow: a model run as its target would run it, beside what it computes in float32."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qsim.analysis.deviation import Deviation
from qsim.clinic.examined_model import ExaminedModel
from qsim.clinic.half_run import HalfPrecision, Weights
from qsim.clinic.targets import Target
from qsim.clinic.trace import LostConstant, Sampling, Traced, TraceRow
from qsim.quantizers.format_counts import FormatCounts
from qsim.runs.arguments import tensors_in
from qsim.runs.batches import Forward
from qsim.runs.random_numbers import seed_random_numbers
from qsim.runs.snapshot import beginning_alike


@dataclass(frozen=True)
class Outcome:
    """What became of the model's output in a shadow execution.

    Attributes
    ----------
    ok : bool
        Finite wherever float32 is finite, and close enough to it.
    sqnr : float
        dB of the worst output tensor of the worst batch; +Inf where nothing differs, -Inf where something is broken.
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


@dataclass(frozen=True)
class Trace:
    """A shadow execution in detail.

    Attributes
    ----------
    outcome : Outcome
    rows : dict of str to TraceRow
        By operation, in the order of the model.
    constants : list of LostConstant
    """

    outcome: Outcome
    rows: dict[str, TraceRow]
    constants: list[LostConstant]


class Shadow:
    """Runs a model on the same batches again and again, each time with other operations kept in float32.

    Parameters
    ----------
    subject : ExaminedModel
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
        self, subject: ExaminedModel, target: Target, batches: Sequence[Any], forward: Forward | None = None, *, sqnr: float | None = None
    ) -> None:
        if target.format is None:
            raise ValueError(f"Shadow: target {target.name!r} has no float format narrower than float32")
        self.subject, self.target, self.format = subject, target, target.format
        self.sqnr = target.sqnr if sqnr is None else sqnr
        self.probes, self.seconds = 0, 0.0
        self._batches, self._forward = batches, forward
        self._homes: dict[torch.device, list[str]] = defaultdict(list)  # where the operations' results lie
        for name, site in subject.sites.items():
            self._homes[next((step.devices[None] for step in site.steps if None in step.devices), torch.device("cpu"))].append(name)
        self._weights: Weights = {}
        self._narrow = target.accumulator == "float16"
        counts = self._counts()
        self._outputs: list[list[Tensor]] = []
        self._nonfinite = [dict.fromkeys(counts, 0)]  # by operation, in float32, after so many batches
        for batch in batches:
            self._outputs.append(self._run(batch, Sampling(counts, self.format)))
            self._nonfinite.append({name: sum(row[1:3]) for name, row in self._numbers(counts).items()})

    def probe(self, keep: frozenset[str] = frozenset()) -> Outcome:
        """Run every batch with the operations named in `keep` in float32. Stops at the first batch whose output is broken."""
        counts = self._counts()
        return self._execute(HalfPrecision(self.format, keep, counts, self._weights, self.subject.folded, narrow=self._narrow), counts)[0]

    def trace(self, keep: frozenset[str] = frozenset()) -> Trace:
        """As `probe`, and tell how far every operation is from float32. Runs the model twice on each batch."""
        counts = self._counts()
        visitor = Traced(self.format, keep, counts, self._weights, self.subject.folded, narrow=self._narrow)
        outcome, expected = self._execute(visitor, counts)
        rows = {
            name: TraceRow(FormatCounts(*row), expected[name], visitor.sqnr.get(name, math.inf), visitor.flushed[name], name in visitor.fed)
            for name, row in self._numbers(counts).items()
        }
        return Trace(outcome, rows, list(visitor.constants.values()))

    def _execute(self, visitor: HalfPrecision, counts: dict[str, Tensor]) -> tuple[Outcome, dict[str, int]]:
        """The outcome, and by operation how much of what ran is not finite in float32."""
        began = time.perf_counter()
        batches, nonfinite, sqnr, error = 0, 0, math.inf, ""
        for batch, expected in zip(self._batches, self._outputs, strict=True):
            if isinstance(visitor, Traced):
                sampling = Sampling({}, self.format)
                self._run(batch, sampling)
                visitor.follow(sampling.samples)
            batches += 1
            try:
                out = self._run(batch, visitor)
            except Exception as e:  # a model that checks its numbers, or takes indices from them
                error, sqnr = f"{type(e).__name__}: {e}", -math.inf
                break
            nonfinite, here = _compare(expected, out)
            sqnr = min(sqnr, here)
            if nonfinite:
                break
        self.probes += 1
        self.seconds += time.perf_counter() - began
        usual = self._nonfinite[batches]
        rounded = {name: sum(row[1:4]) for name, row in self._numbers(counts).items()}  # NaN, Inf, and what overflows
        first = next((name for name, found in rounded.items() if found > usual[name]), None)
        return Outcome(not error and not nonfinite and sqnr >= self.sqnr, sqnr, nonfinite, first, error), usual

    def _run(self, batch: Any, visitor: Any) -> list[Tensor]:
        with beginning_alike(self.subject.model), self.subject.visited(visitor):
            seed_random_numbers(0)  # every execution draws what the first one drew
            out = self.subject.run(batch, self._forward)
            return [t.clone() for t in tensors_in(out)]  # a model may return its own

    def _counts(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for device, names in self._homes.items():
            found |= zip(names, torch.zeros(len(names), 6, dtype=torch.int64, device=device).unbind(), strict=True)
        return found

    def _numbers(self, counts: dict[str, Tensor]) -> dict[str, list[int]]:
        """In the order of the operations. Waits for each device once."""
        found: dict[str, list[int]] = {}
        for names in self._homes.values():
            found |= zip(names, torch.stack([counts[name] for name in names]).tolist(), strict=True)
        return {name: found[name] for name in self.subject.sites}


def _compare(expected: list[Tensor], out: list[Tensor]) -> tuple[int, float]:
    """How many elements of a batch's outputs are broken, and the SQNR of the worst one. Outputs of another shape are broken as a whole.

    Indices and masks are compared where there is nothing else: that a class number is another one is not a matter of degree.
    """
    floats = [i for i, t in enumerate(expected) if t.is_floating_point()]
    broken, worst = 0, math.inf
    for i in floats or range(len(expected)):
        if i >= len(out) or out[i].shape != expected[i].shape:
            broken += expected[i].numel() or 1
            continue
        deviation = Deviation()
        deviation.add(expected[i], out[i])
        broken += deviation.broken
        if deviation.compared:  # else there is nothing to compare with, and nothing to lose
            worst = min(worst, -math.inf if math.isnan(deviation.sqnr) else deviation.sqnr)
    return broken, worst
