"""What quantizes the inputs of a model in each call, the operands and results of an operation, and which tensors are quantized at all."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qsim.graph.execute.lowered import LiveMaker, Lowered, Quantize
from qsim.graph.execute.marks import Mark
from qsim.graph.execute.shortcuts import runs_at_once
from qsim.graph.plan.actions import QuantizationPlan
from qsim.graph.record.asker import nodes_of_asker
from qsim.graph.record.tape import InputSlot, Slot, version_of
from qsim.quantizers.quantizer import Quantizer
from qsim.runs.arguments import Arguments, are_same, is_dense, replaced

Paths = list[tuple[tuple[Any, ...], Quantize]]


class Copy(NamedTuple):
    """What the model gets in place of an argument: the argument, by its name and the path inside, what is passed instead, and that as it
    is before the call: its version, and its numbers if the model writes into it in the examples."""

    path: tuple[Any, ...]
    given: Tensor
    passed: Tensor
    version: int
    before: Tensor | None

    def settle(self) -> tuple[Any, ...]:
        """Write what the model wrote into the argument, which its caller has. Returns its path where no example showed that it would."""
        if self.before is None:
            return () if version_of(self.passed) == self.version else self.path
        if self.passed.shape == self.given.shape:
            now = torch.where(self.passed != self.before, self.passed, self.given)
            (self.given.detach() if self.given.requires_grad and self.given.is_leaf else self.given).copy_(now)
        return ()


class Refilled:
    """The lists and dicts that the model gets in place of its caller's, since tensors in them are quantized."""

    def __init__(self) -> None:
        self._copied: list[tuple[Any, Any, Any]] = []  # the caller's, the model's, and what that held in the beginning
        self._exchanged: list[tuple[Any, Any]] = []  # what is the caller's in what was made, and what is in its place

    def note(self, given: Any, passed: Any, entry: Any, instead: Any) -> None:
        """See `replaced`."""
        self._exchanged.append((entry, instead))
        if not isinstance(given, tuple):
            self._copied.append((given, passed, passed.copy()))

    def settle(self) -> tuple[Any, ...]:
        """Have the caller's hold what the model put into them."""
        for given, passed, before in reversed(self._copied):  # one may have been copied twice
            if are_same(passed, before):
                continue
            if isinstance(given, dict):
                given.clear()
                given.update({key: self._own(value) for key, value in passed.items()})
            else:
                given[:] = [self._own(value) for value in passed]
        return ()

    def _own(self, value: Any) -> Any:
        for entry, instead in self._exchanged:
            if are_same([value], [instead]):
                return entry
        return tuple([self._own(inner) for inner in value]) if type(value) is tuple else value


