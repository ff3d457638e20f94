"""ONNX Runtime's own operators for 4-bit weights in groups, MatMulNBits and GatherBlockQuantized.

They stand in place of DequantizeLinear and a product, and read the integers as they are stored. Left as DequantizeLinear and MatMul, ONNX
Runtime fuses the two into MatMulNBits by itself, with accuracy level 4, which rounds activations to int8; and a Gemm it does not fuse at
all, but dequantizes the weight in every call.

Source: github.com/microsoft/onnxruntime, docs/ContribOperators.md.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor

from qsim import ops
from qsim.onnx.insert import NodeInserter

MICROSOFT = "com.microsoft"
_SMALLEST_BLOCK = 16
_MIDDLE = 8  # of 4 bits: the zero point where none is given


class _PackedBlocks:
    """A constant of 4 bits in blocks, as its DequantizeLinear has it."""

    def __init__(self, dequantize: ir.Node) -> None:
        self.integers, self.scale, self.zero_point = (_tensor(value) for value in dequantize.inputs)
        self.signed = dequantize.inputs[0].dtype is ir.DataType.INT4  # type: ignore[union-attr]
        self.axis = dequantize.attributes["axis"].as_int() % self.integers.dim()
        self.size = dequantize.attributes["block_size"].as_int()
        self.name = str(dequantize.inputs[0].name)  # type: ignore[union-attr]


def use_block_kernels(model: ir.Model, names: dict[str, str], accuracy_level: int) -> list[str]:
    """Replace products and look-ups of such constants, in place.

    Parameters
    ----------
    model : ir.Model
        Lowered.
    names : dict of str to str
        The tensor of each quantizer; a constant that is stored otherwise now gets its new name.
    accuracy_level : int
        What MatMulNBits computes in: 0 and 1 float32, 2 float16, 3 bfloat16, 4 int8, for which it rounds activations in blocks.

    Returns
    -------
    list of str
        What there is to say.
    """
    insert, count = NodeInserter(model.graph), 0
    for node in list(model.graph):
        position = {"MatMul": 1, "Gemm": 1, "Gather": 0}.get(node.op_type) if node.domain == "" else None
        constant = None if position is None else node.inputs[position]
        dequantize = None if constant is None else constant.producer()
        if dequantize is None or not _in_blocks(dequantize):
            continue
        blocks = _PackedBlocks(dequantize)
        made = _look_up(insert, node, dequantize, blocks) if node.op_type == "Gather" else _product(insert, node, blocks, accuracy_level)
        if made is None:
            continue
        count += node.op_type != "Gather"
        result, stored = made
        if node.outputs[0].is_graph_output():
            result.name, node.outputs[0].name = node.outputs[0].name, insert.free(f"{node.outputs[0].name}_replaced")
        result.shape = node.outputs[0].shape
        node.outputs[0].replace_all_uses_with(result, replace_graph_outputs=True)
        model.graph.remove(node, safe=True)
        for key, name in names.items():
            names[key] = stored if name == blocks.name else name
        if not constant.uses():  # type: ignore[union-attr]
            model.graph.remove(dequantize, safe=True)
    if insert.used_domains:
        model.opset_imports[MICROSOFT] = 1
    if count == 0 or accuracy_level < 2:
        return []
    kinds = {2: "float16", 3: "bfloat16", 4: "int8, to which it rounds activations in blocks"}
    return [f"{count} products run as MatMulNBits with accuracy_level={accuracy_level}: in {kinds[accuracy_level]}, which is not simulated"]


def _tensor(value: ir.Value | None) -> Tensor:
    held = None if value is None else value.const_value
    assert held is not None
    numbers = held.numpy()
    return torch.from_numpy(numbers.astype("float32" if held.dtype is ir.DataType.FLOAT else "int32"))


def _in_blocks(dequantize: ir.Node) -> bool:
    if dequantize.op_type != "DequantizeLinear" or "block_size" not in dequantize.attributes or len(dequantize.inputs) != 3:
        return False
    held = [None if value is None else value.const_value for value in dequantize.inputs]
    size = dequantize.attributes["block_size"].as_int()
    return (
        all(tensor is not None for tensor in held)
        and held[0].dtype in (ir.DataType.INT4, ir.DataType.UINT4)  # type: ignore[union-attr]
        and held[1].dtype is ir.DataType.FLOAT  # type: ignore[union-attr]
        and size >= _SMALLEST_BLOCK
        and size & (size - 1) == 0
        and len(held[0].shape) == 2  # type: ignore[union-attr]
    )


def _product(insert: NodeInserter, node: ir.Node, blocks: _PackedBlocks, level: int) -> tuple[ir.Value, str] | None:
    """A MatMulNBits, with an Add behind it where a Gemm has a bias; None where the blocks do not lie along the sum."""
    attributes = node.attributes
    turned = node.op_type == "Gemm" and "transB" in attributes and attributes["transB"].as_int() == 1
    plain = all(attributes[name].as_float() == 1.0 for name in ("alpha", "beta") if name in attributes)
    if blocks.axis != (1 if turned else 0) or not plain or ("transA" in attributes and attributes["transA"].as_int() == 1):
        return None
    parts = [t if turned else t.T for t in (blocks.integers, blocks.scale, blocks.zero_point)]
    integers, scale, zero_point = parts[0] + _MIDDLE * blocks.signed, parts[1], parts[2] + _MIDDLE * blocks.signed
    rows, columns = integers.shape
    filled = torch.nn.functional.pad(integers, (0, -columns % blocks.size)).to(torch.uint8).contiguous()
    packed = ops.pack_int4(filled).reshape(rows, -1, blocks.size // 2)
    stored = insert.initializer(f"{blocks.name}_blocks", packed, "uint8")
    inputs: list[Any] = [node.inputs[0], stored, insert.initializer(f"{blocks.name}_scales", scale.contiguous(), "float32")]
    if bool((zero_point != _MIDDLE).any()):
        even = torch.nn.functional.pad(zero_point, (0, zero_point.shape[1] % 2)).to(torch.uint8).contiguous()
        inputs.append(insert.initializer(f"{blocks.name}_zero_points", ops.pack_int4(even).reshape(rows, -1), "uint8"))
    sizes = {"K": columns, "N": rows, "bits": 4, "block_size": blocks.size, "accuracy_level": level}
    result = insert.node(node, f"{MICROSOFT}.MatMulNBits", inputs, f"{blocks.name}_product", ir.DataType.FLOAT, None, **sizes)
    if node.op_type == "Gemm" and len(node.inputs) == 3 and node.inputs[2] is not None:
        result = insert.node(node, "Add", [result, node.inputs[2]], f"{blocks.name}_sum", ir.DataType.FLOAT, None)
    return result, str(stored.name)


def _look_up(insert: NodeInserter, node: ir.Node, dequantize: ir.Node, blocks: _PackedBlocks) -> tuple[ir.Value, str] | None:
    """A GatherBlockQuantized of the same constants; None where the blocks do not lie along the rows."""
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 0
    if blocks.axis != 1 or axis != 0 or blocks.integers.shape[1] % blocks.size:
        return None
    data, scale, zero_point = dequantize.inputs
    options = {"gather_axis": 0, "quantize_axis": 1, "block_size": blocks.size}
    inputs: list[Any] = [data, node.inputs[1], scale, zero_point]
    result = insert.node(node, f"{MICROSOFT}.GatherBlockQuantized", inputs, f"{blocks.name}_rows", ir.DataType.FLOAT, None, **options)
    return result, blocks.name
