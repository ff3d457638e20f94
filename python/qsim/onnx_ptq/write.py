"""Puts QuantizeLinear and DequantizeLinear, and integers, into a float ONNX model."""

from __future__ import annotations

import onnx_ir as ir
import torch
from torch import Tensor

from qsim import ops
from qsim.numbers.encoding import Encoding
from qsim.onnx.insert import NodeInserter
from qsim.onnx.tensors import ONNX_TYPES
from qsim.onnx_ptq.quantized_values import Operand

_INT32 = 2.0**31 - 1


class Writer:
    """Changes a graph. `biases` of it are int32; `unheld` are those that int32 does not hold, which stay in float."""

    def __init__(self, graph: ir.Graph) -> None:
        self.graph, self.unheld, self.biases = graph, list[str](), 0
        self._insert = NodeInserter(graph)
        self._scales: dict[ir.Value, Tensor] = {}

    def activation(self, x: ir.Value, encoding: Encoding) -> None:
        """All that reads `x`, the caller of the model too, reads it behind a quantizer from now on."""
        uses = [(node, index) for node, index in x.uses() if node.graph is self.graph]
        before = min((node for node, _ in uses), key=list(self.graph).index, default=None)
        name, given = str(x.name), x.is_graph_output()
        if given:
            x.name = self._insert.free(f"{name}_float")
        grid = self._grid(name, encoding)
        q = self._insert.node(before, "QuantizeLinear", [x, *grid], f"{name}_quantized", ONNX_TYPES[encoding.dtype].type, x.shape)
        y = self._insert.node(before, "DequantizeLinear", [q, *grid], f"{name}_dequantized", ir.DataType.FLOAT, x.shape)
        for node, index in uses:
            node.replace_input_with(index, y)
        if given:
            y.name = name
            for i, output in enumerate(self.graph.outputs):
                if output is x:
                    self.graph.outputs[i] = y
        self._scales[y] = encoding.scale

    def constant(self, operand: Operand, values: Tensor, encoding: Encoding) -> None:
        """A constant operand as integers."""
        low, high = encoding.quant_min, encoding.quant_max
        self._replace(operand, ops.quantize(values, encoding.scale, encoding.zero_point, low, high, axis=operand.axis), encoding)

    def bias(self, operand: Operand, values: Tensor) -> None:
        """A bias as int32, with the product of the scales of what is multiplied, as integer kernels add it."""
        x, weight = (self._scales.get(value) for value in operand.node.inputs[:2] if value is not None)
        if x is None or weight is None:
            return
        scale = (x.double() * weight.double()).expand(values.shape)
        integers = (values.double() / scale).round()
        if bool((integers.abs() >= _INT32).any()):
            self.unheld.append(str(operand.value.name))
            return
        self.biases += 1
        zero = torch.zeros(scale.shape, dtype=torch.int32)
        self._replace(operand, integers.to(torch.int32), Encoding(scale.float(), zero, -(2**31), 2**31 - 1, 0, None, "int32"))

    def _replace(self, operand: Operand, integers: Tensor, encoding: Encoding) -> None:
        old, name = operand.value, str(operand.value.name)
        q = self._insert.initializer(f"{name}_quantized", integers, encoding.dtype)
        axes = {} if operand.axis is None else {"axis": operand.axis}
        inputs = [q, *self._grid(name, encoding)]
        y = self._insert.node(
            operand.node, "DequantizeLinear", inputs, f"{name}_dequantized", ir.DataType.FLOAT, ir.Shape(integers.shape), **axes
        )
        operand.node.replace_input_with(operand.index, y)
        self._scales[y] = encoding.scale
        if not old.uses() and not old.is_graph_output():
            self.graph.initializers.pop(name, None)

    def _grid(self, name: str, encoding: Encoding) -> list[ir.Value]:
        scale = self._insert.initializer(f"{name}_scale", encoding.scale.float(), "float32")
        return [scale, self._insert.initializer(f"{name}_zero_point", encoding.zero_point, encoding.dtype)]
