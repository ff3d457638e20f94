"""Ranges by batch: what every operation returned, what reached the model, and the operands of products and concatenations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qsim.clinic.examined_model import ExaminedModel, Visitor
from qsim.clinic.peaks import Peaks, note_peaks
from qsim.clinic.trace import floats
from qsim.operations.functions import ALIAS, BIAS_POSITION, WEIGHT, Function, name_of, route_name
from qsim.ops.observe import observe_range_
from qsim.runs.arguments import tensors_in
from qsim.runs.batches import Forward

_JOINS = frozenset({"cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack"})
_PRODUCTS = frozenset(kind for kind in BIAS_POSITION if kind in WEIGHT and WEIGHT[kind][0] == 1)
_INPUT = ""  # the name of what the model is given


class Span(NamedTuple):
    """A range of finite values; empty (``lowest > highest``) where there were none."""

    lowest: float = math.inf
    highest: float = -math.inf

    def union(self, other: Span) -> Span:
        return Span(min(self.lowest, other.lowest), max(self.highest, other.highest))

    @property
    def width(self) -> float:
        """Of the range with zero in it, as integer grids have it."""
        return max(self.highest, 0.0) - min(self.lowest, 0.0)


class ProductConstants(NamedTuple):
    """The constants of a convolution or linear layer; `axis`: where its weight has the output channels."""

    axis: int
    weight: Tensor
    bias: Tensor | None


@dataclass
class Ranges:
    """What was seen, filled by `watched`.

    Attributes
    ----------
    spans : list of dict
        By batch: the range of each operation's results by its name, and of what the model was given under "".
    operands : dict of (str, int) to Span
        Over all batches, of the first operand of products and of each operand of a concatenation.
    products : dict of str to ProductConstants
    squares : list of (float, int)
        By batch: sum of squares of what the model was given, and number of elements.
    peaks : dict of (str, str) to Peaks
        Over all batches, by operation and operand, of what products read.
    samples : int
        Entries along the first dimension of the first input, over all batches.
    """

    spans: list[dict[str, Span]] = field(default_factory=list)
    operands: dict[tuple[str, int], Span] = field(default_factory=dict)
    products: dict[str, ProductConstants] = field(default_factory=dict)
    squares: list[tuple[float, int]] = field(default_factory=list)
    peaks: dict[tuple[str, str], Peaks] = field(default_factory=dict)
    samples: int = 0

    def over(self, name: str, batches: slice = slice(None)) -> Span:
        """The range over several batches."""
        found = Span()
        for spans in self.spans[batches]:
            found = found.union(spans.get(name, Span()))
        return found

    def given(self, batches: slice = slice(None)) -> tuple[Span, float]:
        """Range and root mean square of what the model was given."""
        squares = self.squares[batches]
        count = sum(n for _, n in squares)
        return self.over(_INPUT, batches), math.sqrt(sum(s for s, _ in squares) / count) if count else 0.0

    def batches(self, subject: ExaminedModel, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches, one entry of `spans` for each; the model's inputs are noted while they pass."""
        for batch in batches:
            self.spans.append({})
            hook = subject.model.register_forward_pre_hook(self._note_inputs, with_kwargs=True)
            try:
                yield batch
            finally:
                hook.remove()

    def _note_inputs(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = floats((args, kwargs))
        finite = [t.double().where(t.isfinite(), 0.0) for t in given if t.numel()]
        self.squares.append((sum(t.square().sum().item() for t in finite), sum(t.numel() for t in finite)))
        first = next(iter(tensors_in((args, kwargs))), None)
        self.samples += first.shape[0] if first is not None and first.dim() else 1
        here = self.spans[-1]
        for t in given:
            here[_INPUT] = here.get(_INPUT, Span()).union(span_of(t))

    def within(self, visitor: Visitor) -> Visitor:
        """A visitor that does what the other one does, and notes ranges."""
        return _Noting(self, visitor)


class Plain:
    """A visitor that runs what it meets."""

    def operation(self, name: str, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)

    def passed(self, path: str, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return ALIAS.get(route_name(func), func)(*args, **kwargs)


class _Noting:
    def __init__(self, ranges: Ranges, inner: Visitor) -> None:
        self._ranges, self._inner = ranges, inner

    def operation(self, name: str, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kind = name_of(func)
        if torch._C._functorch.maybe_current_level() is None:  # wrappers leave no numbers
            note_peaks(self._ranges.peaks, name, kind, args, kwargs)
        if kind in _JOINS and args and isinstance(args[0], (tuple, list)):
            self._operands(name, args[0])
        elif kind in _PRODUCTS and (weight := _at(1, "weight", args, kwargs)) is not None:
            self._operands(name, args[:1] or [kwargs["input"]])
            self._ranges.products[name] = ProductConstants(WEIGHT[kind][1], weight, _at(BIAS_POSITION[kind], "bias", args, kwargs))
        out = self._inner.operation(name, func, args, kwargs)
        here = self._ranges.spans[-1]
        for t in floats(out):
            here[name] = here.get(name, Span()).union(span_of(t))
        return out

    def passed(self, path: str, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._inner.passed(path, func, args, kwargs)

    def _operands(self, name: str, operands: Iterable[Any]) -> None:
        for i, t in enumerate(operands):
            if isinstance(t, Tensor) and t.is_floating_point():
                self._ranges.operands[name, i] = self._ranges.operands.get((name, i), Span()).union(span_of(t))


def ranges_of(subject: ExaminedModel, batches: Iterable[Any], forward: Forward | None = None) -> Ranges:
    """Run the model on every batch in float32 and note ranges."""
    found = Ranges()
    for batch in found.batches(subject, batches):
        with subject.visited(found.within(Plain())):
            subject.run(batch, forward)
    return found


def span_of(t: Tensor) -> Span:
    """The range of a tensor's finite values."""
    ends = torch.full((), math.inf, device=t.device), torch.full((), -math.inf, device=t.device)
    if torch._C._functorch.maybe_current_level() is None and t.numel():  # wrappers leave no numbers
        observe_range_(t.detach(), *ends, torch.zeros(4, dtype=torch.int64, device=t.device))
    lowest, highest = torch.stack(ends).tolist()
    return Span(lowest, highest)


def _at(index: int, key: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    value = kwargs.get(key, args[index] if index < len(args) else None)
    return value if isinstance(value, Tensor) else None
