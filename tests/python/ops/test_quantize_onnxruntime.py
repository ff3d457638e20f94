"""ONNX Runtime as the oracle of the integers themselves: QuantizeLinear and DequantizeLinear, one at a time, NaN included."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from test_fake_quantize_onnxruntime import GRANULARITIES, SCALES, TYPES, adversarial

import qsim

STORAGE = {"int8": np.int8, "uint8": np.uint8, "int16": np.int16, "uint16": np.uint16, "int4": np.int8, "uint4": np.uint8}


def run(nodes, constants, inputs, output_kind, shape):
    ends = [helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape) for name, x in inputs.items()]
    graph = helper.make_graph(nodes, "integers", ends, [helper.make_tensor_value_info("y", output_kind, shape)], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(model)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, inputs)[0]


def parameters(scale, zero_point, kind):
    return [
        helper.make_tensor("scale", TensorProto.FLOAT, scale.shape, scale.ravel()),
        helper.make_tensor("zero_point", kind, zero_point.shape, zero_point.ravel()),
    ]


def quantize_linear(x, scale, zero_point, name, attributes):
    kind, storage = TYPES[name][0], STORAGE[name]
    stored = helper.np_dtype_to_tensor_dtype(np.dtype(storage))
    nodes = [helper.make_node("QuantizeLinear", ["x", "scale", "zero_point"], ["q"], **attributes)]
    nodes.append(helper.make_node("Cast", ["q"], ["y"], to=stored))  # numpy has no 4-bit integers
    return run(nodes, parameters(scale, zero_point, kind), {"x": x}, stored, x.shape)


def dequantize_linear(q, scale, zero_point, name, attributes):
    """q is an initializer: 4-bit integers as the bytes of pack_int4."""
    kind = TYPES[name][0]
    raw = qsim.ops.pack_int4(torch.from_numpy(q)).numpy() if kind in (TensorProto.INT4, TensorProto.UINT4) else q
    constants = [*parameters(scale, zero_point, kind), helper.make_tensor("q", kind, q.shape, raw.tobytes(), raw=True)]
    node = helper.make_node("DequantizeLinear", ["q", "scale", "zero_point"], ["y"], **attributes)
    return run([node], constants, {}, TensorProto.FLOAT, q.shape)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("name", TYPES)
def test_both_equal_onnxruntime(name, granularity):
    rng = np.random.default_rng(5)
    shape, axis, block_size = GRANULARITIES[granularity]
    _, low, high = TYPES[name]
    where = {"axis": axis, "block_size": block_size}
    attributes = {option: value for option, value in where.items() if value is not None}
    sizes = [] if axis is None else [shape[axis]] if block_size is None else list(shape)
    if block_size is not None:
        sizes[axis] //= block_size
    scale = rng.choice(np.array(SCALES, np.float32), sizes)
    wide = (
        scale
        if axis is None
        else np.repeat(scale, block_size, axis)
        if block_size
        else scale.reshape([-1 if i == axis else 1 for i in range(len(shape))])
    )
    zero_point = rng.integers(low, high + 1, sizes, dtype=np.int32)
    x = adversarial(int(np.prod(shape)), np.broadcast_to(wide, shape).ravel(), 3).reshape(shape)
    x[rng.random(shape) < 0.05] = np.nan

    tensors = [torch.from_numpy(np.asarray(t)) for t in (scale, zero_point)]
    q = qsim.ops.quantize(torch.from_numpy(x), *tensors, low, high, **where, dtype=getattr(torch, STORAGE[name].__name__)).numpy()
    expected = quantize_linear(x, scale, zero_point, name, attributes)
    assert q.dtype == expected.dtype
    # The kernels that ONNX Runtime has not vectorised convert to int32 before they clamp, which wraps around: NaN as well.
    with np.errstate(over="ignore", invalid="ignore"):
        wrapped = ~(np.abs(x / wide) < 2**31) & (name in ("int4", "uint4") or block_size is not None)
    different = (q != expected) & ~wrapped
    assert not different.any(), (x[different][:5], q[different][:5], expected[different][:5])
    assert (q[np.isnan(x)] == low).all()

    y = qsim.ops.dequantize(torch.from_numpy(q), *tensors, **where).numpy()
    assert y.tobytes() == dequantize_linear(q, scale, zero_point, name, attributes).tobytes()