class Inputs:
    """Quantizes the inputs of the model, however the caller passes them.

    Parameters
    ----------
    cls : type
        The model's class.
    plan : QuantizationPlan
    quantizers : mapping of str to Quantizer
    written : collection of InputSlot
        Those that the model writes into.
    """

    def __init__(
        self, cls: type[nn.Module], plan: QuantizationPlan, quantizers: Mapping[str, Quantizer], written: Collection[InputSlot] = ()
    ) -> None:
        parameters = list(inspect.signature(cls.forward).parameters.values())[1:]  # without self
        self.positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        paths = {slot if isinstance(slot, tuple) else (slot,): key for slot, key in plan.inputs.items()}
        make = LiveMaker(quantizers)
        self.paths: Paths = [(path, make.quantized(key, True, enters=True)) for path, key in paths.items()]
        self.marked: Paths = [(path, Mark(key)) for path, key in paths.items()]
        self.nested = any(len(path) > 1 for path in paths)  # whether some lie in lists or dicts
        self.written = [slot in written for slot in plan.inputs]
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

    def quantize(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, marks: bool, falls_back: bool, copies: list[Copy | Refilled] | None = None
    ) -> Arguments:
        """The arguments of a call with the planned ones quantized; `marks` and `falls_back` as in `Switch`. `copies`: gets what is put in
        their place; while Dynamo traces, of what the examples show to be written."""
        paths, marked = self.fallen if falls_back else self.planned
        note = None
        if copies is not None and self.nested:
            copies.append(refilled := Refilled())
            note = refilled.note
        for ((slot, *path), quantizer), written in zip(marked if marks else paths, self.written, strict=False):
            passed = self._as_passed(slot, args, kwargs)
            name = self.positional[slot] if isinstance(slot, int) and slot < len(self.positional) else slot
            noted = copies is not None and (written or not torch.compiler.is_dynamo_compiling())
            change: Callable[[Any], Any] = functools.partial(quantized, quantize=quantizer)
            if noted:
                change = _copying(copies, (name, *path), quantizer, written)
            if isinstance(passed, int):
                args = (*args[:passed], replaced(args[passed], path, change, note), *args[passed + 1 :])
            elif passed is not None:
                kwargs = {**kwargs, passed: replaced(kwargs[passed], path, change, note)}
        return args, kwargs

    def _as_passed(self, slot: InputSlot, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | str | None:
        """Position or keyword of the argument in this call; None if it was left out."""
        names = self.positional
        name = names[slot] if isinstance(slot, int) and slot < len(names) else slot
        position = names.index(name) if name in names else slot  # beyond the names lie those of *args
        if isinstance(position, int) and position < len(args):
            return position
        return name if isinstance(name, str) and name in kwargs else None


def _copying(copies: Any, path: tuple[Any, ...], quantizer: Quantize, written: bool) -> Callable[[Any], Any]:
    def change(value: Any) -> Any:
        kept_by_graph = written and torch.is_grad_enabled() and isinstance(value, Tensor)  # what a learned scale's gradient is made of
        found = quantized(value.clone() if kept_by_graph else value, quantizer)
        if found is not value:
            copies.append(Copy(path, value, found, 0 if written else version_of(found), found.detach().clone() if written else None))
        return found

    return change


def quantized(value: Any, quantize: Quantize) -> Any:
    """A dense floating-point tensor quantized, anything else as it is."""
    return quantize(value) if isinstance(value, Tensor) and value.is_floating_point() and is_dense(value) else value


def is_float(slot: Slot | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call computes what was recorded under its name: the same function on integers (positions, lengths) is no operation."""
    value = operand(slot, args, kwargs)
    return not isinstance(value, Tensor) or value.is_floating_point()


def is_cast(value: Any, weight: Any) -> bool:
    """Whether a tensor is this parameter in another dtype or on another device, as ``weight.to(x.dtype)`` is under autocast. (Where `x` has
    its dtype, that is the parameter itself.)"""
    if type(value) is not Tensor or not isinstance(weight, Tensor) or value.shape != weight.shape:
        return False
    if (value.dtype, value.device) == (weight.dtype, weight.device) or not is_dense(value) or not runs_at_once():
        return False
    with torch.no_grad():
        return torch.equal(value, weight.to(value))


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
    """`value`, or its entry at `index`, quantized. A list may be shorter than in the examples."""
    if index is None:
        return quantized(value, quantize)
    if index >= len(value):
        return value
    return type(value)([*value[:index], quantized(value[index], quantize), *value[index + 1 :]])


def as_it_is(x: Tensor) -> Tensor:
    """In place of a quantizer: another tensor of the same memory, no more. It leaves no operation in files, as `view_as` would.

    What is written to it may need a gradient later, which the other name then has too: a view, but where gradients are off, since what a
    reentrant checkpoint hands out as a view cannot be written to.
    """
    if not (x.requires_grad or torch.is_grad_enabled() or torch.compiler.is_compiling()):
        return x.detach()
    return torch.ops.aten.alias.default(x)  # type: ignore[no-any-return]


def _is_made_without_gradients(out: Tensor) -> bool:
    """Whether a tensor is a view that was made where gradients are off: torch lets nobody compute a gradient through it once it was written
    to."""
    return _made_in_graph() if torch.compiler.is_dynamo_compiling() else _made_as(out) != _Made.DEFAULT


def _made_as(t: Tensor) -> Any:
    return torch._C._autograd._get_creation_meta(t) if t._is_view() else _Made.DEFAULT


def _made_in_graph() -> bool:
    """The same of `out`, a variable of the function that Dynamo traces."""
    return any(_made_as(node.meta["example_value"]) != _Made.DEFAULT for node in nodes_of_asker("out"))


_Made = torch._C._autograd.CreationMeta
_made_in_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as in qsim.graph.execute.answers


def with_outputs(out: Any, outputs: tuple[tuple[int, Quantize], ...], given: tuple[Any, ...] = ()) -> Any:
    """What a call returned, with the planned results quantized.

    Of those in `given` it returns none itself: what `x.relu_()` returns is another tensor than `x` once it is quantized, and is while its
    quantizer only observes, or is switched off. Programs ask ``y is x``, torch's attention among them. What has a gradient where gradients
    are off was written to there, and keeps it: ``with torch.no_grad(): x *= 2``. A view that was made there has none.
    """
    if isinstance(out, Tensor):
        if out.requires_grad and not torch.is_grad_enabled() and not _is_made_without_gradients(out):
            with torch.enable_grad():
                return with_outputs(out, outputs, given)
        found = quantized(out, outputs[0][1])
        return as_it_is(found) if found is out and any(found is t for t in given) else found
    for index, quantize in outputs:
        out = _quantized_entry(out, index, quantize)
    return out
