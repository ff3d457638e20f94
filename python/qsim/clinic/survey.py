"""The survey: one float32 pass over the data that notes of every operation what its numbers are and what a format would do to them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qsim.clinic.source import SourceLine, calling_line
from qsim.clinic.subject import Subject, Visitor
from qsim.clinic.targets import Target
from qsim.clinic.trace import floats
from qsim.numbers.sqnr import sqnr
from qsim.operations.functions import ALIAS, TRANSPARENT, Function, name_of, route_name
from qsim.operations.internals import STORED, inside, partial_sums
from qsim.ops.observe import observe_range_
from qsim.ops.round_to_format import count_format_
from qsim.quantizers.format_counts import FormatCounts
from qsim.runs.batches import Forward


@dataclass
class Seen:
    """What was seen of one operation in float32, over all its calls and batches.

    Attributes
    ----------
    op : str
        The function's name, without underscores.
    source : SourceLine or None
        The line that called it first.
    lowest, highest : float
        Finite range of its results; Inf and -Inf if there was nothing finite.
    counts : FormatCounts
        What rounding its results to the format does to them. `nans` and `infs` are those of float32.
    sqnr : float
        dB of that rounding by itself.
    largest_sum : float
        Largest magnitude of a sum inside the operation; 0 if it has none.
    largest_terms : float
        The most that a sum was, as a multiple of the mean magnitude of the numbers added: an accumulator with p bits loses what is
        added to ``2^p`` times as much.
    largest_partial : float
        Largest magnitude on the way to a sum of products.
    """

    op: str
    source: SourceLine | None
    lowest: float = math.inf
    highest: float = -math.inf
    counts: FormatCounts = field(default_factory=FormatCounts)
    sqnr: float = math.inf
    largest_sum: float = 0.0
    largest_terms: float = 0.0
    largest_partial: float = 0.0

    @property
    def largest(self) -> float:
        """Largest finite magnitude of the results."""
        return max(-self.lowest, self.highest, 0.0)

    @property
    def nonfinite(self) -> int:
        return self.counts.nans + self.counts.infs


@dataclass
class Birth:
    """An operation that made NaN where it was given none, or Inf of finite numbers."""

    name: str
    batch: int
    nans: int
    infs: int
    finite: bool  # whether its operands held no Inf, as masks do
    shown: str  # their ranges


@dataclass
class Survey:
    """What a float32 pass found.

    Attributes
    ----------
    operations : dict of str to Seen
        In the order in which they first ran; also those that are not in the recording, by the names they would have.
    births : list of Birth
        Operations that made NaN where they were given none (of -Inf too, as a softmax of a row that is masked throughout does), or
        Inf of finite numbers; in the order in which they did.
    inputs : dict of int to int
        NaN and Inf in the data, by batch.
    largest_input : float
        Largest finite magnitude in the data.
    outputs, output_nans : int
        NaN and Inf in what the model returned, and the NaN among them.
    batches : int
    kept : dict of int to Any
        Batches that can be looked at again, by number: the first ones, and those in which something new broke.
    """

    operations: dict[str, Seen] = field(default_factory=dict)
    births: list[Birth] = field(default_factory=list)
    inputs: dict[int, int] = field(default_factory=dict)
    largest_input: float = 0.0
    outputs: int = 0
    output_nans: int = 0
    batches: int = 0
    kept: dict[int, Any] = field(default_factory=dict)


def survey(
    subject: Subject,
    target: Target,
    batches: Iterable[Any],
    forward: Forward | None = None,
    *,
    keep: int = 0,
    within: Callable[[Visitor], Visitor] | None = None,
) -> Survey:
    """Run the model on every batch in float32 and look at every operation.

    Memory: `keep` batches, and some numbers for each operation. Half of what is kept are the first batches, the other half is for later
    ones in which an operation overflows, or makes NaN or Inf, that did not before. `within` makes the visitor that looks too, and calls
    the one it is given.
    """
    found = Survey()
    looking = _Looking(found, target, subject.folded)
    visitor = looking if within is None else within(looking)
    for batch in batches:
        given = floats(batch)
        broken = sum(_nonfinite(t) for t in given if not _is_mask(t))
        largest = [t.abs().where(t.isfinite(), 0.0).amax().item() for t in given if t.numel()]
        found.largest_input = max([found.largest_input, *largest])
        if broken:
            found.inputs[found.batches] = broken
        with subject.visited(visitor):
            results = floats(subject.run(batch, forward))
        found.outputs += sum(_nonfinite(t) for t in results)
        found.output_nans += sum(int(t.isnan().sum()) for t in results)
        if looking.has_news() or len(found.kept) < keep // 2:
            found.kept |= {found.batches: batch} if len(found.kept) < keep else {}
        found.batches += 1
    looking.conclude()
    return found


class _Tally:
    """The numbers of one operation while they are still on the device."""

    def __init__(self, device: torch.device) -> None:
        self.counts = torch.zeros(6, dtype=torch.int64, device=device)
        self.squares = torch.zeros(2, dtype=torch.float64, device=device)
        self.range = (torch.full((), math.inf, device=device), torch.full((), -math.inf, device=device))
        self.range_counts = torch.zeros(4, dtype=torch.int64, device=device)
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)  # largest sum, sum over mean magnitude, and partial sum
        self.broken = 0


class _Looking:
    """The visitor of a survey."""

    def __init__(self, found: Survey, target: Target, folded: frozenset[str]) -> None:
        self._found, self._target, self._folded = found, target, folded
        self._tallies: dict[str, _Tally] = {}
        self._broken = 0

    def operation(self, name: str, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        written = any(key == "inplace" and value for key, value in kwargs.items()) or route_name(func).endswith("_")
        before = _described(args, kwargs) if written else None
        if self._target.accumulator == "float16" or name_of(func) in STORED:
            self._look_inside(name, func, args, kwargs)
        out = func(*args, **kwargs)
        results = floats(out)
        if not results:
            return out
        tally = self._tally(name, func, results[0].device)
        for t in results:
            count_format_(t, self._target.format or "bfloat16", tally.counts, tally.squares)
            observe_range_(t, *tally.range, tally.range_counts)
        broken = int(tally.counts[1:3].sum())
        if broken > tally.broken:
            self._born(name, out, before or _described(args, kwargs))
        tally.broken = broken
        return out

    def passed(self, path: str, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name_of(func) not in TRANSPARENT:
            return self.operation(".".join(filter(None, (path, name_of(func)))), func, args, kwargs)
        return ALIAS.get(route_name(func), func)(*args, **kwargs)

    def _tally(self, name: str, func: Function, device: torch.device) -> _Tally:
        if name not in self._tallies:
            self._tallies[name] = _Tally(device)
            self._found.operations[name] = Seen(name_of(func), calling_line())
        return self._tallies[name]

    def _look_inside(self, name: str, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the sums inside an operation, for accumulators that are no wider than the format."""

        def total(added: Tensor, mean: Callable[[], Tensor], count: float) -> Tensor:
            if not added.numel():
                return added
            tally, sums = self._tally(name, func, added.device), added.abs().double()
            found = torch.stack([sums.amax(), (sums / mean()).nan_to_num(0.0, 0.0).amax(), tally.sums[2]])
            tally.sums = torch.fmax(tally.sums, found)
            return added

        if torch._C._functorch.maybe_current_level() is not None:  # sums of wrappers leave no numbers
            return
        if (written_out := inside(func, args, kwargs)) is not None:
            written_out(total)
        elif (partial := partial_sums(func, args, kwargs)) is not None:
            tally = self._tally(name, func, partial.device)
            tally.sums[2] = torch.fmax(tally.sums[2], partial)

    def _born(self, name: str, out: Any, operands: dict[str, _Operand]) -> None:
        results = floats(out)
        nans, infs = (sum(int(flags(t).sum()) for t in results) for flags in (torch.isnan, torch.isinf))
        given_nans, given_infs = any(o.nan for o in operands.values()), any(o.inf for o in operands.values())
        if (nans and not given_nans) or (infs and not given_nans and not given_infs):
            shown = ", ".join(f"{slot}: {operand.range}" for slot, operand in operands.items())
            self._found.births.append(Birth(name, self._found.batches, nans, infs, not given_infs, shown))

    def has_news(self) -> bool:
        """Whether more operations overflow, or have made NaN or Inf, than when it was asked last."""
        before = self._broken
        counts = [tally.counts[1:4].sum() for tally in self._tallies.values()]
        self._broken = int(torch.stack(counts).count_nonzero()) if counts else 0
        return self._broken > before

    def conclude(self) -> None:
        """Put the numbers into the survey."""
        for name, tally in self._tallies.items():
            seen = self._found.operations[name]
            seen.counts = FormatCounts(*tally.counts.tolist())
            if name in self._folded:  # a constant, and never a number of the format before it is read
                seen.counts = replace(seen.counts, overflows=0, underflows=0, subnormals=0)
                continue
            seen.lowest, seen.highest = (end.item() for end in tally.range)
            noise, signal = tally.squares.tolist()
            seen.sqnr = sqnr(signal, noise)
            seen.largest_sum, seen.largest_terms, seen.largest_partial = tally.sums.tolist()


def _nonfinite(t: Tensor) -> int:
    return t.numel() - int(t.isfinite().sum())


def _is_mask(t: Tensor) -> bool:
    """Whether a tensor holds -Inf, and zero everywhere else: it is added to scores."""
    return bool((t.isneginf() | (t == 0)).all())


class _Operand(NamedTuple):
    range: str  # as text
    nan: bool
    inf: bool


def _described(args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, _Operand]:
    """The operands of a call, by slot."""
    described = {}
    for slot, value in (*((str(i), v) for i, v in enumerate(args)), *kwargs.items()):
        for t in floats(value):
            if t.numel():
                low, high = (end.item() for end in t.aminmax())
                described[slot] = _Operand(f"[{low:.4g}, {high:.4g}]", bool(t.isnan().any()), bool(t.isinf().any()))
    return described
