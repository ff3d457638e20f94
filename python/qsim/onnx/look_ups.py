"""Look-ups in tables of integers (embeddings): rows are dequantized behind them. Before them, ONNX Runtime dequantizes the whole table in
each run. The numbers are the same."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from qsim.onnx.insert import NodeInserter

_INTEGERS = (ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT16, ir.DataType.UINT16)  # of which ONNX Runtime's Gather takes rows


def look_up_integers(model: ir.Model) -> None:
    """Have each Gather of a dequantized constant with one scale read the integers, in place. Where rows are quantized to the table's own
    grid again, the integers that were looked up are those."""
    insert = NodeInserter(model.graph)
    for node in list(model.graph):
        dequantize = _table(node)
        if dequantize is None or node.outputs[0].is_graph_output():
            continue
        (table, *grid), (rows,) = dequantize.inputs, node.outputs
        assert table is not None
        assert rows.dtype is not None
        again = [user for user in rows.consumers() if _is_on_its_grid(user, dequantize)]
        readers = [(reader, position) for reader, position in rows.uses() if reader not in again]
        node.replace_input_with(0, table)
        if readers:
            name, behind = f"{dequantize.outputs[0].name}_rows", next(iter(node.successors()), None)
            made = insert.node(behind, "DequantizeLinear", [rows, *grid], name, rows.dtype, rows.shape)  # type: ignore[list-item]
            for reader, position in readers:
                reader.replace_input_with(position, made)
        rows.dtype = table.dtype  # type: ignore[assignment]
        for quantize in again:
            quantize.outputs[0].replace_all_uses_with(rows, replace_graph_outputs=True)
            model.graph.remove(quantize, safe=True)
        if not dequantize.outputs[0].uses():
            model.graph.remove(dequantize, safe=True)
    model.graph.sort()


def reads_integers(value: ir.Value) -> bool:
    """Whether a value is rows of a constant table of integers."""
    node = value.producer()
    return node is not None and node.op_type == "Gather" and node.inputs[0] is not None and node.inputs[0].const_value is not None


def _table(node: ir.Node) -> ir.Node | None:
    """The DequantizeLinear, with one scale, of the constant that a Gather reads."""
    dequantize = node.inputs[0].producer() if node.op_type == "Gather" and node.domain == "" and node.inputs[0] is not None else None
    if dequantize is None or dequantize.op_type != "DequantizeLinear" or "block_size" in dequantize.attributes:
        return None
    held, scale = (None if value is None else value.const_value for value in dequantize.inputs[:2])
    return dequantize if held is not None and scale is not None and scale.numpy().size == 1 and held.dtype in _INTEGERS else None


def _is_on_its_grid(user: ir.Node, dequantize: ir.Node) -> bool:
    """Whether a reader of rows quantizes them to the table's own grid."""
    if user.op_type != "QuantizeLinear":
        return False
    return all(_same(a, b) for a, b in zip(user.inputs[1:], dequantize.inputs[1:], strict=False))


def _same(a: ir.Value | None, b: ir.Value | None) -> bool:
    held = [None if value is None else value.const_value for value in (a, b)]
    if held[0] is None or held[1] is None:
        return held[0] is held[1]
    return held[0].dtype is held[1].dtype and np.array_equal(held[0].numpy(), held[1].numpy())
