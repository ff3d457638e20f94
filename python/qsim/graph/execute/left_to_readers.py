"""Results in float that others than in the examples may read, in one call of the model: those that the plan leaves in float because of what
reads them, and what is changed in place, by the name that has no quantizer. The latter are quantized then, the former told."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

from qsim.graph.execute.place import Place, place_of
from qsim.graph.plan.actions import Readers
from qsim.graph.record.asker import function_of, left_in_graph, nodes_of_asker, operands_of_asker
from qsim.graph.record.tape import Slot, is_wrapper, memory_of, version_of
from qsim.operations.functions import Function, is_in_place
from qsim.operations.moves import MOVING
from qsim.runs.arguments import Arguments, tensors_in


class LeftToReaders(dict[int, tuple[weakref.ref[Any], Readers, Any, int, int]]):
    """Those of one call of the model that somebody may still know, by the ids of tensors: those that read them in the examples, and the
    node of a container that made them; and their versions then. A view of one is taken for it. Those that are views themselves, of all
    their memory, are here by that: others know it by names of their own, which torch does not tell from each other.

    Most are gone when the next comes, since what reads them in the examples took them: those are dropped then, and no earlier, for a
    reference that calls back costs as much as a quantizer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.quantized: dict[tuple[str, int, Slot], str] = {}  # what was, with the key of the quantizer
        self.repeated: dict[tuple[str, int, Slot], str] = {}  # what is to be, whatever tensors come there
        self.later: list[Any] = []  # modes under which parts run once more
        self.memories: list[StorageWeakRef] = []  # of those that are here by the negative address of it, until the call ends

    def run_again(self, mode: Any) -> None:
        """Have what runs under a checkpoint quantize the same when it runs once more under a mode, on other tensors maybe."""
        mode.left = LeftToReaders()
        mode.left.repeated = self.quantized
        self.later.append(mode)
        if self.quantized:
            _repeat(mode)

    def add(self, t: Any, readers: Readers, place: Place, node: int) -> None:
        if type(t) is Tensor:
            self.is_idle()
            if readers.in_parts and (t._is_view() or t.is_inference()) and _is_all_of_its_memory(t):
                memory = StorageWeakRef(t.untyped_storage())  # type: ignore[no-untyped-call]  # with it no other memory has this address
                self.memories.append(memory)
                self[-memory.cdata] = weakref.ref(LeftToReaders), readers, place, node, version_of(t)
            else:
                self[id(t)] = weakref.ref(t), readers, place, node, version_of(t)

    def is_idle(self) -> bool:
        """Whether nobody knows any of them, as far as one look tells."""
        if len(self) == 1 and next(iter(self.values()))[0]() is None:
            self.clear()
        return not self

    def read(self, by: Place, node: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """What the container whose node is called gives it: of its operands those that the examples did not show there are quantized, or
        noted."""
        if self.is_idle():
            return args, kwargs
        changed = [(at, found) for at, t in enumerate(args) if (found := self._read(by, node, at, t)) is not t]
        for at, found in changed:  # nothing else is made: `dies` counts who knows an operand
            args = (*args[:at], found, *args[at + 1 :])
        return args, {name: self._read(by, node, name, t) for name, t in kwargs.items()} if kwargs else kwargs

    def _read(self, by: Place, node: int, slot: Slot, value: Any) -> Any:
        if isinstance(value, (list, tuple)) and not isinstance(slot, tuple):
            inner = [self._read(by, node, (slot, i), t) for i, t in enumerate(value)]
            return inner if any(new is not old for new, old in zip(inner, value, strict=True)) else value
        if not isinstance(value, Tensor):
            return value
        if (again := self.repeated.get((by.path, node, slot))) is not None:
            return self._on_grid(by, node, slot, again, value)
        if not (key := self._key(value)):
            return value
        made = self[key][1:4]
        if node in by.changing:  # what it holds then is its reader's
            del self[key]
        is_whole = key == id(value)
        if not is_quantized_there(by, node, slot, is_whole, *made):
            return value
        return self._on_grid(by, node, slot, made[0].key, value)

    def _on_grid(self, by: Place, node: int, slot: Slot, key: str, value: Tensor) -> Any:
        self.quantized[by.path, node, slot] = key
        for mode in self.later:
            _repeat(mode)
        return by.quantized(value, key)

    def note_changed(self, func: Function, given: Iterable[Any]) -> None:
        """Note what a call that is not planned changed, of what it was given, by the name that has no quantizer."""
        for t in given:
            if not isinstance(t, Tensor) or not (key := self._key(t)):
                continue
            _, _, place, made, version = self[key]
            if version_of(t) != version or (t.is_inference() and is_in_place(func)):
                del self[key]
                tell_changed(place, made)

    def settle(self, out: Any) -> None:
        """What a node returned, quantized, may lie in the memory of what it took: it is no longer in float."""
        if isinstance(out, Tensor) and (key := self._key(out)):
            del self[key]

    def note_returned(self, out: Any) -> None:
        """Note what the model returns and the examples did not show it to."""
        for t in tensors_in(out):
            if key := self._key(t):
                tell_returned(*self[key][1:4])

    def _key(self, t: Tensor) -> int:
        """The key of a tensor, of what it is a view of, or of its memory; 0 where none is here."""
        if (left := self.get(id(t))) is not None and left[0]() is t:
            return id(t)
        if self.memories and type(t) is Tensor and (key := -(memory_of(t) or 0)) in self:
            return key
        if not t._is_view():
            return 0
        base = t._base
        return id(base) if (left := self.get(id(base))) is not None and left[0]() is base else 0


def _is_all_of_its_memory(t: Tensor) -> bool:
    return not is_wrapper(t) and memory_of(t) is not None and t.numel() * t.element_size() == t.untyped_storage().nbytes()


def _repeat(mode: Any) -> None:
    """Have a mode ask at every node what is to be quantized there: what it follows without Python knows nothing of that."""
    mode.follows = False
    mode.left[0] = weakref.ref(LeftToReaders), Readers(frozenset(), False), None, -1, 0  # it is never empty


def is_quantized_there(by: Place, node: int, slot: Slot, is_whole: bool, readers: Readers, place: Place, made: int) -> bool:
    """Whether what node `made` of a container returned, or changed in place, is put on its grid where node `node` of another, or of the
    same, reads it, or a part of it, since no example showed that. Noted where it has none, or is written into there."""
    use = by.actions_of[node].operands.get(slot)
    if by.sites[node][0] in readers.names or (use is not None and use.key == readers.key):
        return False
    if readers.key and (is_whole or readers.in_parts) and node not in by.changing:
        return True
    by.note_read(node, *place.sites[made])
    return False


def tell_returned(readers: Readers, place: Place, made: int) -> None:
    """Note that the model returns what node `made` of a container returned, if no example showed that."""
    if not readers.returned:
        place.note_returned(*place.sites[made])


def tell_changed(place: Place, made: int) -> None:
    """Note that what node `made` of a container changed in place is changed again by its older name, if that has another tensor."""
    if place.actions_of[made].outputs:
        place.note_changed(*place.sites[made])


# The same while Dynamo traces, of the nodes of its graph.

Slots = tuple[tuple[int | str, int | None, str], ...]


def traced_left_to_readers(token: int, node: int, older: bool) -> None:
    """Look, from now on, who reads `older` or `out`, variables of the function that asks."""
    for t in nodes_of_asker("older" if older else "out"):
        left_in_graph()[t] = token, node, older, version_of(t.meta["example_value"])


def read_in_graph(place: Place, node: int) -> Slots:
    """As `LeftToReaders.read`, of `args` and `kwargs`, variables of the function that asks: which are quantized, those in lists with their
    place there, and the keys of what does it."""
    planned, found = place.planned.plain[node], []
    _note_changed_in_graph()
    if left_in_graph() and (planned.operands or planned.outputs):
        for at, within, t in operands_of_asker():
            if (left := _left_in_graph(t)) is not None:
                whole, made = left
                if is_quantized_there(place, node, at if within is None else (at, within), whole is t, *made):
                    found.append((at, within, made[0].key))
                if node in place.changing:
                    del left_in_graph()[whole]
    return tuple(found)


def on_grids(by: Place, args: tuple[Any, ...], kwargs: dict[str, Any], slots: Slots) -> Arguments:
    """Arguments, with those quantized that `read_in_graph` found."""
    given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    for at, within, key in slots:
        if within is None:
            given[at] = by.quantized(given[at], key)
        else:
            inner = [*given[at]]
            inner[within] = by.quantized(inner[within], key)
            given[at] = inner
    return tuple([given[at] for at in range(len(args))]), {name: given[name] for name in kwargs}


def _note_changed_in_graph() -> None:
    """As `LeftToReaders.note_changed`, of all that is left."""
    for t, (token, made, older, version) in [*left_in_graph().items()]:
        if older and version_of(t.meta["example_value"]) != version:
            del left_in_graph()[t]
            tell_changed(place_of(token), made)


def note_returned_by_graph() -> None:
    """As `LeftToReaders.note_returned`, of `out`, a variable of the function that asks."""
    _note_changed_in_graph()
    for t in nodes_of_asker("out") if left_in_graph() else ():
        if (left := _left_in_graph(t)) is not None:
            tell_returned(*left[1])


def _left_in_graph(t: Any) -> tuple[Any, tuple[Readers, Place, int]] | None:
    """What is left to readers, of a node of the graph or what that is a view of, with what made it."""
    known, asked = left_in_graph(), t
    while t not in known and t.op != "placeholder" and function_of(t) in MOVING and t.all_input_nodes:
        t = t.all_input_nodes[0]
    if t not in known:
        t = next((other for other, (*_, older, _) in known.items() if older and _are_one_memory(other, asked)), None)
    if t is None:
        return None
    token, node, older, _ = known[t]
    place = place_of(token)
    planned = place.planned.plain[node]
    readers = planned.older if older else planned.left
    return None if readers is None else (t, (readers, place, node))


def _are_one_memory(changed: Any, asked: Any) -> bool:
    """Whether what was changed, all of its memory, is what is asked for, by another name: of nodes of the graph."""
    values = [node.meta.get("example_value") for node in (changed, asked)]
    if not all(type(value) is FakeTensor for value in values) or not _is_all_of_its_memory(values[0]):
        return False
    return memory_of(values[0]) == memory_of(values[1])
