"""What Dynamo knows of the function that it traces, for functions that it runs while it does so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from qsim.graph.record.call_sites import translator_now
from qsim.operations.functions import CASTS
from qsim.operations.moves import MOVING

_KEEPING = MOVING | CASTS | {"getattr"}  # whose result has the values of what they take


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


def operands_of_asker() -> Iterator[tuple[int | str, int | None, Any]]:
    """The same of `args` and `kwargs`, variables of that function: with the place of each, and its place in a list that stands there."""
    from torch._dynamo.variables import BaseListVariable, TensorVariable

    named = {key.vt.as_python_constant(): variable for key, variable in variable_of_asker("kwargs").items.items()}
    for at, variable in [*enumerate(variable_of_asker("args").items), *named.items()]:
        given = variable.realize()
        inner = enumerate(given.items) if isinstance(given, BaseListVariable) else [(None, given)]
        for within, each in inner:
            if isinstance(found := each.realize(), TensorVariable):
                yield at, within, found.as_proxy().node


def held_by_modules(node: Any) -> Tensor | None:
    """What a node of the traced graph stands for, where it is a tensor that a module has as a plain attribute, or such a one moved or cast.
    A guard has the graph traced again where the module has another. None for all else."""
    from torch._dynamo.guards import GuardBuilder, install_guard

    if node.op == "placeholder":
        given = node.meta["grapharg"]
        if "NN_MODULE" not in given.source.guard_source.name:
            return None
        install_guard(given.source.make_guard(GuardBuilder.ID_MATCH))
        held: Tensor = given.example
        return held
    if function_of(node) not in _KEEPING or node.all_input_nodes != [*node.args[:1]]:
        return None
    if (first := held_by_modules(node.args[0])) is None:
        return None
    call = getattr(type(first), node.target) if node.op == "call_method" else node.target
    moved = call(first.detach().clone(), *node.args[1:], **node.kwargs)  # a function in place must not reach the module's
    return moved if isinstance(moved, Tensor) else None


def traced_is_cast() -> bool:
    """Whether a tensor is a parameter in another dtype or on another device: `value` and `weight`, variables of the asking function."""
    nodes, weights, cast = [*nodes_of_asker("value")], [*nodes_of_asker("weight")], False
    values = [node.meta["example_value"] for node in (*nodes, *weights)]
    if len(values) != 2 or (values[0].dtype, values[0].device) == (values[1].dtype, values[1].device):
        return False
    node = nodes[0]
    while node not in weights and function_of(node) in CASTS:
        node, cast = node.args[0], True
    return cast and node in weights


def left_in_graph() -> dict[Any, tuple[int, int, bool, int]]:
    """Nodes of the traced graph whose tensors the plan leaves in float for those that read them: tokens of places, nodes there, whether
    it is what that node changes, by an older name, and the version of the tensor then."""
    found: dict[Any, tuple[int, int, bool, int]] = vars(translator_now().output).setdefault("_qsim_left_to_readers", {})
    return found
