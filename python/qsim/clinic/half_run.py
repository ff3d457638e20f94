"""Half-precision execution: a visitor that runs a model as an engine does whose tensors are in a narrow float format.

Arithmetic inside an operation is float32; what an operation reads and what it returns is rounded. An operation that is *kept* reads and
returns float32. Every tensor is therefore one of three: in the format (what an operation returned, rounded), wide (what a kept one
returned), or raw (a weight, an input, a constant: rounded by each operation that reads it and is not kept). What only moves values
keeps that: it runs in float32 if one of its operands is wide, in the format if one is in the format.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from qsim.graph.record.tape import is_wrapper, options, version_of
from qsim.operations.functions import ALIAS, TRANSPARENT, Function, adds_nothing, is_in_place, name_of, route_name
from qsim.operations.half import nearest, numbers_rounded, stopped
from qsim.operations.internals import inside
from qsim.operations.stored import STORED
from qsim.operations.totals import Total
from qsim.ops.round_to_format import count_format_, round_to_format, round_to_format_, round_to_format_counted

T = TypeVar("T")
Weights = dict[int, tuple[Tensor, int, Tensor]]  # by id: the tensor, its version, and it rounded

_MARK = "_qsim_precision"  # attribute of a tensor: one of the next two, or none for what is raw
_IN_FORMAT, _WIDE = 1, 2


def _table(names: str) -> frozenset[str]:
    return frozenset(names.split())


# Operations whose result is in the format if their operands are.
_EXACT = _table("relu relu6 neg abs absolute cat concat stack hstack vstack dstack maximum minimum sign floor ceil round trunc")

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


class Habits(NamedTuple):
    """What matters of a function here."""

    name: str
    transparent: bool
    exact: bool
    stores: bool  # as `qsim.operations.stored.STORED`
    writes: bool  # into its first argument
    alias: Function | None


@functools.lru_cache(maxsize=4096)
def habits_of(func: Function) -> Habits:
    name, route = name_of(func), route_name(func)
    return Habits(
        name,
        name in TRANSPARENT,
        name in _EXACT,
        name in STORED,
        is_in_place(func),
        ALIAS.get(route),
    )


class HalfPrecision:
    """Visits a model, rounds what is not kept, and counts per operation what rounding does.

    Parameters
    ----------
    format : str
    keep : frozenset of str
        Names of operations that stay in float32.
    counts : mapping of str to Tensor, int64 [6]
        By operation, where `FormatCounts` of its results are added; an operation without an entry is rounded and not counted.
    weights : Weights
        Rounded parameters and buffers, filled as they are met: share one between executions of one model.
    folded : frozenset of str
        Operations whose results are constants: raw, like weights.
    narrow : bool
        Whether sums inside an operation are rounded too, as accumulators of the format's width do, and stop growing: at `stops_at` times
        the mean magnitude of the numbers added.
    """

    def __init__(
        self,
        format: str,
        keep: frozenset[str],
        counts: Mapping[str, Tensor],
        weights: Weights,
        folded: frozenset[str] = frozenset(),
        *,
        narrow: bool = False,
    ) -> None:
        self.format, self.keep, self.counts, self.weights, self.narrow = format, keep, counts, weights, narrow
        self.folded = folded
        self._numbers: dict[float, float] = {}

    def operation(self, name: str, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in self.folded:
            return func(*args, **kwargs)
        if name in self.keep:
            return _marked(func(*args, **kwargs), _WIDE)
        habits = habits_of(func)
        args, kwargs = self._read(habits, args, kwargs)
        written_out = inside(func, args, kwargs) if self.narrow or habits.stores else None
        out = func(*args, **kwargs) if written_out is None else written_out(self._total(name))
        if written_out is not None and habits.writes:
            out = args[0].copy_(out)
        if habits.exact:
            return _marked(out, _IN_FORMAT)
        counts = self.counts.get(name)
        if isinstance(out, Tensor):
            return self._result(out, counts, args)
        return tree_map_only(Tensor, lambda t: self._result(t, counts, args), out)

    def passed(self, path: str, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        habits = habits_of(func)
        moves = habits.transparent or (not habits.writes and adds_nothing(name_of(func), dict(options(args, kwargs))))
        if not moves:  # it computes, in a branch that the recording has not seen
            return self.operation(".".join(filter(None, (path, name_of(func)))), func, args, kwargs)
        found = {getattr(t, _MARK, None) for t in _tensors(args, kwargs)}
        precision = _WIDE if _WIDE in found else _IN_FORMAT if _IN_FORMAT in found else None
        if precision == _IN_FORMAT:
            args, kwargs = self._read(habits, args, kwargs)
        out = (habits.alias or func)(*args, **kwargs)
        if precision is not None:
            _marked(out, precision)
            if habits.writes:
                _marked(args[0], precision)
        return out

    def _read(self, habits: Habits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call, rounded where they are not in the format."""
        written = args[0] if args and (habits.writes or kwargs.get("inplace")) else None
        rounded = numbers_rounded(habits.name, {**dict(enumerate(args)), **kwargs}, self._number, self._rounded)
        given = (rounded.get(i, value) for i, value in enumerate(args))
        return (
            tuple(self._argument(value, in_place=value is written) for value in given),
            {key: self._argument(rounded.get(key, value)) for key, value in kwargs.items()},
        )

    def _argument(self, value: Any, *, in_place: bool = False) -> Any:
        if isinstance(value, Tensor):
            return self._operand(value, in_place=in_place)
        if type(value) in (tuple, list) and any(isinstance(v, Tensor) for v in value):
            return type(value)(self._argument(v) for v in value)
        return value

    def _result(self, t: Tensor, counts: Tensor | None, args: tuple[Any, ...]) -> Tensor:
        """What a call returned, rounded; in place where it is one of the arguments."""
        if not t.is_floating_point() or t.layout is not torch.strided:
            return t
        if counts is None or is_wrapper(t) or counts.device != t.device:
            return self._rounded(t)
        if any(t is value for value in args):
            count_format_(t, self.format, counts)
            return _marked(round_to_format_(t, self.format), _IN_FORMAT)
        t = round_to_format_counted(t, self.format, counts)
        setattr(t, _MARK, _IN_FORMAT)
        return t

    def _total(self, name: str) -> Total:
        def total(added: Tensor, mean: Callable[[], Tensor], count: float) -> Tensor:
            if not self.narrow and count > 1:  # in an accumulator
                return added
            added = stopped(added, mean, count, self.format)
            return round_to_format_counted(added, self.format, self.counts[name]) if name in self.counts else self._rounded(added)

        return total

    def _operand(self, t: Tensor, *, in_place: bool) -> Tensor:
        if not t.is_floating_point() or t.layout is not torch.strided or getattr(t, _MARK, None) == _IN_FORMAT:
            return t
        if in_place:
            return _marked(round_to_format_(t, self.format), _IN_FORMAT)
        if not isinstance(t, nn.Parameter):
            return self._rounded(t)
        found = self.weights.get(id(t))
        if found is None or found[1] != version_of(t):
            found = self.weights[id(t)] = (t, version_of(t), self._rounded(t))  # with t: its id stays its own
        return found[2]

    def _rounded(self, t: Tensor) -> Tensor:
        if is_wrapper(t):  # under vmap or jvp, which know the casts alone
            return _marked(t.to(_DTYPES[self.format]).to(t.dtype), _IN_FORMAT)
        return _marked(round_to_format(t, self.format), _IN_FORMAT)

    def _number(self, value: float) -> float:
        if value not in self._numbers:
            self._numbers[value] = nearest(value, self.format)
        return self._numbers[value]


def is_raw(t: Tensor) -> bool:
    """Whether a tensor is what no operation has returned: a weight, an input, a constant, or what was made of these by moving values."""
    return not hasattr(t, _MARK)


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    found = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += [v for v in value if isinstance(v, Tensor)]
    return found


def _marked(out: T, precision: int) -> T:
    """`out`, with its floating-point tensors told to be of a precision."""
    for t in [out] if isinstance(out, Tensor) else _tensors((out,), {}):
        if t.is_floating_point():
            setattr(t, _MARK, precision)
    return out
