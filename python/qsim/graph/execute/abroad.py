"""What containers know of each other in one call of the model."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from qsim.graph.execute.folded_pairs import Pairs
from qsim.graph.record.tape import memory_of, unwrapped


class Abroad:
    """What containers hand to each other in one call of the model: results whose chain goes on in another container, and the memory of
    those that are quantized where they are read; by name."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.handed: dict[str, list[Any]] = {}
        self.taken: dict[int | str, int] = {}  # how often a chain went on with what was handed on
        self.memory: dict[str, list[StorageWeakRef | Tensor]] = {}  # while Dynamo traces, the results themselves
        self.broken: set[tuple[str, Any]] = set()  # ends of chains that did not begin, by container and what is before them
        self.strayed: set[str] = set()  # what no mode meets under Dynamo, and took something else than what comes before it in its chain
        self.stranger: list[Any] = []  # what stands for the last result of a call that the examples did not show
        self.pairs = Pairs(model)
        self.trusts = False  # that all others began: Dynamo traces checkpoints apart, and what runs again takes other tensors

    def again(self) -> Abroad:
        """For what runs under a checkpoint when it runs once more."""
        other = Abroad(self.model)
        other.broken, other.trusts = self.broken, True
        return other

    def remember(self, name: str, t: Tensor) -> None:
        """Note in which memory the result of an operation lies."""
        if memory_of(t) is not None:  # the reference names its storage until it is gone: no other gets its address
            self.memory.setdefault(name, []).append(StorageWeakRef(unwrapped(t).untyped_storage()))  # type: ignore[no-untyped-call]

    def lies_in(self, names: tuple[str, ...], t: Any) -> bool:
        """Whether `t` lies in memory that one of these operations returned."""
        memory = memory_of(t) if isinstance(t, Tensor) else None
        return memory is None or any(_is(known, memory) for name in names for known in self.memory.get(name, ()))


def _is(known: StorageWeakRef | Tensor, memory: int) -> bool:
    return bool((memory_of(known) if isinstance(known, Tensor) else known.cdata) == memory)
