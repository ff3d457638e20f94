"""The survey: one float32 pass over the data that notes of every operation what its numbers are and what a format would do to them."""

from __future__ import annotations

import contextlib
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qsim.clinic.examined_model import ExaminedModel, Visitor
from qsim.clinic.source import SourceLine, calling_line
from qsim.clinic.targets import Target
from qsim.clinic.trace import floats
from qsim.numbers.sqnr import sqnr
from qsim.operations.functions import ALIAS, INSERTION, TRANSPARENT, Function, is_in_place, name_of, route_name
from qsim.operations.internals import inside, partial_sums
from qsim.operations.stored import STORED
from qsim.ops.observe import observe_range_
from qsim.ops.round_to_format import count_format_
from qsim.quantizers.format_counts import FormatCounts
from qsim.runs.arguments import tensors_in
from qsim.runs.batches import Forward

_INSERTS = INSERTION | {"where"}
_HELD = "_qsim_inserted"  # attribute of a tensor: what put other values into it


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
    inserted : set of str
        What put other values into what it reads: entries of `Survey.insertions`.
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
    inserted: set[str] = field(default_factory=set)

    @property
    def largest(self) -> float:
        """Largest finite magnitude of the results."""
        return max(-self.lowest, self.highest, 0.0)

    @property
    def nonfinite(self) -> int:
        return self.counts.nans + self.counts.infs


