"""Execute: every container enters a function mode of its own, made fresh for each call, that follows the plan.

Fresh means no shared state: threads that share a model, and recomputation under a checkpoint, each walk their own route.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.overrides import TorchFunctionMode

from qsim.bias import BiasQuantizer
from qsim.graph.actions import Actions, Plan
from qsim.graph.frugal import InPlace, Kept, Rectifier, is_plain_eager, is_watched
from qsim.graph.functions import ALIAS, COMPOSITE, CONSTRUCTORS, RANDOM, SAME, TRANSPARENT, Function, name_of
from qsim.graph.record import containers, leaves, subclass
from qsim.graph.routes import Site
from qsim.graph.savings import Saving
from qsim.graph.tape import InputSlot, Slot
from qsim.quantizer import Quantizer

_PLACE = "_qsim_place"  # in a container's __dict__: a registered child would run when a Sequential does

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Quantize = Callable[[Tensor], Tensor]


class Node(NamedTuple):
    """What happens at one node of a route: what quantizes operands, by slot, and outputs, by index; what may take the call's place."""

    operands: tuple[tuple[Slot, Quantize], ...]
    outputs: tuple[tuple[int, Quantize], ...]
    instead: Rectifier | None = None


class Switch:
    """Shared by all containers of one simulation. Off: they run as they were written, without any function mode."""

    def __init__(self) -> None:
        self.on = True
        self.saves = True

    @contextlib.contextmanager
    def turned(self, on: bool) -> Iterator[None]:
        """Within the context the switch is `on`."""
        was, self.on = self.on, on
        try:
            yield
        finally:
            self.on = was


class Place:
    """What one container does: its route, and the quantizers at each node of it.

    Read-only while the model runs, but for `met`: functions that the route did not expect where they came.
    """

    def __init__(
        self,
        path: str,
        plan: Plan,
        savings: Mapping[Site, Saving],
        quantizers: Mapping[str, Quantizer],
        kept: dict[tuple[str, ...], Kept],
        switch: Switch,
    ) -> None:
        route = plan.routes[path]
        self.path, self.switch, self.next = path, switch, route.next
        self.start = (0, 1 if route.next[1] else 0)
        actions = [plan.actions.get(site, Actions()) if site else Actions() for site in route.sites]
        self.nodes = [_node(found, quantizers) for found in actions]
        self.frugal = [
            _frugal(node, found, savings.get(site, Saving()) if site else Saving(), quantizers, kept)
            for node, found, site in zip(self.nodes, actions, route.sites, strict=True)
        ]
        self.floats = [site.first_operand if site else None for site in route.sites]
        self.weights = [_own_weight(path, plan, found) for found in actions]
        self.unseen, self.frames = route.unseen, dict[tuple[int, int | str], Place]()
        self.leaves: list[nn.Module] = []  # those that may have hooks which see memory that a saving overwrites later
        self.met: set[str] = set()

    def link(self, frames: Mapping[tuple[int, int | str], str], made: Mapping[str, Place]) -> None:
        """Tell the place where the frames of its composite functions are."""
        self.frames = {entered: made[path] for entered, path in frames.items()}

    def is_watched(self) -> bool:
        """Whether hooks look at what the leaves of the container compute: they shall find it unchanged."""
        return any(is_watched(leaf) for leaf in self.leaves)

    def unexpected(self) -> list[str]:
        """Functions that compute, and were called where the recording has none: they, and what follows in such a call, are in float."""
        return sorted(self.met - self.unseen - TRANSPARENT - RANDOM)


def _own_weight(path: str, plan: Plan, actions: Actions) -> tuple[Slot, Callable[[nn.Module], Any]] | None:
    """Where a site takes a parameter of its container as a weight, and how to get that from the container."""
    prefix = f"{path}." if path else ""
    for slot, use in actions.operands.items():
        planned = plan.quantizers[use.key]
        if planned.role == "weight" and planned.parameter is not None and planned.parameter.startswith(prefix):
            return slot, attrgetter(planned.parameter.removeprefix(prefix))
    return None


