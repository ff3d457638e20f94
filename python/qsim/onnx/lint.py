"""Lint: which operations of a Q/DQ model no integer kernel can compute, and why, by the rules that runtimes fuse by."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from qsim.operations.moves import MOVING_TYPES
from qsim.operations.onnxruntime import COPYING, FOLLOWING, INTEGER_KERNELS
from qsim.trace.runtimes import RUNTIMES

_Rules = Mapping[str, Sequence[int] | None]  # positions of the operands that have to be quantized; None: all
# Other compilers move quantizers over what only moves values, and take results as they are.
_OPERANDS = dict.fromkeys(("Conv", "ConvTranspose", "Gemm", "MatMul"), (0, 1))
_MOVING = MOVING_TYPES | {"Concat"}
_ABSORBED = ("Relu", "Clip")
_PASSED = {*MOVING_TYPES, *FOLLOWING, *_ABSORBED}
_READING = {*INTEGER_KERNELS, "QuantizeLinear"}


def lint(model: ir.Model, target: str) -> dict[str, str]:
    """The operations that will run in float though the runtime has an integer kernel for them, and why.

    Parameters
    ----------
    model : ir.Model
        Lowered, with its nodes named.
    target : str
        Name of a `qsim.trace.runtimes.Runtime` that reads ONNX.
    """
    local = RUNTIMES[target].marks_moves
    rules: _Rules = {type: kernel.operands for type, kernel in INTEGER_KERNELS.items()} if local else _OPERANDS
    found: dict[str, str] = {}
    if not any(node.op_type == "QuantizeLinear" for node in model.graph):
        return found  # weights alone, or float formats
    idle = _unread_by_kernels(model) | _fed_in_float(model) if local else set()
    for node in model.graph:
        if node.op_type not in rules or not _is_float(node.outputs[0]) or (node in idle and node.op_type in FOLLOWING):
            continue
        unquantized = list(_operands(node, rules[node.op_type], local))
        inside = len(unquantized) == len(_read(node, rules[node.op_type]))  # of a region that is left in float
        reasons = [*unquantized, *(_result(node) if local else ())]
        if reasons and not inside:
            found[str(node.name)] = ", and ".join(reasons)
    return found


def _unread_by_kernels(model: ir.Model) -> set[ir.Node]:
    """What moves numbers, or gains nothing by an integer kernel of its own, and is read by operations in float alone."""
    found: set[ir.Node] = set()
    for node in reversed(model.graph):
        if node.op_type in _PASSED:
            readers = [reader for output in node.outputs for reader in output.consumers()]
            exact = node.op_type in COPYING or any(x is not None and x.const_value is not None for x in node.inputs)
            returned = any(output.is_graph_output() for output in node.outputs)
            if (exact or not returned) and all(r in found or not (r.op_type in _PASSED or r.op_type in _READING) for r in readers):
                found.add(node)
    return found


def _fed_in_float(model: ir.Model) -> set[ir.Node]:
    """What takes element by element what operations that have no integer kernel made: a grid there would be one more rounding."""
    found: set[ir.Node] = set()
    for node in model.graph:
        if node.op_type in FOLLOWING and node.op_type not in COPYING:
            makers = [maker_of(value) for value in node.inputs if value is not None]
            in_float = [maker for maker in makers if maker is not None and maker.op_type != "DequantizeLinear"]
            if any(maker.op_type not in INTEGER_KERNELS or maker in found for maker in in_float):
                found.add(node)
    return found


def is_dequantized(value: ir.Value | None) -> bool:
    """Whether DequantizeLinear makes it."""
    maker = None if value is None else value.producer()
    return maker is not None and maker.op_type == "DequantizeLinear"


def maker_of(value: ir.Value, passed: Container[str] = MOVING_TYPES) -> ir.Node | None:
    """What computed a value, behind what only moves it."""
    node = value.producer()
    while node is not None and node.op_type in passed:
        node = None if node.inputs[0] is None else node.inputs[0].producer()
    return node


def is_surrounded(node: ir.Node) -> bool:
    """Whether all that an operation multiplies, adds, joins or averages is quantized, and its result is."""
    kernel = INTEGER_KERNELS.get(node.op_type)
    return not [*_operands(node, kernel.operands if kernel else (0, 1), True), *_result(node)]


def reads_quantized(node: ir.Node) -> bool:
    """Whether both operands of a product are quantized, also behind what only moves values."""
    return not list(_operands(node, (0, 1), False))


def narrow_softmaxes(model: ir.Model) -> list[str]:
    """Names of softmaxes whose grid ends so near to what equal entries would have that QLinearSoftmax before onnxruntime 1.32 leaves
    float32: it multiplies exponentials of up to ``float32's largest / (entries * e^5)`` by ``1 / scale``; Inf becomes the zero point."""
    found = []
    for node in model.graph:
        if node.op_type == "Softmax" and node.outputs[0].shape is not None:
            entries = node.outputs[0].shape[node.attributes.get_int("axis", -1)]
            after = [reader.outputs[0].consumers() for reader in node.outputs[0].consumers() if reader.op_type == "QuantizeLinear"]
            grids = [scales(reader.outputs[0]) for readers in after for reader in readers if reader.op_type == "DequantizeLinear"]
            if isinstance(entries, int) and any(bool((1 / scale > entries * math.exp(5)).any()) for scale in grids):
                found.append(str(node.name))
    return found


