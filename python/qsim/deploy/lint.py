"""Lint: which operations of a Q/DQ model no integer kernel can compute, and why, by the rules that runtimes fuse by."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

# What ONNX Runtime and OpenVINO compute on integers where quantizers stand on both sides, and which of its operands must be quantized.
_BOTH_SIDES = {
    "Conv": 2,
    "Gemm": 2,
    "MatMul": 2,
    "Add": 2,
    "Mul": 2,
    "Concat": None,
    "AveragePool": 1,
    "GlobalAveragePool": 1,
}
_OPERANDS = {"Conv": 2, "ConvTranspose": 2, "Gemm": 2, "MatMul": 2}  # TensorRT: the operands decide
_ABSORBED = ("Relu", "Clip")


def lint(model: ir.Model, target: str) -> dict[str, str]:
    """The operations that will run in float though the runtime has an integer kernel for them, and why.

    Parameters
    ----------
    model : ir.Model
        Lowered, with its nodes named.
    target : str
        Name of a `Target`.
    """
    rules, both = (_OPERANDS, False) if target == "tensorrt" else (_BOTH_SIDES, True)
    found: dict[str, str] = {}
    if not any(node.op_type == "QuantizeLinear" for node in model.graph):
        return found  # weights alone, or float formats
    for node in model.graph:
        if node.op_type not in rules or not _is_float(node.outputs[0]):
            continue
        unquantized = list(_operands(node, rules[node.op_type]))
        read = node.inputs[: rules[node.op_type]]
        inside = len(unquantized) == len(read)  # of a region that is left in float
        reasons = [*unquantized, *(_result(node) if both else ())]
        if reasons and not inside:
            found[str(node.name)] = ", and ".join(reasons)
    return found


def is_surrounded(node: ir.Node) -> bool:
    """Whether all that an operation multiplies, adds, joins or averages is quantized, and its result is."""
    return not [*_operands(node, _BOTH_SIDES.get(node.op_type, 2)), *_result(node)]


def _is_float(value: ir.Value) -> bool:
    return value.dtype in (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def _operands(node: ir.Node, count: int | None) -> Iterator[str]:
    for index, value in enumerate(node.inputs[:count]):
        producer = None if value is None else value.producer()
        if value is not None and (producer is None or producer.op_type != "DequantizeLinear"):
            made = f"made by {producer.name}" if producer is not None else "a constant" if value.const_value is not None else "an input"
            yield f"operand {index} ({made}) is not quantized"


def _result(node: ir.Node) -> Iterator[str]:
    value = node.outputs[0]
    readers = value.consumers()
    if len(readers) == 1 and readers[0].op_type in _ABSORBED:
        value = readers[0].outputs[0]
        readers = value.consumers()
    others = [reader.name for reader in readers if reader.op_type != "QuantizeLinear"]
    if others or not readers:
        yield f"its result goes unquantized to {', '.join(map(str, others)) or 'an output of the model'}"
