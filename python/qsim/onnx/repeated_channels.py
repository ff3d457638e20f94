"""Depthwise convolutions with several filters for each channel, as ones of a filter each on channels that are repeated.

ONNX Runtime has a kernel for one filter a channel. Of others it makes a matrix product for each channel, ten and more times as slow as in
float: the 7x7 convolutions of FastViT that double the channels.
"""

from __future__ import annotations

import math

import onnx_ir as ir
from onnx_ir.passes import common

from qsim.onnx.channel_spaces import WORTH, channels_of
from qsim.onnx.insert import NodeInserter


def repeat_channels(model: ir.Model) -> int:
    """Gather quantized channels, each as often as it has filters, in front of such convolutions. Returns how many there were.

    Parameters
    ----------
    model : ir.Model
        Lowered, with shapes.
    """
    insert, found = NodeInserter(model.graph), 0
    for conv in [node for node in model.graph if node.op_type == "Conv" and "group" in node.attributes]:
        x, weight, y = conv.inputs[0], conv.inputs[1], conv.outputs[0]
        dequantize = None if x is None else x.producer()
        if x is None or weight is None or dequantize is None or dequantize.op_type != "DequantizeLinear" or weight.shape is None:
            continue
        channels, filters, groups = channels_of(x), channels_of(y), conv.attributes["group"].as_int()
        q, grid = dequantize.inputs[0], [value for value in dequantize.inputs[1:] if value is not None]
        if not channels == groups > 1 or filters in (None, channels) or q is None or q.dtype not in (ir.DataType.UINT8, ir.DataType.INT8):
            continue
        assert filters is not None
        assert y.shape is not None
        assert q.shape is not None
        sizes = [n if isinstance(n, int) else math.inf for n in (*weight.shape, *y.shape[2:])]
        if math.prod(sizes) < WORTH or not _is_single(grid):
            continue
        places = [i * channels // filters for i in range(filters)]
        indices = ir.Value(name=insert.free(f"{q.name}_places"), const_value=ir.tensor(places, dtype=ir.DataType.INT64))
        model.graph.register_initializer(indices)
        shape = ir.Shape([n if i != 1 else filters for i, n in enumerate(q.shape)])
        repeated = insert.node(conv, "Gather", [q, indices], f"{q.name}_repeated", q.dtype, shape, axis=1)
        read = insert.node(conv, "DequantizeLinear", [repeated, *grid], f"{x.name}_repeated", ir.DataType.FLOAT, shape)
        conv.replace_input_with(0, read)
        conv.attributes["group"] = ir.AttrInt64("group", filters)
        found += 1
    if found:
        common.RemoveUnusedNodesPass()(model)
    return found


def _is_single(grid: list[ir.Value]) -> bool:
    """Whether a tensor has one scale."""
    return all(value.const_value is not None and value.const_value.size == 1 for value in grid)
