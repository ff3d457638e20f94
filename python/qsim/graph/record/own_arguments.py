"""Arguments for one call alone: what the model writes into them is not its caller's."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from qsim.runs.arguments import Arguments, tensors_in


def own_arguments(model: nn.Module, given: Arguments) -> tuple[Arguments, list[str]]:
    """Copies of arguments, of tensors and of objects such as caches, without gradients; modules stay what they are.

    Returns
    -------
    arguments : Arguments
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
        args, kwargs = tree_map(own, given)
    return (args, kwargs), shared
