"""Which tensors of a float ONNX model get quantizers, so that ONNX Runtime's integer kernels take its operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import onnx_ir as ir

from qsim.operations.moves import MOVING_TYPES
from qsim.operations.onnxruntime import INTEGER_KERNELS

_PRODUCTS = ("Conv", "Gemm", "MatMul")
_BIASED = ("Conv", "Gemm")
_FUSED = {"Conv": ("Relu", "Clip"), "Gemm": ("Relu", "Clip"), "MatMul": ("Relu", "Clip"), "Add": ("Relu", "Clip")}


@dataclass(frozen=True)
class Operand:
    """A constant operand, and the axis of its output channels; None where it has one scale."""

    node: ir.Node
    index: int
    axis: int | None = None

    @property
    def value(self) -> ir.Value:
        held = self.node.inputs[self.index]
        assert held is not None
        return held


@dataclass
class QuantizedValues:
    """What is quantized.

    Attributes
    ----------
    observed : dict of Value to str
        Activations, in order, with the type of the operation that makes each ("" for an input of the model).
    moved : dict of Value to Value
        Those that hold what another one holds, in other places: they have its scale.
    weights, constants, biases : list of Operand
        Of products; of other operations; of products with an activation and a weight that are quantized.
    """

    observed: dict[ir.Value, str] = field(default_factory=dict)
    moved: dict[ir.Value, ir.Value] = field(default_factory=dict)
    weights: list[Operand] = field(default_factory=list)
    constants: list[Operand] = field(default_factory=list)
    biases: list[Operand] = field(default_factory=list)


def place(graph: ir.Graph, is_wanted: Callable[[str, str], bool] = lambda name, op: True) -> QuantizedValues:
    """Quantizers before and behind every operation that has an integer kernel, at the end of what is fused with it.

    ``is_wanted(name, op_type)`` says of each node whether it may run in integers.
    """
    found = QuantizedValues()
    for node in graph:
        kernel = INTEGER_KERNELS.get(node.op_type)
        if kernel is None or node.domain not in ("", "ai.onnx") or not _is_float(node.outputs[0]):
            continue
        positions = range(len(node.inputs)) if kernel.operands is None else kernel.operands
        if not is_wanted(str(node.name), node.op_type) or _is_inside(node):
            continue
        operands = [(i, node.inputs[i]) for i in positions if i < len(node.inputs)]
        if any(value is None or not _is_float(value) for _, value in operands):
            continue
        if node.op_type in _PRODUCTS and is_constant(node.inputs[0]):
            continue
        for index, value in operands:
            assert value is not None
            if not is_constant(value):
                _want(found, value)
            elif node.op_type in _PRODUCTS and index == 1:
                found.weights.append(Operand(node, index, _channels(node)))
            else:
                found.constants.append(Operand(node, index))
        if node.op_type in _BIASED and len(node.inputs) > 2 and is_constant(node.inputs[1]) and is_constant(node.inputs[2]):
            found.biases.append(Operand(node, 2, 0))
        _want(found, _end(node))
    return found


def _want(found: QuantizedValues, value: ir.Value) -> None:
    if value in found.observed or value in found.moved:
        return
    producer = value.producer()
    source = None if producer is None else producer.inputs[0] if producer.op_type in MOVING_TYPES and producer.inputs else None
    if source is not None and producer is not None and value is producer.outputs[0] and not is_constant(source) and _is_float(source):
        _want(found, source)
        found.moved[value] = source
    else:
        found.observed[value] = "" if producer is None else producer.op_type


def _end(node: ir.Node) -> ir.Value:
    """The result of an operation, behind the rectifier that is computed with it."""
    result, readers = node.outputs[0], node.outputs[0].consumers()
    if len(readers) == 1 and not result.is_graph_output() and readers[0].op_type in _FUSED.get(node.op_type, ()):
        return readers[0].outputs[0]
    return result


def _is_inside(node: ir.Node) -> bool:
    """Whether an addition or product scales and shifts by one number, or is the last product of a written-out GELU: runtimes fuse those."""
    if node.op_type not in ("Add", "Mul"):
        return False
    numbers = [value for value in node.inputs if value is not None and value.const_value is not None and value.const_value.size == 1]
    shifted = [maker for value in node.inputs if value is not None and (maker := value.producer()) is not None and maker.op_type == "Add"]
    erfs = [value.producer() for maker in shifted for value in maker.inputs if value is not None]
    return bool(numbers) or any(maker is not None and maker.op_type == "Erf" for maker in erfs)


def is_constant(value: ir.Value | None) -> bool:
    """Whether a value is the same in every run."""
    return value is not None and value.const_value is not None


def _is_float(value: ir.Value) -> bool:
    return value.dtype is ir.DataType.FLOAT


def _channels(node: ir.Node) -> int | None:
    """The axis of a weight that its output channels lie along."""
    weight = node.inputs[1]
    dims = 0 if weight is None or weight.const_value is None else len(weight.const_value.shape)
    if node.op_type == "MatMul":
        return 1 if dims == 2 else None
    if node.op_type == "Gemm":
        turned = node.attributes.get("transB")
        return 0 if turned is not None and turned.as_int() else 1
    return 0