def scales(value: ir.Value | None) -> Any:
    """The scales of a tensor on an integer grid, as a float64 array; an empty one for others."""
    producer = None if value is None else value.producer()
    scale = producer.inputs[1] if producer is not None and producer.op_type == "DequantizeLinear" else None
    held = None if scale is None else scale.const_value
    return np.empty(0) if held is None else held.numpy().astype(np.float64)


def _is_float(value: ir.Value) -> bool:
    return value.dtype in (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def _read(node: ir.Node, positions: Sequence[int] | None) -> dict[int, ir.Value]:
    """What a kernel wants dequantized, by position."""
    return {i: value for i, value in enumerate(node.inputs) if value is not None and (positions is None or i in positions)}


def _operands(node: ir.Node, positions: Sequence[int] | None, local: bool) -> Iterator[str]:
    for index, value in _read(node, positions).items():
        if not _is_quantized(value, local):
            producer = value.producer()
            made = f"made by {producer.name}" if producer is not None else "a constant" if value.const_value is not None else "an input"
            yield f"operand {index} ({made}) is not quantized"


def _is_quantized(value: ir.Value, local: bool) -> bool:
    producer = value.producer()
    if producer is None or producer.op_type == "DequantizeLinear":
        return producer is not None
    moved = producer.inputs if producer.op_type == "Concat" else producer.inputs[:1]
    return not local and producer.op_type in _MOVING and all(x is not None and _is_quantized(x, local) for x in moved)


def _may_leave_float(node: ir.Node) -> bool:
    """Whether the kernel of a node has no need of a quantizer behind it: none reads its result, and no rectifier does."""
    kernel = INTEGER_KERNELS.get(node.op_type)
    if (
        kernel is None
        or not kernel.leaves_float
        or any(reader.op_type in ("QuantizeLinear", *_ABSORBED) for reader in node.outputs[0].consumers())
    ):
        return False
    bias = node.inputs[2] if len(node.inputs) == 3 else None
    return bias is None or _is_quantized(bias, True)


def _result(node: ir.Node) -> Iterator[str]:
    if _may_leave_float(node):
        return
    value = node.outputs[0]
    readers = value.consumers()
    if len(readers) == 1 and readers[0].op_type in _ABSORBED:
        value = readers[0].outputs[0]
        readers = value.consumers()
    others = [reader.name for reader in readers if reader.op_type != "QuantizeLinear"]
    if others or not readers:
        yield f"its result goes unquantized to {', '.join(map(str, others)) or 'an output of the model'}"
