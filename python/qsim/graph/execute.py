"""Execute: every container enters a function mode of its own, made fresh for each call, that follows the plan.

Fresh means no shared state: threads that share a model, and recomputation under a checkpoint, each walk their own route.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.overrides import TorchFunctionMode

from qsim.graph.actions import Actions, Plan
from qsim.graph.frugal import FrugalMaker, InPlace, Kept, Rectifier, is_plain_eager, is_watched
from qsim.graph.functions import ALIAS, COMPOSITE, CONSTRUCTORS, RANDOM, SAME, TRANSPARENT, Function, name_of
from qsim.graph.lowered import LiveMaker, Lowered, Maker, MarkMaker, fallen_site, planned_site, site_beside
from qsim.graph.marks import Mark
from qsim.graph.routes import Site
from qsim.graph.savings import Saving
from qsim.graph.tape import InputSlot, Slot
from qsim.quantizers.bias import BiasQuantizer
from qsim.quantizers.quantizer import Quantizer

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Quantize = Callable[[Tensor], Tensor]


class Node(NamedTuple):
    """What happens at one node of a route: what quantizes operands, by slot, and outputs, by index; what may take the call's place."""

    operands: tuple[tuple[Slot, Quantize], ...]
    outputs: tuple[tuple[int, Quantize], ...]
    instead: Rectifier | None = None


class Nodes(NamedTuple):
    """The nodes of a route, thrice: what they do by the plan, with what may be saved, and with marks in place of quantizers."""

    plain: list[Node]
    frugal: list[Node]
    marked: list[Node]


class Switch:
    """Shared by all containers of one simulation. Off: they run as they were written, without any function mode."""

    def __init__(self) -> None:
        self.on = True
        self.saves = True
        self.marks = False
        self.falls_back = True
        self.mode: type[LocalMode] = LocalMode

    @contextlib.contextmanager
    def turned(self, on: bool, *, marks: bool = False, falls_back: bool = True) -> Iterator[None]:
        """Within the context the switch is `on`, with `qsim.graph.marks` in the places of all quantizers if `marks`; operations fall
        back if `falls_back`."""
        was = self.on, self.marks, self.falls_back
        self.on, self.marks, self.falls_back = on, marks, falls_back
        try:
            yield
        finally:
            self.on, self.marks, self.falls_back = was


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
        self._actions = [plan.actions.get(site, Actions()) if site else Actions() for site in route.sites]
        self._savings = [savings.get(site, Saving()) if site else Saving() for site in route.sites]
        self._neighbours = [plan.regions.neighbours.get(site) if site else None for site in route.sites]
        self._quantizers = quantizers
        frugal = [_frugal(*each, quantizers, kept) for each in zip(self._actions, self._savings, strict=True)]
        plain, marked = ([Node(*planned_site(a, make)) for a in self._actions] for make in (LiveMaker(quantizers), MarkMaker()))
        self.planned = Nodes(plain, frugal, marked)
        self.fallen = self.planned
        self.names = [site.name if site else "" for site in route.sites]
        self.floats = [site.first_operand if site else None for site in route.sites]
        self.weights = [_own_weight(path, plan, found) for found in self._actions]
        self.unseen, self.frames = route.unseen, dict[tuple[int, int | str], Place]()
        self.leaves: list[nn.Module] = []  # those that may have hooks which see memory that a saving overwrites later
        self.met: set[str] = set()

    def link(self, frames: Mapping[tuple[int, int | str], str], made: Mapping[str, Place]) -> None:
        """Tell the place where the frames of its composite functions are."""
        self.frames = {entered: made[path] for entered, path in frames.items()}

    def fall_back(self, formats: Mapping[str, str], kept: dict[tuple[str, ...], Kept]) -> None:
        """From now on the operations in `formats`, by name, compute in these float formats. `kept` as in the constructor."""
        self.fallen = Nodes(*(list(nodes) for nodes in self.planned)) if formats else self.planned
        for at, (actions, around) in enumerate(zip(self._actions, self._neighbours, strict=True)):
            if around is None or not around.is_concerned(formats):
                continue
            parameters = {actions.operands[slot].key for slot in self._savings[at].kept & actions.operands.keys()}
            makers: list[Maker] = [LiveMaker(self._quantizers), FrugalMaker(self._quantizers, parameters, kept), MarkMaker()]
            for nodes, make in zip(self.fallen, makers, strict=True):
                if around.operation in formats:
                    nodes[at] = Node(*fallen_site(actions, around, formats, make))
                else:
                    nodes[at] = Node(*site_beside(nodes[at].operands, nodes[at].outputs, around, formats, make))

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


