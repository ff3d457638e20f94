"""Biases in float, which ONNX Runtime's optimiser makes int32 on the grid of the products (``WeightBiasQuantization``, onnxruntime 1.31).

With 16 bits that grid may be so fine that int32 ends below the bias, which saturates: outputs are off by as much as they are large.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch

from qsim.integer.kernels.products import Bias
from qsim.integer.runtime_weights import one_scale
from qsim.onnx.lint import scales
from qsim.onnx.tensors import stored

_WIDE = (ir.DataType.INT16, ir.DataType.UINT16)


def hold_biases(model: ir.Model) -> list[str]:
    """Write such biases as int32 on a grid of their own, which the optimiser leaves alone: no kernel reads 16 bits, so that it is
    dequantized. Returns the names of operations of 8 bits whose bias does not fit: their kernels know the grid of the products alone."""
    left = []
    for node in model.graph:
        if node.op_type in ("Conv", "ConvTranspose", "Gemm") and len(node.inputs) == 3 and not _fits(node):
            if any(_is_wide(value) for value in node.inputs[:2]):
                _put_on_own_grid(node, model)
            else:
                left.append(str(node.name))
    return left


def _fits(node: ir.Node) -> bool:
    """Whether int32 holds the bias of an operation, or there is none that the optimiser makes int32."""
    x, weight = scales(node.inputs[0]), _weight_scales(node.inputs[1])
    bias = None if node.inputs[2] is None else node.inputs[2].const_value
    if bias is None or x.size * weight.size == 0:
        return True
    steps = (x * weight).ravel()
    steps = steps if steps.size in (1, bias.size) else steps.min()  # in groups
    return Bias.fits(torch.from_numpy(bias.numpy()), torch.as_tensor(steps))


def _weight_scales(weight: ir.Value | None) -> Any:
    """The scales of a weight; of one in float that which the optimiser chooses."""
    held = None if weight is None else weight.const_value
    if held is None or held.dtype is not ir.DataType.FLOAT:
        return scales(weight)
    return one_scale(torch.from_numpy(held.numpy().copy())).scale.double().reshape(1).numpy()


def _is_wide(value: ir.Value | None) -> bool:
    """Whether a tensor is dequantized from 16 bits."""
    producer = None if value is None else value.producer()
    read = None if producer is None or producer.op_type != "DequantizeLinear" else producer.inputs[0]
    return read is not None and read.dtype in _WIDE


def _put_on_own_grid(node: ir.Node, model: ir.Model) -> None:
    bias = node.inputs[2]
    assert bias is not None
    assert bias.const_value is not None
    made = Bias.held(torch.from_numpy(bias.const_value.numpy()))
    tensors = [stored(f"{node.name}.bias_int32", made.integers, "int32"), stored(f"{node.name}.bias_scale", made.scale[0], "float32")]
    held = [ir.Value(name=t.name, type=ir.TensorType(t.dtype), shape=ir.Shape(t.shape.numpy()), const_value=t) for t in tensors]
    for value in held:
        model.graph.register_initializer(value)
    dequantized = ir.node("DequantizeLinear", held, name=f"{node.name}.bias.DequantizeLinear")
    read = dequantized.outputs[0]
    read.name, read.type, read.shape = f"{node.name}.bias", bias.type, bias.shape
    model.graph.insert_before(node, dequantized)
    node.replace_input_with(2, read)
    if not bias.uses() and not bias.is_graph_output():
        model.graph.initializers.pop(str(bias.name))
