"""A shadow execution in detail: how far every operation's result is from float32, and which constants did not survive."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from qsim.analysis.deviation import Deviation
from qsim.clinic.half_run import HalfPrecision, Weights, habits_of, is_raw
from qsim.clinic.source import SourceLine, calling_line
from qsim.graph.record.tape import is_wrapper
from qsim.operations.functions import ALIAS, Function, name_of, route_name
from qsim.ops.round_to_format import count_format_
from qsim.quantizers.format_counts import FormatCounts
from qsim.runs.arguments import tensors_in

_SAMPLED = 4096  # elements of a result that are compared; NaN and Inf are counted in all of them
_FAR = 2.0**-20  # from zero: a float16 has four bits there
_HELD = "_qsim_constants"  # attribute of a tensor: the lost constants that a function which only moves values put into it

Samples = dict[tuple[str, int], list[Tensor]]


@dataclass(eq=False)
class LostConstant:
    """A constant that is no longer itself in the format.

    Attributes
    ----------
    op : str
        The operation, or the call that only moves values, that reads it: "encoder.masked_fill".
    func : str
        The function's name, without underscores.
    value, becomes : float
        The worst of a tensor of constants; `becomes` is an Inf or 0.
    raw : bool
        Whether it is a tensor, and `parameter`: whether a parameter; else it is a number among the arguments.
    source : SourceLine or None
    readers : set of str
        Operations that read what it was put into.
    """

    op: str
    func: str
    value: float
    becomes: float
    raw: bool
    parameter: bool
    source: SourceLine | None
    readers: set[str] = field(default_factory=set)


@dataclass
class TraceRow:
    """One operation in the shadow.

    Attributes
    ----------
    counts : FormatCounts
        Of its results, before rounding; NaN and Inf alone where they are not rounded.
    nonfinite : int
        NaN and Inf in its float32 results.
    sqnr : float
        dB from float32 of what is finite there, with everything before it in the shadow too; of the worst batch, on a sample of the
        elements. -Inf where something of it is NaN or Inf here, +Inf where nothing is finite in float32.
    flushed : int
        Elements of the sample that are zero and in float32 far from it, as the reciprocal of Inf is.
    fed : bool
        Whether it was given NaN, be it by something that is no operation of the recording.
    """

    counts: FormatCounts
    nonfinite: int
    sqnr: float
    flushed: int
    fed: bool

    @property
    def excess(self) -> int:
        """NaN and Inf that float32 does not have."""
        return self.counts.nans + self.counts.infs + self.counts.overflows - self.nonfinite


class Sampling:
    """Runs a model as it is, keeps a sample of every result, and counts NaN and Inf."""

    def __init__(self, counts: Mapping[str, Tensor], format: str) -> None:
        self.samples: Samples = {}
        self._counts, self._format, self._calls = counts, format, Counter[str]()

    def operation(self, name: str, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        results = floats(out)
        for t in results if name in self._counts else []:
            count_format_(t, self._format, self._counts[name])
        self.samples[name, self._calls[name]] = [_sample(t) for t in results]
        self._calls[name] += 1
        return out

    def passed(self, path: str, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return ALIAS.get(route_name(func), func)(*args, **kwargs)


class Traced(HalfPrecision):
    """Half precision that notes which constants it loses, and compares every result with a sample of the float32 one."""

    def __init__(
        self, format: str, keep: frozenset[str], counts: Mapping[str, Tensor], weights: Weights, folded: frozenset[str], *, narrow: bool
    ) -> None:
        super().__init__(format, keep, counts, weights, folded, narrow=narrow)
        self.samples: Samples = {}
        self.sqnr: dict[str, float] = {}
        self.flushed = Counter[str]()
        self.fed: set[str] = set()
        self.constants: dict[tuple[str, float], LostConstant] = {}
        self._lost_here: list[LostConstant] = []
        self._now: tuple[str, Function] = "", torch.add
        self._calls = Counter[str]()

    def follow(self, samples: Samples) -> None:
        """Compare the next execution with these samples."""
        self.samples, self._calls = samples, Counter()

    def operation(self, name: str, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for constant in _held((args, kwargs)):
            constant.readers.add(name)
        self._now, self._lost_here = (name, func), []
        if name not in self.fed and any(bool(t.isnan().any()) for t in floats((args, kwargs))):
            self.fed.add(name)
        out = super().operation(name, func, args, kwargs)
        for constant in self._lost_here:
            constant.readers.add(name)
        results = floats(out)
        if name in self.counts and (name in self.keep or habits_of(func).exact):  # the others are counted when they are rounded
            for t in results:
                seen = torch.zeros_like(self.counts[name])
                count_format_(t, self.format, seen)
                self.counts[name][:3] += seen[:3]
        expected = self.samples.get((name, self._calls[name]), [])
        self._calls[name] += 1
        for reference, t in zip(expected, results, strict=False):
            sample = _sample(t)
            if sample.shape == reference.shape:
                deviation = Deviation()
                deviation.add(reference, sample)
                self.sqnr[name] = min(self.sqnr.get(name, math.inf), math.inf if math.isnan(deviation.sqnr) else deviation.sqnr)
                self.flushed[name] += int(((sample == 0) & (reference.abs() > _FAR)).sum())
        return out

    def passed(self, path: str, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._now, self._lost_here = (".".join(filter(None, (path, name_of(func)))), func), []
        held = _held((args, kwargs))
        out = super().passed(path, func, args, kwargs)
        held += self._lost_here
        for t in floats(args[0] if out is None else out) if held else []:  # x[...] = y returns nothing
            setattr(t, _HELD, held)
        return out

    def _number(self, value: float) -> float:
        near = super()._number(value)
        if value != near and (math.isinf(near) or near == 0):
            self._lose(float(value), near)
        return near

    def _operand(self, t: Tensor, *, in_place: bool) -> Tensor:
        rounded = super()._operand(t, in_place=in_place)
        if rounded is not t and is_raw(t) and not is_wrapper(t):
            lost = t[t.isfinite() & ~rounded.isfinite()]
            if lost.numel():
                worst = lost[lost.abs().argmax()].item()
                self._lose(worst, math.copysign(math.inf, worst), t)
            elif t.numel() == 1 and t.count_nonzero() and not rounded.count_nonzero():  # an epsilon that is a tensor
                self._lose(t.item(), 0.0, t)
        return rounded

    def _lose(self, value: float, becomes: float, t: Tensor | None = None) -> None:
        name, func = self._now
        constant = LostConstant(name, name_of(func), value, becomes, t is not None, isinstance(t, nn.Parameter), calling_line())
        self._lost_here.append(self.constants.setdefault((name, value), constant))


def floats(tree: Any) -> list[Tensor]:
    """The floating-point tensors in nested tuples, lists, dicts and objects: dense ones, and no wrappers as `torch.vmap` makes them."""
    return [t for t in tensors_in(tree) if t.is_floating_point() and t.layout is torch.strided and not is_wrapper(t)]


def _sample(t: Tensor) -> Tensor:
    """Elements at equal distances, an odd one, so that it does not fall in step with rows whose length is a power of two."""
    flat = t.detach().reshape(-1)
    return flat[:: (flat.numel() // _SAMPLED) | 1].clone()


def _held(tree: Any) -> list[LostConstant]:
    found = [constant for t in floats(tree) for constant in getattr(t, _HELD, ())]
    return list(dict.fromkeys(found))
