"""Arguments for one call alone: what the model writes into them is not its caller's; and which of them it writes into."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from qsim.graph.record.tape import InputSlot, version_of
from qsim.runs.arguments import is_dense, tensors_in

Given = TypeVar("Given")


def own_arguments(model: nn.Module, given: Given) -> tuple[Given, list[str]]:
    """Copies of arguments, or of a batch: of tensors and of objects such as caches, without gradients; modules stay what they are.

    Returns
    -------
    arguments : as `given`
    shared : list of str
        Types of the arguments that cannot be copied, and are used as they were given.
    """
    shared: list[str] = []
    memo: dict[int, Any] = {id(held): held for held in (*model.modules(), *model.parameters(), *model.buffers())}

    def own(value: Any) -> Any:
        if isinstance(value, Tensor):
            return torch.clone(value)
        if isinstance(value, nn.Module):
            return value
        for t in tensors_in(value):
            memo.setdefault(id(t), torch.clone(t))  # results in a graph refuse to be deep-copied
        try:
            return copy.deepcopy(value, memo)
        except Exception:  # a generator, a lock, a handle: whatever its type raises
            shared.append(type(value).__name__)
            return value

    with torch.no_grad():
        copied: Given = tree_map(own, given)
    return copied, shared


class Entered:
    """A tensor as the model got it.

    Parameters
    ----------
    slot : InputSlot
    t : Tensor
    """

    def __init__(self, slot: InputSlot, t: Tensor) -> None:
        self.slot = slot
        self._tensor, self._before = t, version_of(t)
        self._contents = _bytes(t).clone() if is_dense(t) and not (t.is_meta or t.is_conj() or t.is_neg()) else None

    def is_written(self) -> bool:
        """Whether it was written to since, also past its version, as through ``t.data``."""
        if version_of(self._tensor) != self._before:
            return True
        return self._contents is not None and not torch.equal(_bytes(self._tensor), self._contents)


def _bytes(t: Tensor) -> Tensor:
    return t.detach().contiguous().reshape(-1).view(torch.uint8)
