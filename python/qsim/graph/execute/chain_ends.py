"""Whether a quantizer at the end of a chain, or where its result is read, is for what came before it in this very call."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qsim.graph.execute.abroad import Abroad
from qsim.graph.execute.inputs import is_cast, operand
from qsim.graph.execute.left_to_readers import LeftToReaders
from qsim.graph.execute.links import Link, NodeCall, Passage
from qsim.graph.execute.lowered import Operands
from qsim.graph.execute.place import Place
from qsim.graph.execute.shortcuts import hands_to_hooks, runs_at_once
from qsim.graph.record.tape import Slot


class ChainEnds(TorchFunctionMode):
    """What the mode of a call of a container knows of chains: where they began, and what their operations handed on.

    Parameters
    ----------
    place : Place
    container : nn.Module or None
    counts : list of int
        How often each key was called.
    """

    def __init__(self, place: Place, container: nn.Module | None, counts: list[int]) -> None:
        self.place, self.container, self.counts = place, container, counts
        self.handed: dict[int, Any] = {}  # results of nodes whose chain goes on
        self.begun: dict[int, bool] = {}  # nodes that end a chain, and whether it began
        self.abroad = Abroad(container) if place.path == "" and container is not None else None
        self.left: LeftToReaders | None = None  # Dynamo knows no such dictionary
        self.taken: dict[int | str, int] = {}  # how often a chain went on with what was handed on
        self.trusted: list[int] = []  # nodes of which that is taken for granted: Dynamo traces what is under a checkpoint apart

    def checkpointed_above(self) -> None:
        """Have the checkpoints around this container run once more under the modes of those that they stand in."""
        raise NotImplementedError

    def standing(self, node: int, operands: Operands, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Operands:
        """Those of the operands of a node that were made, in this call, by what makes them in the examples, or are what others read before
        it with the same quantizer, and are as long as their scales."""
        after, memory, standing = self.place.after.get(node, {}), self.place.memory.get(node, {}), []
        again, made, parts = self.place.again.get(node, {}), self.place.made.get(node, {}), self.place.parts.get(node, {})
        for slot, name in self.place.first_read.get(node, {}).items():
            self.remember(name, operand(slot, args, kwargs))
        for slot, quantize in operands:
            stands = (slot not in after or any(map(self.was_made, after[slot]))) and not self.strayed((node, slot))
            if stands and slot in made:
                stands = self.is_constant(made[slot], operand(slot, args, kwargs))
            if stands and slot in parts:
                stands = _is_as_long(operand(slot, args, kwargs), *parts[slot])
            if stands and slot in memory:
                stands = self.is_of(memory[slot], operand(slot, args, kwargs), (node, slot))
            if stands and slot in again:
                stands = self.is_read_again(again[slot], operand(slot, args, kwargs), (node, slot))
            if stands:
                standing.append((slot, quantize))
            elif node not in self.place.passing:
                self.broken(node, slot)
        return tuple(standing)

    def note_passed(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note whether a call that no mode meets under Dynamo, and that ends a chain, takes what the chain hands on; one of several chains,
        if it stands in a loop."""
        links, abroad = self.place.passed_links[number], self.abroad
        if abroad is not None and not abroad.trusts:
            handed = next((link.name for link in links if self.is_handed_on(link, args, kwargs)), None)
            if handed is None:
                abroad.strayed.update(link.name for link in links)
            else:
                abroad.strayed.discard(handed)

    def is_constant(self, key: str, t: Any) -> bool:
        """Whether an operand may be the constant that was calibrated, and no data: another path may put that there."""
        return not isinstance(t, Tensor) or self.place.switch.marks or not runs_at_once() or self.place.spans(key, t)

    def is_cast(self, value: Any, weight: Any) -> bool:
        """See `qsim.graph.execute.inputs.is_cast`."""
        return is_cast(value, weight)

    def strayed(self, where: tuple[int, Slot]) -> bool:
        """Whether what a call that no mode meets has made for an operand is, in this call, of something else than in the examples."""
        abroad, at = self.abroad, (self.place.path, ("strayed", where))
        if abroad is None or where not in self.place.through:
            return False
        if not abroad.trusts and any(link.name in abroad.strayed for link, _ in self.place.through[where]):
            abroad.broken.add(at)
            self.checkpointed_above()
        return at in abroad.broken

    def remember(self, name: str, out: Any) -> None:
        """Note where a result lies that is quantized where it is read."""
        if self.abroad is not None and isinstance(out, Tensor):
            self.abroad.remember(name, out)

    def is_of(self, names: tuple[str, ...], t: Any, where: tuple[int, Slot]) -> bool:
        """Whether what an operand is, in this call, lies in the memory that one of these operations returned."""
        abroad, at = self.abroad, (self.place.path, where)
        if abroad is None or abroad.trusts:
            return abroad is None or at not in abroad.broken
        if not (known := abroad.lies_in(names, t)):
            abroad.broken.add(at)
            self.checkpointed_above()
        return known

    def is_read_again(self, name: str, t: Any, where: tuple[int, Slot]) -> bool:
        """Whether what an operand is, in this call, lies in the memory of what is read first. Where that was not, it is the first."""
        abroad = self.abroad
        return abroad is None or (not abroad.trusts and name not in abroad.memory) or self.is_of((name,), t, where)

    def was_made(self, call: NodeCall | str) -> bool:
        """Whether a call that makes what is quantized where it is read was made; "name": in another container.

        Where it was made more often than in the examples, what is read comes from a call that they did not show.
        """
        if not isinstance(call, str):
            return call.ordinal < self.counts[call.key] <= len(self.place.nodes_of[call.key]) and self.begun.get(call.node, True)
        abroad = self.abroad
        if abroad is None or call in abroad.handed:
            return True
        if not abroad.trusts:
            abroad.broken.add((self.place.path, call))
            self.checkpointed_above()
        return abroad.trusts and (self.place.path, call) not in abroad.broken

    def broken(self, node: int, slot: Slot | None) -> None:
        """A chain ends that did not begin."""
        self.place.note_broken(node, slot)

    def refer(self, t: Tensor) -> Any:
        """What stands for a result: a reference that counts would keep savings from proving that it is nobody else's."""
        return weakref.ref(t)

    def note_stranger(self, out: Any) -> None:
        """Note what a call returned that the examples did not show: no hook made it of what was handed on."""
        if self.abroad is not None and isinstance(out, Tensor):
            self.abroad.stranger[:] = [self.refer(out)]  # in place: Dynamo loses attributes that are set behind a branch

    def is_stranger(self, t: Any) -> bool:
        """Whether it is the last that was noted."""
        return self.abroad is not None and any(self.is_same(stranger, t) for stranger in self.abroad.stranger)

    def is_same(self, reference: Any, t: Any) -> bool:
        """Whether a reference is to `t`, whether it was made here or in what is compiled apart from this."""
        return (reference() if isinstance(reference, weakref.ref) else reference) is t

    def has_begun(self, node: int, link: Link, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the chain began that a node ends."""
        if node not in self.begun:
            self.begun[node] = self.is_handed_on(link, args, kwargs)
            if not self.begun[node] and self.abroad is not None:
                self.abroad.broken.add((self.place.path, link.before))
                self.checkpointed_above()
        return self.begun[node]

    def is_handed_on(self, link: Link, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call takes what one of the operations returned that come before it in its chain. Hooks may hand on something else."""
        before = link.before or ()
        given = args[0] if args else kwargs.get("input")
        found: dict[int | str, list[Any]] = {node: [self.handed[node]] for node in before if node in self.handed}
        names = [name for name in before if isinstance(name, str)]
        if names:
            if self.abroad is None:
                return True
            if self.abroad.trusts:
                return (self.place.path, before) not in self.abroad.broken
            found |= {name: self.abroad.handed[name] for name in names if name in self.abroad.handed}
        begins = [node for node, results in found.items() if any(self.is_same(handed, given) for handed in results)]
        if not begins and any(node in self.trusted for node in before):
            return True
        # A hook may have made another of what nothing has taken yet.
        if not begins and link.between and not self.is_stranger(given) and self.has_hooks(link.between):
            begins = [node for node, results in found.items() if self.taken_of(node).get(node, 0) < len(results)]
        for node in begins[:1]:
            taken = self.taken_of(node)
            taken[node] = taken.get(node, 0) + 1
        return bool(begins)

    def taken_of(self, node: int | str) -> dict[int | str, int]:
        """How often chains went on, of this container's nodes or of other containers'."""
        return self.taken if isinstance(node, int) or self.abroad is None else self.abroad.taken

    def has_hooks(self, between: frozenset[Passage]) -> bool:
        """Whether hooks look at what one of these modules takes where it is entered, or returns where it is left."""
        root, above = (self.container, self.place.path) if self.abroad is None else (self.abroad.model, "")
        return root is not None and any(
            hands_to_hooks(m, entered)
            for path, m in root.named_modules(prefix=above)
            for entered in (False, True)
            if (path, entered) in between
        )


def _is_as_long(t: Any, axis: int, channels: int) -> bool:
    """Whether an operand has as many channels as there are scales."""
    return isinstance(t, Tensor) and t.dim() > axis and t.shape[axis] == channels
