"""What stands at a site: as planned, or where operations fall back to a float format (`QuantSim.fallback`).

Operands and results of those are rounded to the format. Quantizers there quantize only what an operation in integers makes or reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

from qsim import ops
from qsim.graph.execute.marks import BiasMark, Mark, RoundingMark
from qsim.graph.plan.actions import Actions, Neighbours, PlannedBias
from qsim.graph.record.tape import Slot
from qsim.quantizers.bias import BiasQuantizer
from qsim.quantizers.quantizer import Quantizer

Quantize = Callable[[Tensor], Tensor]
Operands = tuple[tuple[Slot, Quantize], ...]
Outputs = tuple[tuple[int, Quantize], ...]


class Rounding:
    """Rounds to a float format, where no quantizer stands; in the operand's own memory where the operation will write there too."""

    def __init__(self, format: str, in_place: bool = False) -> None:
        self.format, self.in_place = format, in_place

    def __call__(self, x: Tensor) -> Tensor:
        return (ops.round_to_format_ if self.in_place else ops.round_to_format)(x, self.format)


class Lowered:
    """A quantizer that observes as ever and rounds to a float format instead of its grid."""

    def __init__(self, quantizer: Quantizer, format: str) -> None:
        self.quantizer, self.format = quantizer, format

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self.quantizer(x, fallback=self.format)
        return y

    def quantize(self, x: Tensor) -> Tensor:
        """Without observing: see `qsim.graph.plan.actions.Use`."""
        return self.quantizer.quantize(x, fallback=self.format)


class OfCopy:
    """A quantizer with a learned scale at a tensor that the program may write to later: the scale's gradient needs what it holds now."""

    def __init__(self, quantize: Quantize) -> None:
        self.quantize = quantize

    def __call__(self, x: Tensor) -> Tensor:
        return self.quantize(x.clone() if torch.is_grad_enabled() and not isinstance(x, nn.Parameter) else x)


