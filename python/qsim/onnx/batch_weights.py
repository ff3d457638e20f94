"""Weights that are batches of matrices (experts in one parameter), with a scale for each column.

ONNX Runtime's optimiser makes a product of two dequantized operands one on integers. Where its result is not quantized, its kernel then
refuses such a weight when it runs. So these products get the numbers that the integers stand for, which are the same.
"""

from __future__ import annotations

import onnx_ir as ir
import torch

from qsim import ops
from qsim.onnx.insert import NodeInserter
from qsim.onnx.lower import as_tensor


def hold_batches_in_float(model: ir.Model) -> list[str]:
    """Do so in place. Returns a sentence for the report, if there are some."""
    insert, held = NodeInserter(model.graph), set[str]()
    for node in list(model.graph):
        weight = node.inputs[1] if node.op_type == "MatMul" and node.domain == "" else None
        dequantize = None if weight is None else weight.producer()
        if dequantize is None or weight is None or not _is_batch(dequantize) or _is_quantized(node):
            continue
        q, scale, zero = (as_tensor(value) for value in dequantize.inputs)  # type: ignore[arg-type]
        axis = dequantize.attributes["axis"].as_int()
        numbers = ops.dequantize(q, scale, zero.to(torch.int32), axis=axis)
        node.replace_input_with(1, insert.initializer(f"{weight.name}_held", numbers, "float32"))
        held.add(str(weight.name))
        if not weight.uses():
            model.graph.remove(dequantize, safe=True)
    if not held:
        return []
    return [f"{len(held)} weights are batches of matrices whose products are not quantized: they are held in float, on their grids"]


def _is_batch(dequantize: ir.Node) -> bool:
    if dequantize.op_type != "DequantizeLinear" or "axis" not in dequantize.attributes or "block_size" in dequantize.attributes:
        return False
    held = [value for value in dequantize.inputs if value is not None and value.const_value is not None]
    return len(held) == 3 and as_tensor(held[0]).dim() > 2 and as_tensor(held[1]).numel() > 1


def _is_quantized(node: ir.Node) -> bool:
    readers = node.outputs[0].consumers()
    return bool(readers) and not node.outputs[0].is_graph_output() and all(reader.op_type == "QuantizeLinear" for reader in readers)
