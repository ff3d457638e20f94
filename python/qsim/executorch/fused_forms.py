"""Passes over a marked graph: what XNNPACK takes in one form only, or gets wrong in another."""

from __future__ import annotations

import torch
from torch.fx import Graph, GraphModule, Node

from qsim.executorch.kernels import as_rectifier
from qsim.trace.fx_nodes import arguments, function, is_float
from qsim.trace.marks_behind_moves import key_of, shared_meta

_ATEN = torch.ops.aten
_WITH_NUMBERS = ("add", "sub", "mul", "div", "rsub")
_RECTIFIERS = ("relu", "relu6", "hardtanh")
_LARGEST = torch.finfo(torch.float32).max


def use_fused_forms(module: GraphModule) -> None:
    """Clamps as ``relu`` and ``hardtanh``, which kernels take in; numbers as floats; rectifiers between two grids in float."""
    graph = module.graph
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if (ends := as_rectifier(node)) is not None:
            _replace(graph, node, ends)
        elif function(node) == "hardsigmoid":
            _write_out(graph, node)
        elif function(node) in _WITH_NUMBERS and is_float(node):  # an integer would become a tensor that is converted in every call
            node.args = tuple(float(x) if type(x) is int else x for x in node.args)
    for node in list(graph.nodes):
        if node.op == "call_function" and function(node) in _RECTIFIERS:
            _keep_apart(module, node)


def _replace(graph: Graph, clamp: Node, ends: tuple[float, float]) -> None:
    is_relu = ends == (0.0, _LARGEST)
    with graph.inserting_before(clamp):
        made = graph.call_function(
            *((_ATEN.relu.default, (clamp.args[0],)) if is_relu else (_ATEN.hardtanh.default, (clamp.args[0], *ends)))
        )
    made.meta = shared_meta(clamp)
    clamp.replace_all_uses_with(made)
    graph.erase_node(clamp)


def _write_out(graph: Graph, hardsigmoid: Node) -> None:
    """``hardtanh(x + 3, 0, 6) / 6``: torch's own decomposition has integers for these numbers, which become tensors."""
    made = hardsigmoid.all_input_nodes[0]
    with graph.inserting_before(hardsigmoid):
        for target, numbers in ((_ATEN.add.Tensor, (3.0,)), (_ATEN.hardtanh.default, (0.0, 6.0)), (_ATEN.div.Tensor, (6.0,))):
            made = graph.call_function(target, (made, *numbers))
            made.meta = shared_meta(hardsigmoid)
    hardsigmoid.replace_all_uses_with(made)
    graph.erase_node(hardsigmoid)


def _keep_apart(module: GraphModule, rectifier: Node) -> None:
    """A rectifier between two grids in a form that is computed in float.

    XNNPACK would make it part of the kernel before it: of a product, which then rounds once to the second grid instead of twice, or of
    a pool, which takes the integers of one grid for those of the other.
    """
    before, behind = key_of(rectifier.args[0]), {key_of(user) for user in rectifier.users}
    if before is None or behind == {before} or None in behind:
        return
    x, graph = rectifier.args[0], module.graph
    low, high = _ends(rectifier)
    with graph.inserting_before(rectifier):
        if (low, high) == (0.0, _LARGEST):
            made = graph.call_function(_ATEN.leaky_relu.default, (x, 0.0))
        else:
            made = graph.call_function(_ATEN.maximum.default, (x, _number(module, low)))
            made.meta = shared_meta(rectifier)
            made = graph.call_function(_ATEN.minimum.default, (made, _number(module, high)))
    made.meta = shared_meta(rectifier)
    rectifier.replace_all_uses_with(made)
    graph.erase_node(rectifier)


def _ends(rectifier: Node) -> tuple[float, float]:
    if function(rectifier) == "hardtanh":
        given = arguments(rectifier)
        return float(given["min_val"]), float(given["max_val"])
    return 0.0, 6.0 if function(rectifier) == "relu6" else _LARGEST


def _number(module: GraphModule, value: float) -> Node:
    name = f"number_{value}".replace(".", "_").replace("-", "minus_").replace("+", "")
    if not hasattr(module, name):
        module.register_buffer(name, torch.tensor(value))
    return module.graph.get_attr(name)
