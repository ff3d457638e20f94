"""A model of one's own."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

Model = TypeVar("Model", bound=nn.Module)


def copied(model: Model) -> Model:
    """A deep copy of a model.

    Results that its modules hold are copied as values, without the graph that they are in, of which torch makes no deep copy: the weight
    that `torch.nn.utils.weight_norm` computed, a state that was not detached.
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
        for held in tree_leaves(vars(module)):
            if isinstance(held, Tensor) and not held.is_leaf:
                memo[id(held)] = held.detach().clone()
    return copy.deepcopy(model, memo)


class Derived(dict[str, Any]):
    """What was derived from a model. A copy, or what is pickled, starts empty."""

    def __reduce__(self) -> tuple[type[Derived], tuple[()]]:
        return Derived, ()
