"""What quantizes the inputs of a model in each call, the operands and results of an operation, and which tensors are quantized at all."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from qsim.graph.execute.lowered import LiveMaker, Lowered, Quantize
from qsim.graph.execute.marks import Mark
from qsim.graph.plan.actions import QuantizationPlan
from qsim.graph.record.tape import InputSlot, Slot
from qsim.quantizers.quantizer import Quantizer
from qsim.runs.arguments import Arguments, is_dense, replaced

Paths = list[tuple[tuple[Any, ...], Quantize]]


class Inputs:
    """Quantizes the inputs of the model, however the caller passes them.

    Parameters
    ----------
    cls : type
        The model's class.
    plan : QuantizationPlan
    quantizers : mapping of str to Quantizer
    """

    def __init__(self, cls: type[nn.Module], plan: QuantizationPlan, quantizers: Mapping[str, Quantizer]) -> None:
        parameters = list(inspect.signature(cls.forward).parameters.values())[1:]  # without self
        self.positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        paths = {slot if isinstance(slot, tuple) else (slot,): key for slot, key in plan.inputs.items()}
        make = LiveMaker(quantizers)
        self.paths: Paths = [(path, make.quantized(key, True, enters=True)) for path, key in paths.items()]
        self.marked: Paths = [(path, Mark(key)) for path, key in paths.items()]
        self.posts = [plan.regions.inputs[slot] for slot in plan.inputs]
        self.planned = self.fallen = self.paths, self.marked

    def fall_back(self, formats: Mapping[str, str], quantizers: Mapping[str, Quantizer]) -> None:
        """From now on the operations in `formats` compute in float; what they alone read they round themselves."""
        integer = [post.is_integer(formats) for post in self.posts]
        if all(integer):
            self.fallen = self.planned
            return
        paths = [
            (path, quantizer if as_planned else Lowered(quantizers[post.key], "float32"))
            for (path, quantizer), post, as_planned in zip(self.paths, self.posts, integer, strict=True)
        ]
        self.fallen = paths, [mark for mark, as_planned in zip(self.marked, integer, strict=True) if as_planned]

    def quantize(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, marks: bool, falls_back: bool) -> Arguments:
        """The arguments of a call with the planned ones quantized; `marks` and `falls_back` as in `Switch`."""
        paths, marked = self.fallen if falls_back else self.planned
        for (slot, *path), quantizer in marked if marks else paths:
            slot = self._as_passed(slot, args, kwargs)
            if isinstance(slot, int):
                args = (*args[:slot], _at(args[slot], path, quantizer), *args[slot + 1 :])
            elif slot is not None:
                kwargs = {**kwargs, slot: _at(kwargs[slot], path, quantizer)}
        return args, kwargs

    def _as_passed(self, slot: InputSlot, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | str | None:
        """Position or keyword of the argument in this call; None if it was left out."""
        names = self.positional
        name = names[slot] if isinstance(slot, int) and slot < len(names) else slot
        position = names.index(name) if name in names else slot  # beyond the names lie those of *args
        if isinstance(position, int) and position < len(args):
            return position
        return name if isinstance(name, str) and name in kwargs else None


def _at(tree: Any, path: list[Any], quantizer: Quantize) -> Any:
    return replaced(tree, path, lambda value: quantized(value, quantizer))


def quantized(value: Any, quantize: Quantize) -> Any:
    """A dense floating-point tensor quantized, anything else as it is."""
    return quantize(value) if isinstance(value, Tensor) and value.is_floating_point() and is_dense(value) else value


def is_float(slot: Slot | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call computes what was recorded under its name: the same function on integers (positions, lengths) is no operation."""
    value = operand(slot, args, kwargs)
    return not isinstance(value, Tensor) or value.is_floating_point()


def computes(out: Any) -> bool:
    """Whether a result is one that quantizers are for: a single number is none."""
    results = out if isinstance(out, tuple) else (out,)
    return any(isinstance(t, Tensor) and t.is_floating_point() and t.dim() > 0 for t in results)


def operand(slot: Slot | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a call has at a slot; None for nothing."""
    outer, index = slot if isinstance(slot, tuple) else (slot, None)
    value = args[outer] if isinstance(outer, int) and outer < len(args) else kwargs.get(str(outer))
    if index is not None and isinstance(value, (tuple, list)) and index < len(value):
        value = value[index]
    return value


def with_operands(args: tuple[Any, ...], kwargs: dict[str, Any], operands: tuple[tuple[Slot, Quantize], ...]) -> Arguments:
    """The arguments with the planned operands quantized. A slot that this call does not fill is passed over."""
    given = list(args)
    for slot, quantize in operands:
        outer, index = slot if isinstance(slot, tuple) else (slot, None)
        if isinstance(outer, int):
            if outer < len(given):
                given[outer] = _quantized_entry(given[outer], index, quantize)
        elif outer in kwargs:
            kwargs = {**kwargs, outer: _quantized_entry(kwargs[outer], index, quantize)}
    return tuple(given), kwargs


def _quantized_entry(value: Any, index: int | None, quantize: Quantize) -> Any:
    """`value`, or its entry at `index`, quantized."""
    if index is None:
        return quantized(value, quantize)
    return type(value)([*value[:index], quantized(value[index], quantize), *value[index + 1 :]])


def as_it_is(x: Tensor) -> Tensor:
    """In place of a quantizer: another tensor of the same memory, no more. It leaves no operation in files, as `view_as` would, and is no
    view where no gradient asks for one: what a reentrant checkpoint hands out as a view cannot be written to."""
    if not x.requires_grad and not torch.compiler.is_compiling():
        return x.detach()
    return torch.ops.aten.alias.default(x)  # type: ignore[no-any-return]


def with_outputs(out: Any, outputs: tuple[tuple[int, Quantize], ...], given: tuple[Any, ...] = ()) -> Any:
    """What a call returned, with the planned results quantized.

    Of those in `given` it returns none itself: what `x.relu_()` returns is another tensor than `x` once it is quantized, and is while its
    quantizer only observes, or is switched off. Programs ask ``y is x``, torch's attention among them.
    """
    if isinstance(out, Tensor):
        found = quantized(out, outputs[0][1])
        return as_it_is(found) if found is out and any(found is t for t in given) else found
    for index, quantize in outputs:
        out = _quantized_entry(out, index, quantize)
    return out