def _frugal(actions: Actions, saving: Saving, quantizers: Mapping[str, Quantizer], kept: dict[tuple[str, ...], Kept]) -> Node:
    """What stands at a site as planned, with what may be saved. `kept`: what all sites keep: those that read one parameter keep it once."""
    planned, outputs = planned_site(actions, LiveMaker(quantizers))
    operands, instead = dict(planned), None
    for slot in saving.kept & actions.operands.keys():
        use = actions.operands[slot]
        parameter = kept.setdefault((use.key,), Kept(quantizers[use.key]))
        operands[slot] = parameter if use.observes else parameter.unobserved
    if (bias := actions.bias) is not None and bias.slot in saving.kept:
        shared = Kept(BiasQuantizer(quantizers[bias.input], quantizers[bias.weight]))
        operands[bias.slot] = kept.setdefault((bias.parameter, bias.input, bias.weight), shared)
    if saving.fresh:
        outputs = tuple((index, InPlace(quantizers[key], saving.unread)) for index, key in actions.outputs.items())
    if saving.rectifier is not None:
        instead = Rectifier(quantizers[actions.outputs[0]], saving)
    return Node(tuple(operands.items()), outputs, instead)


Paths = list[tuple[tuple[Any, ...], Quantize]]


class Inputs:
    """Quantizes the inputs of the model, however the caller passes them."""

    def __init__(self, cls: type[nn.Module], plan: Plan, quantizers: Mapping[str, Quantizer], switch: Switch) -> None:
        self.names = list(inspect.signature(cls.forward).parameters)[1:]  # without self
        paths = {slot if isinstance(slot, tuple) else (slot,): key for slot, key in plan.inputs.items()}
        self.paths: Paths = [(path, quantizers[key]) for path, key in paths.items()]
        self.marked: Paths = [(path, Mark(key)) for path, key in paths.items()]
        self.posts = [plan.regions.inputs[slot] for slot in plan.inputs]
        self.planned = self.fallen = self.paths, self.marked
        self.switch = switch

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

    def quantize(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        paths, marked = self.fallen if self.switch.falls_back else self.planned
        for (slot, *path), quantizer in marked if self.switch.marks else paths:
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


def _replaced(tree: Any, path: list[Any], quantizer: Quantize) -> Any:
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
        nodes = place.fallen if place.switch.falls_back else place.planned
        if place.switch.marks:
            self.nodes = nodes.marked
        else:
            saves = is_plain_eager() and place.switch.saves and not place.is_watched()
            self.nodes = nodes.frugal if saves else nodes.plain

    def frame(self, name: str) -> AbstractContextManager[Any]:
        """Follows part of a composite function along a route of its own; one that was not recorded runs in float."""
        place = self.place.frames.get((self.at, self.entered)) or self.place.frames.get((self.at, name))
        self.entered += 1
        return type(self)(place, self.training) if place else torch._C.DisableTorchFunction()

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
        if node is None:
            if isinstance(func, HigherOrderOperator) or name in CONSTRUCTORS:  # Dynamo hands over a whole checkpoint
                return func(*args, **kwargs)
            if name in COMPOSITE:
                with self:
                    return COMPOSITE[name](*args, **kwargs)
        with torch._C.DisableTorchFunction():
            if node is None or not self._is_recorded(node, args, kwargs):
                return self.passed(name, func, args, kwargs)
            self.at, self.entered = node, 0
            return self.met(node, func, args, kwargs)

    def passed(self, name: str, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that is transparent, or was not recorded here: it changes nothing of the way."""
        out = ALIAS.get(name, func)(*args, **kwargs)
        met = self.place.met
        if not torch.compiler.is_compiling() and isinstance(out, Tensor) and out.is_floating_point() and name not in met:
            met.add(name_of(func))
        return out

    def met(self, node: int, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call that was recorded at a node of the route."""
        operands, outputs, instead = self.nodes[node]
        if operands:
            args, kwargs = _with_operands(args, kwargs, operands)
        if instead is not None and (quantized := instead(args, kwargs)) is not None:
            return quantized
        out = func(*args, **kwargs)
        return _with_outputs(out, outputs) if outputs else out
