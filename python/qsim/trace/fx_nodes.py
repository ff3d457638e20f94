"""What a node of a traced graph says: its arguments by name, its module."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from qsim.trace.marks_behind_moves import operation


def function(node: Node) -> str:
    """The name of the function that a node calls; that of ``add`` for ``add_``, which differ in memory only."""
    return operation(node).rstrip("_")


def arguments(node: Node) -> dict[str, Any]:
    """All arguments of a call of an ATen operator, by the names in its schema; those left out with their defaults."""
    assert isinstance(node.target, torch._ops.OpOverload)
    given = dict(zip((a.name for a in node.target._schema.arguments), node.args, strict=False)) | node.kwargs
    return {a.name: given.get(a.name, a.default_value) for a in node.target._schema.arguments}


def module(node: Node) -> str:
    """The path of the module that a node belongs to; "" for the model itself."""
    stack = node.meta.get("nn_module_stack")
    return str(list(stack.values())[-1][0]) if stack else ""


def is_leaf(node: Node) -> bool:
    """Whether a node is all that a module of torch.nn does."""
    stack = node.meta.get("nn_module_stack") or {"": ("", "")}
    return str(list(stack.values())[-1][1]).startswith("torch.nn.modules.")


def shape(node: Node) -> tuple[Any, ...]:
    """Of the tensor that a node makes; sizes that vary are symbols."""
    return tuple(node.meta["val"].shape)


def ancestors(nodes: Iterable[Node]) -> set[Node]:
    """The nodes themselves, and all that they are computed from."""
    found, left = set[Node](), list(nodes)
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += node.all_input_nodes
    return found


def reshape_sizes(shape: Iterable[Any]) -> list[int] | None:
    """A shape as a reshape takes it, -1 for a length that is open; None if there are several of these."""
    found = [n if isinstance(n, int) else -1 for n in shape]
    return found if found.count(-1) <= 1 and 0 not in found else None


def is_float(node: Node) -> bool:
    """Whether a node makes one floating-point tensor."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point()


def per_axis(values: int | Iterable[int], axes: int) -> list[int]:
    """One number for each of so many axes; one alone is for all."""
    found = [values] if isinstance(values, int) else list(values)
    return found * axes if len(found) == 1 else found