@dataclass
class Insertion:
    """What was seen of a function that only moves values and puts others in, such as `torch.where`.

    Attributes
    ----------
    source : SourceLine or None
    result : tuple of float
        Finite range of its results.
    operands : dict of str to tuple of float
        Finite range of each of its operands.
    """

    source: SourceLine | None
    result: tuple[float, float] = (math.inf, -math.inf)
    operands: dict[str, tuple[float, float]] = field(default_factory=dict)


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
    insertions : dict of str to Insertion
        Functions that put values into what they move, by the names that they would have as operations, numbered as a batch calls them.
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
    read : set of str
        Parameters that a function got, and all of the modules that were called.
    kept : dict of int to Any
        Batches that can be looked at again, by number: the first ones, and those in which something new broke.
    """

    operations: dict[str, Seen] = field(default_factory=dict)
    insertions: dict[str, Insertion] = field(default_factory=dict)
    births: list[Birth] = field(default_factory=list)
    inputs: dict[int, int] = field(default_factory=dict)
    largest_input: float = 0.0
    outputs: int = 0
    output_nans: int = 0
    batches: int = 0
    read: set[str] = field(default_factory=set)
    kept: dict[int, Any] = field(default_factory=dict)


def survey(
    subject: ExaminedModel,
    target: Target,
    batches: Iterable[Any],
    forward: Forward | None = None,
    *,
    keep: int = 0,
    within: Callable[[Visitor], Visitor] | None = None,
) -> Survey:
    """Run the model on every batch in float32 and look at every operation.

    Memory: `keep` batches, and some numbers for each operation. The first batches are kept, of which one half makes way for later ones in
    which an operation overflows, or makes NaN or Inf, that did not before, or numbers twice as large. `within` makes the visitor that
    looks too, and calls the one it is given.
    """
    found = Survey()
    spare: list[int] = []  # of those that are kept
    looking = _Looking(found, target, subject)
    visitor = looking if within is None else within(looking)
    for batch in batches:
        given = floats(batch)
        broken = sum(_nonfinite(t) for t in given if not _is_mask(t))
        largest = [t.abs().where(t.isfinite(), 0.0).amax().item() for t in given if t.numel()]
        found.largest_input = max([found.largest_input, *largest])
        if broken:
            found.inputs[found.batches] = broken
        looking.begin()
        with subject.visited(visitor), _called(subject.model, found.read):
            results = floats(subject.run(batch, forward))
        found.outputs += sum(_nonfinite(t) for t in results)
        found.output_nans += sum(int(t.isnan().sum()) for t in results)
        has_news = looking.has_news()
        if len(found.kept) < keep:
            found.kept[found.batches] = batch
            if found.batches >= keep // 2 and not has_news:
                spare.append(found.batches)
        elif has_news and spare:
            del found.kept[spare.pop()]
            found.kept[found.batches] = batch
        found.batches += 1
    looking.conclude()
    return found


@contextlib.contextmanager
def _called(model: nn.Module, read: set[str]) -> Iterator[None]:
    """Note the parameters of each module that is called."""
    names = {
        module: [f"{path}.{key}".lstrip(".") for key, _ in module.named_parameters(recurse=False)]
        for path, module in model.named_modules()
        if not isinstance(module, torch.jit.ScriptModule)  # which takes no hooks
    }
    handles = [module.register_forward_pre_hook(lambda module, _: read.update(names[module])) for module, own in names.items() if own]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _OperationTally:
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

    def __init__(self, found: Survey, target: Target, subject: ExaminedModel) -> None:
        self._found, self._target, self._folded = found, target, subject.folded
        self._names = {id(p): name for name, p in subject.model.named_parameters()}
        self._tallies: dict[str, _OperationTally] = {}
        self._broken = 0
        self._largest: dict[str, float] = {}
        self._calls = Counter[str]()

    def begin(self) -> None:
        """Another batch: calls that have no names of their own are counted anew."""
        self._calls.clear()

    def operation(self, name: str, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._note_parameters(args, kwargs)
        written = kwargs.get("inplace") or is_in_place(func)
        before = _described(args, kwargs) if written else None
        if self._target.accumulator == "float16" or name_of(func) in STORED:
            self._look_inside(name, func, args, kwargs)
        out = func(*args, **kwargs)
        results = floats(out)
        if not results:
            return out
        tally = self._tally(name, func, results[0].device)
        self._found.operations[name].inserted |= _inserted((args, kwargs))
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
        self._note_parameters(args, kwargs)
        if name_of(func) in _INSERTS:
            return self._insert(".".join(filter(None, (path, name_of(func).strip("_")))), func, args, kwargs)
        out = ALIAS.get(route_name(func), func)(*args, **kwargs)
        _hold(args[0] if out is None and args else out, _inserted((args, kwargs)))
        return out

    def _insert(self, name: str, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that puts values into what it moves, with the ranges of what it gets and gives noted."""
        held, slots = _inserted((args, kwargs)), (*((str(i), v) for i, v in enumerate(args)), *kwargs.items())
        before = {slot: range for slot, value in slots if (range := _range(value))}
        self._calls[name] += 1
        name = name if self._calls[name] == 1 else f"{name}_{self._calls[name]}"
        out = func(*args, **kwargs)
        result = args[0] if out is None else out  # x[...] = y returns nothing
        if after := _range(result):
            seen = self._found.insertions.setdefault(name, Insertion(calling_line()))
            seen.result = _union(seen.result, after)
            for slot, range in before.items():
                seen.operands[slot] = _union(seen.operands.get(slot, range), range)
            _hold(result, held | {name})
        return out

    def _note_parameters(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._found.read.update(self._names[id(t)] for t in tensors_in((args, kwargs)) if id(t) in self._names)

    def _tally(self, name: str, func: Function, device: torch.device) -> _OperationTally:
        if name not in self._tallies:
            self._tallies[name] = _OperationTally(device)
            self._found.operations[name] = Seen(name_of(func), calling_line())
        return self._tallies[name]

    def _look_inside(self, name: str, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note what an operation stores inside, and its sums where accumulators are no wider than the format."""

        def total(added: Tensor, mean: Callable[[], Tensor], count: float) -> Tensor:
            if not added.numel() or (count > 1 and self._target.accumulator == "float32"):
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
        """Whether more operations overflow, or have made NaN or Inf, than when it was asked last, or one made a number more than twice as
        large as any then."""
        before, largest = self._broken, self._largest
        numbers: dict[torch.device, dict[str, Tensor]] = defaultdict(dict)
        for name, tally in self._tallies.items():
            ends = torch.stack(tally.range).abs().double()
            broken, size = tally.counts[1:4].sum().double(), ends.where(ends.isfinite(), 0.0).amax()
            numbers[size.device][name] = torch.stack([broken, size])
        self._broken, self._largest = 0, {}
        for here in numbers.values():  # waits for each device once
            for name, (broken, size) in zip(here, torch.stack([*here.values()]).tolist(), strict=True):
                self._broken += broken > 0
                self._largest[name] = size
        return self._broken > before or any(size > 2 * largest.get(name, 0.0) for name, size in self._largest.items())

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


def _inserted(tree: Any) -> set[str]:
    """What put other values into tensors, without an operation in between."""
    return {name for t in floats(tree) for name in getattr(t, _HELD, ())}


def _hold(tree: Any, names: set[str]) -> None:
    for t in floats(tree) if names else ():
        setattr(t, _HELD, names)


def _range(value: Any) -> tuple[float, float] | None:
    """The finite range of the floating-point tensors in a value; None without any."""
    found: tuple[float, float] | None = None
    for t in floats(value):
        finite = t[t.isfinite()]
        if finite.numel():
            low, high = finite.aminmax()
            found = _union(found or (low.item(), high.item()), (low.item(), high.item()))
    return found


def _union(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
    return min(a[0], b[0]), max(a[1], b[1])


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