def _frugal(node: Node, actions: Actions, saving: Saving, quantizers: Mapping[str, Quantizer], kept: dict[tuple[str, ...], Kept]) -> Node:
    """`node` with what may be saved there. `kept`: what all sites keep, so that those that read one parameter keep it once."""
    operands = dict(node.operands)
    for slot in saving.kept & actions.operands.keys():
        use = actions.operands[slot]
        parameter = kept.setdefault((use.key,), Kept(quantizers[use.key]))
        operands[slot] = parameter if use.observes else parameter.unobserved
    if (bias := actions.bias) is not None and bias.slot in saving.kept:
        shared = Kept(BiasQuantizer(quantizers[bias.input], quantizers[bias.weight]))
        operands[bias.slot] = kept.setdefault((bias.parameter, bias.input, bias.weight), shared)
    outputs, instead = node.outputs, None
    if saving.fresh:
        outputs = tuple((index, InPlace(quantizers[key], saving.unread)) for index, key in actions.outputs.items())
    if saving.rectifier is not None:
        instead = Rectifier(quantizers[actions.outputs[0]], saving)
    return Node(tuple(operands.items()), outputs, instead)


def _node(actions: Actions, quantizers: Mapping[str, Quantizer]) -> Node:
    operands: list[tuple[Slot, Quantize]] = [
        (slot, quantizers[use.key] if use.observes else quantizers[use.key].quantize) for slot, use in actions.operands.items()
    ]
    if (bias := actions.bias) is not None:
        operands.append((bias.slot, BiasQuantizer(quantizers[bias.input], quantizers[bias.weight])))
    return Node(tuple(operands), tuple((index, quantizers[key]) for index, key in actions.outputs.items()))


