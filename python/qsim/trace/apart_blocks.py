"""What torch.export traces apart, as part of the graph: blocks under `torch.autocast(enabled=False)`, `torch.no_grad()` and the like."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch._higher_order_ops.wrap import wrap_with_autocast, wrap_with_set_grad_enabled
from torch._ops import HigherOrderOperator
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node

from qsim.errors import CaptureError

# How many arguments come before the graph of a block, and its operands.
_BLOCKS = {wrap_with_autocast: 4, wrap_with_set_grad_enabled: 1}


def inline_regions(exported: ExportedProgram) -> None:
    """Put the operations of such blocks where the blocks are, in place: gradients are not traced, and float32 is what there is without
    autocast. The results of the program keep their names.

    Raises
    ------
    CaptureError
        A block computes in another format, or something else has a graph of its own: a branch or a loop by values.
    """
    module, graph = exported.graph_module, exported.graph
    named = {getattr(spec.arg, "name", None) for spec in exported.graph_signature.output_specs}
    while blocks := [node for node in graph.nodes if node.target in _BLOCKS]:
        for node in blocks:
            _check_format(node)
            count = _BLOCKS[node.target]
            inner, operands = node.args[count], node.args[count + 1 :]
            results = _copied(graph, node, getattr(module, inner.target), operands, module)
            for user in list(node.users):
                assert user.target is operator.getitem
                _replace(graph, user, results[user.args[1]], user.name in named)
            graph.erase_node(node)
            if not inner.users:
                graph.erase_node(inner)
                delattr(module, inner.target)  # exporters translate all graphs that there are
    left = next((node for node in graph.nodes if isinstance(node.target, HigherOrderOperator)), None)
    if left is not None:
        raise CaptureError(
            f"QuantSim: forward calls {left.target.name()}, of which torch.export traces parts apart: no quantizer can be put there. "
            "What runs on a runtime must be one graph: take it out of forward, or simulate the part that is exported."
        )
    module.recompile()


def _check_format(node: Node) -> None:
    if node.target is not wrap_with_autocast:
        return
    device, dtype, enabled = node.args[:3]
    if enabled:
        wanted = dtype or torch.get_autocast_dtype(str(device))
        raise CaptureError(
            f"QuantSim: forward computes under torch.autocast in {wanted}, whose casts torch.export does not trace: "
            "write them, as in x.to(dtype), or trace a model without autocast; sim.fallback has operations compute in such a format."
        )


def _copied(graph: Graph, node: Node, block: GraphModule, operands: Sequence[Any], module: GraphModule) -> list[Any]:
    """Copies of the nodes of a block in front of it. Returns what it returns."""
    given = iter(operands)
    copies: dict[Node, Any] = {}
    for inner in block.graph.nodes:
        if inner.op == "placeholder":
            copies[inner] = next(given)
        elif inner.op == "output":
            returned = inner.args[0]
            return [copies.get(value, value) for value in (returned if isinstance(returned, (list, tuple)) else [returned])]
        else:
            with graph.inserting_before(node):
                copies[inner] = graph.node_copy(inner, copies.__getitem__)
            if inner.op == "get_attr":  # the graph of a block in the block
                name = f"{copies[inner].name}_{id(block)}"
                setattr(module, name, getattr(block, str(inner.target)))
                copies[inner].target = name
    raise AssertionError("a graph without an output")


def _replace(graph: Graph, item: Node, result: Any, is_named: bool) -> None:
    """Have the readers of an item of what a block returned read the operation that makes it."""
    if is_named:  # of the program's results
        with graph.inserting_before(item):
            copy = graph.call_function(torch.ops.aten.clone.default, (result,))
        copy.meta, name = dict(item.meta), item.name
        item.replace_all_uses_with(copy)
        graph.erase_node(item)
        copy.name = name
    else:
        item.replace_all_uses_with(result)
        graph.erase_node(item)
