"""Results that the plan leaves in float because of what reads them in the examples: who else reads them, in one call of the model."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from qsim.graph.execute.place import Place, place_of
from qsim.graph.plan.actions import Readers
from qsim.graph.record.asker import function_of, left_in_graph, nodes_of_asker
from qsim.operations.moves import MOVING
from qsim.runs.arguments import tensors_in


class LeftToReaders(dict[int, tuple[weakref.ref[Tensor], Readers, Place, int]]):
    """Those of one call of the model that somebody may still know, by the ids of tensors: those that read them in the examples, and the
    node of a container that made them. A view of one is taken for it.

    Most are gone when the next comes, since what reads them in the examples took them: those are dropped then, and no earlier, for a
    reference that calls back costs as much as a quantizer.
    """

    def add(self, t: Any, readers: Readers, place: Place, node: int) -> None:
        if type(t) is Tensor:
            self.is_idle()
            self[id(t)] = weakref.ref(t), readers, place, node

    def is_idle(self) -> bool:
        """Whether nobody knows any of them, as far as one look tells."""
        if len(self) == 1 and next(iter(self.values()))[0]() is None:
            self.clear()
        return not self

    def note_read(self, by: Place, node: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Have the container whose node is called note what of its operands the examples did not show there."""
        if self.is_idle():
            return
        for value in (*args, *kwargs.values()) if kwargs else args:
            for t in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(t, Tensor) and (key := self._key(t)):
                    self.tell_read(by, node, *self[key][1:])
                    if node in by.changing:  # what it holds then is its reader's
                        del self[key]

    def settle(self, out: Any) -> None:
        """What a node returned, quantized, may lie in the memory of what it took: it is no longer in float."""
        if isinstance(out, Tensor) and (key := self._key(out)):
            del self[key]

    def note_returned(self, out: Any) -> None:
        """Note what the model returns and the examples did not show it to."""
        for t in tensors_in(out):
            if key := self._key(t):
                self.tell_returned(*self[key][1:])

    @staticmethod
    def tell_read(by: Place, node: int, readers: Readers, place: Place, made: int) -> None:
        """Note that node `node` of a container reads what node `made` of another, or of the same, returned, if no example showed that."""
        if by.sites[node][0] not in readers.names:
            by.note_read(node, *place.sites[made])

    @staticmethod
    def tell_returned(readers: Readers, place: Place, made: int) -> None:
        """Note that the model returns what node `made` of a container returned, if no example showed that."""
        if not readers.returned:
            place.note_returned(*place.sites[made])

    def _key(self, t: Tensor) -> int:
        """The key of a tensor, or of what it is a view of; 0 where neither is here."""
        if (left := self.get(id(t))) is not None and left[0]() is t:
            return id(t)
        if not t._is_view():
            return 0
        base = t._base
        return id(base) if (left := self.get(id(base))) is not None and left[0]() is base else 0


# The same while Dynamo traces, of the nodes of its graph.


def traced_left_to_readers(token: int, node: int) -> None:
    """Look, from now on, who reads `out`, a variable of the function that asks."""
    for t in nodes_of_asker("out"):
        left_in_graph()[t] = token, node


def note_read_in_graph(place: Place, node: int) -> None:
    """As `LeftToReaders.note_read`, of `args`, a variable of the function that asks."""
    planned = place.planned.plain[node]
    if left_in_graph() and (planned.operands or planned.outputs):
        for t, made in _left_in_variable("args"):
            LeftToReaders.tell_read(place, node, *made)
            if node in place.changing:
                del left_in_graph()[t]


def _left_in_variable(variable: str) -> Iterator[tuple[Any, tuple[Readers, Place, int]]]:
    """What is left to readers of what a variable of the function that asks stands for, or is a view of: with what made it."""
    known = left_in_graph()
    for t in nodes_of_asker(variable):
        while t not in known and t.op != "placeholder" and function_of(t) in MOVING and t.all_input_nodes:
            t = t.all_input_nodes[0]
        if t in known:
            token, node = known[t]
            place = place_of(token)
            if (readers := place.planned.plain[node].left) is not None:
                yield t, (readers, place, node)


def note_returned_by_graph() -> None:
    """As `LeftToReaders.note_returned`, of `out`, a variable of the function that asks."""
    for _, made in _left_in_variable("out") if left_in_graph() else ():
        LeftToReaders.tell_returned(*made)
