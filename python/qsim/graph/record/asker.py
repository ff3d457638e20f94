"""What Dynamo knows of the function that it traces, for functions that it runs while it does so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from qsim.graph.record.call_sites import translator_now


def variable_of_asker(name: str) -> Any:
    """Dynamo's variable of this name in the function that it traces."""
    return translator_now().symbolic_locals[name].realize()


def function_of(node: Any) -> str:
    """The name of the function that a node of the traced graph calls."""
    return getattr(node.target, "__name__", str(node.target)).strip("_")


def nodes_of_asker(name: str) -> Iterator[Any]:
    """The nodes of the traced graph that a variable of the function that Dynamo traces stands for, and those in its lists and dicts."""
    from torch._dynamo.variables import BaseListVariable, ConstDictVariable, TensorVariable

    left = [variable_of_asker(name)]
    while left:
        variable = left.pop().realize()
        if isinstance(variable, TensorVariable):
            yield variable.as_proxy().node
        elif isinstance(variable, ConstDictVariable):
            left += variable.items.values()
        elif isinstance(variable, BaseListVariable):
            left += variable.items


def left_in_graph() -> dict[Any, tuple[int, int]]:
    """Nodes of the traced graph whose tensors the plan leaves in float for those that read them: tokens of places, and nodes there."""
    found: dict[Any, tuple[int, int]] = vars(translator_now().output).setdefault("_qsim_left_to_readers", {})
    return found
