"""Sessions of ONNX Runtime on the CPU, with the options by which it computes the integers of the file."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx import TensorProto, helper
from torch import Tensor

from qsim import ops
from qsim.integer.kernels.pairs import INT16_MAX, largest_pair
from qsim.integer.runtime_weights import one_scale
from qsim.onnx.lint import is_dequantized
from qsim.onnx.look_ups import reads_integers

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

KEEP_INT8 = "session.qdqisint8allowed"  # int8 activations become uint8 without it, rounded anew
FLOAT_PRODUCTS = "session.qdq_matmulnbits_accuracy_level"  # MatMul of float with a weight of integers rounds to int8 without it
EXACT_SUMS = "session.x64quantprecision"  # sums of two products of uint8 and int8 saturate at 16 bits on x86 without VNNI without it
_MADE_INTEGERS = ("Conv", "ConvTranspose", "Gemm")  # of these ONNX Runtime makes integers of weights in float beside integers


def entries(model: ir.Model) -> tuple[dict[str, str], list[str]]:
    """What a session on this CPU is opened with for a Q/DQ model, as config entries; and what to know of other CPUs, as sentences."""
    of_integers, notes = _of_integers(model)
    return {**({FLOAT_PRODUCTS: "1"} if _has_float_products(model) else {}), **of_integers}, notes


def _has_float_products(model: ir.Model) -> bool:
    """Whether a product of float with a constant of integers is there: ONNX Runtime makes MatMulNBits of MatMul and, for two axes, Gemm."""
    dequantized = {node.outputs[0] for node in model.graph if node.op_type == "DequantizeLinear"}
    constants = {value for value in dequantized if _is_constant(value)}
    products = [node for node in model.graph if node.op_type in ("MatMul", "Gemm") and node.inputs[1] in constants]
    return any(node.inputs[0] not in dequantized for node in products)


def _is_constant(dequantized: ir.Value) -> bool:
    node = dequantized.producer()
    held = None if node is None else node.inputs[0]
    return held is not None and held.const_value is not None


def _of_integers(model: ir.Model) -> tuple[dict[str, str], list[str]]:
    if ir.DataType.INT8 in _activations(model):
        return {KEEP_INT8: "1"}, []
    if not could_saturate(model):
        return {}, []
    if _has_shared_weight(model):  # ONNX Runtime 1.32 replaces such a weight twice, and does not load
        return {}, [
            "on x86 CPUs without VNNI sums of products saturate, and no session option helps, because a weight has several readers: use "
            "weights of 7 bits there, Config.override(weight={'bits': 7})"
        ]
    if find_spec("onnxruntime") is not None and saturates():
        return {EXACT_SUMS: "1"}, []
    return {}, [
        f'on x86 CPUs without VNNI, open sessions with options.add_session_config_entry("{EXACT_SUMS}", "1") too, or use weights of '
        "7 bits: sums of products saturate there otherwise"
    ]


def _has_shared_weight(model: ir.Model) -> bool:
    """Whether several operations read one weight of 8 bits."""
    read = [(node.inputs[0], node.outputs[0]) for node in model.graph if node.op_type == "DequantizeLinear"]
    weights = [(w, made) for w, made in read if w is not None and w.const_value is not None and w.dtype is ir.DataType.INT8]
    return any(len(weight.uses()) > 1 or len(made.uses()) > 1 for weight, made in weights)


def _activations(model: ir.Model) -> set[ir.DataType | None]:
    """The types of integers that are no constants."""
    dequantized = [node.inputs[0] for node in model.graph if node.op_type == "DequantizeLinear"]
    return {value.dtype for value in dequantized if value is not None and value.const_value is None and not reads_integers(value)}


def could_saturate(model: ir.Model) -> bool:
    """Whether activations are uint8, and two products of any weight that is int8 in the runtime with them could leave 16 bits."""
    if ir.DataType.UINT8 not in _activations(model):
        return False
    return any(largest_pair(weight, axis) > INT16_MAX for weight, axis in _weights_of_8_bits(model))


def _weights_of_8_bits(model: ir.Model) -> Iterator[tuple[Tensor, int | None]]:
    """Integers of weights, with the axis of their scales: of the file, and those that ONNX Runtime makes of floats beside integers."""
    for node in model.graph:
        held = node.inputs[0].const_value if node.op_type == "DequantizeLinear" and node.inputs[0] is not None else None
        if held is not None and held.dtype is ir.DataType.INT8:
            weight, axis = torch.from_numpy(held.numpy().copy()), node.attributes.get("axis")
            per_channel = axis is not None and weight.dim() > 1 and "block_size" not in node.attributes
            yield weight, axis.as_int() if per_channel and axis is not None else None
        elif node.op_type in _MADE_INTEGERS and is_dequantized(node.inputs[0]) and node.inputs[1] is not None:
            floats = node.inputs[1].const_value
            if floats is not None and floats.dtype is ir.DataType.FLOAT:
                weight = torch.from_numpy(floats.numpy().copy())
                grid = one_scale(weight)
                yield ops.quantize(weight, grid.scale, grid.zero_point, grid.quant_min, grid.quant_max), None


@functools.cache
def saturates() -> bool:
    """Whether ONNX Runtime saturates sums of two products of uint8 and int8 on this CPU, as it does on x86 without VNNI: it is tried."""
    import onnxruntime

    depth = 64
    ends = [
        helper.make_tensor_value_info(name, kind, [1, n])
        for name, kind, n in (("x", TensorProto.UINT8, depth), ("y", TensorProto.INT32, 16))
    ]
    weight = onnx.numpy_helper.from_array(np.full((depth, 16), 127, np.int8), "w")
    graph = helper.make_graph([helper.make_node("MatMulInteger", ["x", "w"], ["y"])], "products", ends[:1], ends[1:], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    products = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (y,) = products.run(None, {"x": np.full((1, depth), 255, np.uint8)})
    return bool((y != 255 * 127 * depth).any())


def session(
    path: Path, *, optimised: bool = True, save: Path | None = None, model: ir.Model | None = None, profile: Path | None = None
) -> InferenceSession:
    """A session on the CPU that computes the integers of the file.

    Parameters
    ----------
    path : Path
    optimised : bool
        All of ONNX Runtime's graph optimisations, or none.
    save : Path, optional
        Write the optimised graph there.
    model : ir.Model, optional
        The file's, where it was parsed.
    profile : Path, optional
        Where the profile of its runs is written: what the file's name begins with.
    """
    import onnxruntime

    options, level = onnxruntime.SessionOptions(), onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimised else level.ORT_DISABLE_ALL
    for entry in entries(ir.load(path) if model is None else model)[0].items():
        options.add_session_config_entry(*entry)
    options.log_severity_level = 3
    if save is not None:
        options.optimized_model_filepath = str(save)
    if profile is not None:
        options.enable_profiling, options.profile_file_prefix = True, str(profile)
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
