"""Nodes that stay in float32 for the sake of others: what only moves values on the way from one that is kept to the next."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from qsim.errors import ExportError
from qsim.operations.onnx_types import HANDING_ON

_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE)


def float_region(graph: ir.Graph, keep: Collection[str]) -> list[str]:
    """The names in `keep`, and of the nodes that hand on what these need in float32, in the order of the graph.

    A Slice between two sums in float32 has to be in float32 too: what the first one made overflows in it otherwise. So has an Expand of
    a constant that a kept node reads, and a Reshape of a kept node's result that is a result of the model. Not so what was in half
    precision before it is moved. These are the rules by which a simulation runs (`qsim.clinic.half_run`), but that a Concat hands on too.

    Parameters
    ----------
    graph : ir.Graph
        Sorted, with the types of its values.
    keep : collection of str
        Names of nodes.

    Raises
    ------
    ExportError
        A node that has to stay in float32 has no name.
    """
    kept = {node for node in graph if node.name in keep}
    wide = _wide(graph, kept)
    for node in reversed(list(graph)):
        if node in wide and any(value.is_graph_output() or not kept.isdisjoint(value.consumers()) for value in node.outputs):
            kept.add(node)
    if nameless := next((node for node in graph if node in kept and not node.name), None):
        raise ExportError(
            f"Plan: the {nameless.op_type} that makes '{nameless.outputs[0].name}' has to stay in float32, and has no name to tell a tool "
            "by: name all nodes, as torch.onnx.export does"
        )
    return [str(node.name) for node in graph if node in kept]


def _wide(graph: ir.Graph, kept: Collection[ir.Node]) -> set[ir.Node]:
    """Nodes that only move values, none of which has been in half precision or some of which a kept node made."""
    wide, halved = {value for node in kept for value in node.outputs}, set[ir.Value]()
    found = set[ir.Node]()
    for node in graph:
        read = [value for value in node.inputs if value is not None and value.dtype in _FLOATS]
        if node in kept or node.op_type == "Constant":
            continue
        if not hands_on(node) or (wide.isdisjoint(read) and not halved.isdisjoint(read)):
            halved.update(node.outputs if read else ())
            continue
        if any(value.dtype in _FLOATS for value in node.outputs):
            found.add(node)
        if not wide.isdisjoint(read):
            wide.update(node.outputs)
    return found


def hands_on(node: ir.Node) -> bool:
    """Whether the floating-point numbers that a node returns are those that it reads, zeros, or integers and truths as such."""
    if node.domain:
        return False
    if node.op_type == "Resize":
        mode = node.attributes.get("mode")
        return mode is None or mode.as_string() == "nearest"
    return node.op_type in HANDING_ON