class InTurn:
    """One after the other."""

    def __init__(self, first: Quantize, second: Quantize) -> None:
        self.first, self.second = first, second

    def __call__(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def rounding_inside(format: str) -> Quantize:
    """What marks a tensor that is stored in a format, inside of what files compute in float32."""
    return InTurn(RoundingMark(format, True), RoundingMark(format, False))


class LiveMaker:
    """Makes what computes. None: nothing has to stand there."""

    def __init__(self, quantizers: Mapping[str, Quantizer]) -> None:
        self.quantizers = quantizers

    def quantized(self, key: str, observes: bool, *, enters: bool = False) -> Quantize:
        """Where a quantizer quantizes an operand (`enters`) or a result."""
        quantizer = self.quantizers[key]
        quantize: Quantize = quantizer if observes else quantizer.quantize
        return OfCopy(quantize) if enters and quantizer.spec.learnable else quantize

    def bias(self, bias: PlannedBias) -> Quantize:
        """Where a bias is quantized with the scale of products."""
        return BiasQuantizer(self.quantizers[bias.input], self.quantizers[bias.weight])

    def lowered(self, key: str, observes: bool, format: str, *, enters: bool) -> Quantize | None:
        """Where it rounds to `format` instead: an operand (`enters`) or a result."""
        lowered = Lowered(self.quantizers[key], format)
        return lowered if observes else lowered.quantize

    def rounded(self, format: str, *, enters: bool, in_place: bool = False) -> Quantize | None:
        """Where an operand or a result without a quantizer is rounded to `format`."""
        return None if format == "float32" else Rounding(format, in_place)


class MarkMaker:
    """Makes what stands in a traced graph."""

    def quantized(self, key: str, observes: bool, *, enters: bool = False) -> Quantize:
        return Mark(key)

    def bias(self, bias: PlannedBias) -> Quantize:
        return BiasMark(bias.input, bias.weight)

    def lowered(self, key: str, observes: bool, format: str, *, enters: bool) -> Quantize | None:
        return self.rounded(format, enters=enters)

    def rounded(self, format: str, *, enters: bool, in_place: bool = False) -> Quantize | None:
        return None if format == "float32" else RoundingMark(format, enters, in_place)


Maker = LiveMaker | MarkMaker


def marked(parameter: Tensor, key: str, format: str | None) -> Tensor:
    """A parameter in a traced graph, at a call that has no site: for its quantizer, or for the format that all its readers fall back to."""
    mark = Mark(key) if format is None else MarkMaker().rounded(format, enters=True)
    return parameter if mark is None else mark(parameter)


def planned_site(actions: Actions, make: Maker) -> tuple[Operands, Outputs]:
    """What stands at the operands and the results of a site that does as planned."""
    found = actions.operands.items()
    operands: list[tuple[Slot, Quantize]] = [(slot, make.quantized(use.key, use.observes, enters=True)) for slot, use in found]
    if (bias := actions.bias) is not None:
        operands.append((bias.slot, make.bias(bias)))
    return tuple(operands), tuple((index, make.quantized(key, True)) for index, key in actions.outputs.items())


def fallen_site(
    actions: Actions, around: Neighbours, formats: Mapping[str, str], make: Maker, *, renamed: bool = False
) -> tuple[Operands, Outputs]:
    """What stands at the operands and the results of a site that falls back.

    Parameters
    ----------
    actions : Actions
        Of the site.
    around : Neighbours
    formats : mapping of str to str
        Of the operations that fall back, by name; that of the site is among them.
    make : LiveMaker or MarkMaker
    renamed : bool
        Whether something reads what the site changes in place by its older name: that has to see what the result is rounded to.
    """
    own = formats[around.operation]
    operands: dict[Slot, Quantize | None] = {}
    for slot in around.operands:
        use = actions.operands.get(slot)
        if use is not None and not around.reads[slot].is_integer(formats):
            operands[slot] = make.lowered(use.key, use.observes, own, enters=True)
            continue
        quantized = None if use is None else make.quantized(use.key, use.observes, enters=True)
        operands[slot] = _in_turn(quantized, make.rounded(own, enters=True, in_place=slot in around.changed))
    outputs: dict[int, Quantize | None] = {}
    for i in range(around.outputs):
        post, joined = around.results.get(i), around.joined.get(i)
        in_place = (renamed or around.changed_through) and post is None  # and its readers quantize it
        rounded = make.rounded(own, enters=False, in_place=in_place)
        if post is not None and not post.is_integer(formats):
            outputs[i] = make.lowered(post.key, True, own, enters=False)
        elif post is not None:
            outputs[i] = _in_turn(rounded, make.quantized(post.key, True))
        elif joined is not None and joined.is_integer(formats) and not in_place:
            outputs[i] = _in_turn(rounded, make.quantized(joined.key, False))
        else:
            outputs[i] = rounded
    return _without_none(operands), _without_none(outputs)


def site_beside(
    operands: Operands, outputs: Outputs, around: Neighbours, formats: Mapping[str, str], make: Maker
) -> tuple[Operands, Outputs]:
    """What stands at a site that does not fall back itself, out of what stood there before.

    It may quantize what one that falls back makes, or stand in, in training, for one that does.
    """
    found: dict[Slot, Quantize | None] = dict(operands)
    for slot, makers in around.makers.items():
        for format in sorted({formats[maker] for maker in makers if maker in formats}):  # one as a rule
            found[slot] = _in_turn(make.rounded(format, enters=False), found[slot])
    results: dict[int, Quantize | None] = dict(outputs)
    for i, post in around.results.items():
        if not post.is_integer(formats):
            formats_there = {formats[name] for name in post.deciders}
            results[i] = make.lowered(post.key, True, formats_there.pop() if len(formats_there) == 1 else "float32", enters=False)
    return _without_none(found), _without_none(results)


def _in_turn(first: Quantize | None, second: Quantize | None) -> Quantize | None:
    return second if first is None else first if second is None else InTurn(first, second)


At = TypeVar("At")


def _without_none(found: Mapping[At, Quantize | None]) -> tuple[tuple[At, Quantize], ...]:
    return tuple((at, quantize) for at, quantize in found.items() if quantize is not None)