class Inputs:
    """Quantizes the inputs of the model, however the caller passes them."""

    def __init__(self, cls: type[nn.Module], plan: Plan, quantizers: Mapping[str, Quantizer]) -> None:
        self.names = list(inspect.signature(cls.forward).parameters)[1:]  # without self
        self.paths = [(slot if isinstance(slot, tuple) else (slot,), quantizers[key]) for slot, key in plan.inputs.items()]

    def quantize(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        for (slot, *path), quantizer in self.paths:
            slot = self._as_passed(slot, args, kwargs)
            if isinstance(slot, int):
                args = (*args[:slot], _replaced(args[slot], path, quantizer), *args[slot + 1 :])
            elif slot is not None:
                kwargs = {**kwargs, slot: _replaced(kwargs[slot], path, quantizer)}
        return args, kwargs

    def _as_passed(self, slot: InputSlot, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | str | None:
        """Position or keyword of the argument in this call; None if it was left out."""
        name = self.names[slot] if isinstance(slot, int) and slot < len(self.names) else slot
        position = self.names.index(name) if name in self.names else slot
        if isinstance(position, int) and position < len(args):
            return position
        return name if isinstance(name, str) and name in kwargs else None


def _replaced(tree: Any, path: list[Any], quantizer: Quantizer) -> Any:
    """`tree` with the tensor at `path` quantized."""
    if not path:
        return _quantized(tree, quantizer)
    key, *rest = path
    if isinstance(tree, dict):
        return {**tree, key: _replaced(tree[key], rest, quantizer)} if key in tree else tree
    if isinstance(tree, tuple) and key in getattr(tree, "_fields", ()):  # a named tuple
        return tree._replace(**{key: _replaced(getattr(tree, key), rest, quantizer)})  # type: ignore[attr-defined]
    if isinstance(tree, (tuple, list)) and isinstance(key, int) and key < len(tree):
        return type(tree)([*tree[:key], _replaced(tree[key], rest, quantizer), *tree[key + 1 :]])
    return tree


def _quantized(value: Any, quantize: Quantize) -> Any:
    dense = isinstance(value, Tensor) and value.is_floating_point() and value.layout is torch.strided
    return quantize(value) if dense else value


def _with_operands(args: tuple[Any, ...], kwargs: dict[str, Any], operands: tuple[tuple[Slot, Quantize], ...]) -> Arguments:
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
        return _quantized(value, quantize)
    return type(value)([*value[:index], _quantized(value[index], quantize), *value[index + 1 :]])


def _with_outputs(out: Any, outputs: tuple[tuple[int, Quantize], ...]) -> Any:
    if isinstance(out, Tensor):
        return _quantized(out, outputs[0][1])
    for index, quantize in outputs:
        out = _quantized_entry(out, index, quantize)
    return out


def _is_float(slot: Slot | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call computes what was recorded under its name: the same function on integers (positions, lengths) is no operation."""
    outer, index = slot if isinstance(slot, tuple) else (slot, None)
    value = args[outer] if isinstance(outer, int) and outer < len(args) else kwargs.get(str(outer))
    if index is not None and isinstance(value, (tuple, list)) and index < len(value):
        value = value[index]
    return not isinstance(value, Tensor) or value.is_floating_point()


class LocalMode(TorchFunctionMode):
    """Follows one call of one container along its route."""

    def __init__(self, place: Place, training: bool, container: nn.Module | None = None) -> None:
        self.place, self.training, self.at, self.entered = place, training, place.start[training], 0
        self.container = container
        saves = is_plain_eager() and place.switch.saves and not place.is_watched()
        self.nodes = place.frugal if saves else place.nodes

    def frame(self, name: str) -> AbstractContextManager[Any]:
        """Follows part of a composite function along a route of its own; one that was not recorded runs in float."""
        place = self.place.frames.get((self.at, self.entered)) or self.place.frames.get((self.at, name))
        self.entered += 1
        return LocalMode(place, self.training) if place else torch._C.DisableTorchFunction()

    def _is_recorded(self, node: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call is what was recorded: on floating-point numbers, and with the weight that was seen, not another branch's."""
        if not _is_float(self.place.floats[node], args, kwargs):
            return False
        own = self.place.weights[node]
        if own is None or self.container is None or torch.compiler.is_compiling():
            return True
        slot, weight_of = own
        value = args[slot] if isinstance(slot, int) and slot < len(args) else kwargs.get(str(slot))
        return not isinstance(value, nn.Parameter) or value is weight_of(self.container)

    def __torch_function__(self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs, place = kwargs or {}, self.place
        name = getattr(func, "__name__", "")
        name = SAME.get(name, name)
        node = place.next[self.at].get(name)
        if node is not None and not self._is_recorded(node, args, kwargs):
            node = None
        if node is None:
            if isinstance(func, HigherOrderOperator) or name in CONSTRUCTORS:  # Dynamo hands over a whole checkpoint
                return func(*args, **kwargs)
            if name in COMPOSITE:
                with self:
                    return COMPOSITE[name](*args, **kwargs)
        with torch._C.DisableTorchFunction():
            if node is None:  # transparent, or not recorded here: pass through and stay
                out = ALIAS.get(name, func)(*args, **kwargs)
                if not torch.compiler.is_compiling() and isinstance(out, Tensor) and out.is_floating_point() and name not in place.met:
                    place.met.add(name_of(func))
                return out
            self.at, self.entered = node, 0
            operands, outputs, instead = self.nodes[node]
            if operands:
                args, kwargs = _with_operands(args, kwargs, operands)
            if instead is not None and (quantized := instead(args, kwargs)) is not None:
                return quantized
            out = func(*args, **kwargs)
            return _with_outputs(out, outputs) if outputs else out


class Simulated(nn.Module):
    """Mixin of a container's class: forward under the container's mode."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        place, inputs = self.__dict__[_PLACE]
        if not place.switch.on:
            return super().forward(*args, **kwargs)
        if inputs is not None:
            args, kwargs = inputs.quantize(args, kwargs)
        with LocalMode(place, self.training, self):
            return super().forward(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:  # the class has no importable name
        state = self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__  # type: ignore[no-untyped-call]
        return _rebuild, (type(self)._original,), state  # type: ignore[attr-defined]


class SimulatedEncoderLayer(Simulated):
    """In evaluation `nn.TransformerEncoderLayer` calls one function for all of itself, unless it sees a function mode; compiled, it does
    not see one. It does not do so either with an activation that the function lacks, and that is what it is told while simulating."""

    @property
    def activation_relu_or_gelu(self) -> int:
        known: int = vars(self)["activation_relu_or_gelu"]
        return 0 if vars(self)[_PLACE][0].switch.on else known


class SimulatedCopier(Simulated):
    """Mixin of a class that copies and pickles itself, as `torch.fx.GraphModule` does: it gets to do so as what it was written as."""

    @contextlib.contextmanager
    def _plain(self) -> Iterator[type[nn.Module]]:
        simulated = type(self)
        self.__class__ = simulated._original  # type: ignore[attr-defined]
        try:
            yield type(self)
        finally:
            self.__class__ = simulated

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        with self._plain():
            copied: nn.Module = copy.deepcopy(self, memo)
        vars(copied)[_PLACE] = copy.deepcopy(vars(self)[_PLACE], memo)
        return _simulate(copied)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with self._plain() as original:
            made = original.__reduce_ex__(self, protocol)  # type: ignore[misc]
        return _unpickled, (vars(self)[_PLACE], *made)


def _unpickled(place: Any, make: Callable[..., nn.Module], args: tuple[Any, ...], state: Any = None) -> nn.Module:
    module = make(*args)
    if state is not None:
        module.__setstate__(state)  # type: ignore[no-untyped-call]
    vars(module)[_PLACE] = place
    return _simulate(module)


def _simulate(module: nn.Module) -> nn.Module:
    module.__class__ = _simulated(type(module))
    return module


def _simulated(cls: type[nn.Module]) -> type[nn.Module]:
    mixin = SimulatedEncoderLayer if issubclass(cls, nn.TransformerEncoderLayer) else Simulated
    if hasattr(cls, "__deepcopy__"):
        mixin = SimulatedCopier
    return subclass(mixin, cls)  # type: ignore[arg-type]  # Module's __hash__ is annotated out of line


def _rebuild(cls: type[nn.Module]) -> nn.Module:
    simulated = _simulated(cls)
    return simulated.__new__(simulated)


def attach(model: nn.Module, plan: Plan, savings: Mapping[Site, Saving], quantizers: Mapping[str, Quantizer], switch: Switch) -> list[str]:
    """Make every container of `model` follow the plan. Returns a sentence for each that could not be made to."""
    notes = []
    kept: dict[tuple[str, ...], Kept] = {}
    made = {path: Place(path, plan, savings, quantizers, kept, switch) for path in plan.routes}
    for path, route in plan.routes.items():
        made[path].link(route.frames, made)
    for path, module in list(containers(model)):
        if path not in plan.routes:
            continue
        original = type(module)
        try:
            module.__class__ = _simulated(original)
        except TypeError as error:
            notes.append(f"'{path}' is not simulated: its class {original.__name__} takes no subclass here ({error})")
            continue
        if any(site in savings and savings[site].consumes for site in plan.routes[path].sites if site):
            made[path].leaves = list(leaves(module))
        inputs = Inputs(original, plan, quantizers) if path == "" and plan.inputs else None
        vars(module)[_PLACE] = (made[path], inputs)
    return notes


def detach(model: nn.Module) -> None:
    """Undo `attach`: every container runs as it was written."""
    for module in model.modules():
        if vars(module).pop(_PLACE, None) is not None:
            module.__class__ = type(module)._original  # type: ignore[attr-defined]


def places(model: nn.Module) -> list[Place]:
    """The places of all containers that follow a plan, and of the frames in them."""
    found: list[Place] = [vars(module)[_PLACE][0] for module in model.modules() if _PLACE in vars(module)]
    for place in found:  # grows: a frame may have frames
        found += [inner for inner in place.frames.values() if inner not in found]
    return found
