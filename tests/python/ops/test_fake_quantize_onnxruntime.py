"""ONNX Runtime as the oracle: QuantizeLinear -> DequantizeLinear, unfused, on a million adversarial elements.

ONNX Runtime turns NaN into the smallest integer, so NaN is checked on its own; it gives +0.0 for zero as an integer does.
"""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from levels import LEVELS, output_at
from onnx import TensorProto, helper

import qsim

TYPES = {
    "int8": (TensorProto.INT8, -128, 127),
    "uint8": (TensorProto.UINT8, 0, 255),
    "int16": (TensorProto.INT16, -32768, 32767),
    "uint16": (TensorProto.UINT16, 0, 65535),
    "int4": (TensorProto.INT4, -8, 7),
    "uint4": (TensorProto.UINT4, 0, 15),
}
SCALES = [1.0, 0.1, 0.0078125, 3.1415927, 1e-3, 1e30, 2e-38, 123.456, 1.1754944e-38, 0.33333334]


def adversarial(count: int, scale: np.ndarray, seed: int) -> np.ndarray:
    """Ties, their neighbours, integers times the scale, random bit patterns, subnormals, zeros, huge values and infinities."""
    rng = np.random.default_rng(seed)
    steps = rng.integers(-70000, 70000, count) / rng.choice([1, 2, 8, 64, 500, 5000], count).round()
    with np.errstate(over="ignore", invalid="ignore"):
        x = ((np.round(steps * 2) / 2).astype(np.float32) * scale).astype(np.float32)
    kind = rng.integers(0, 8, count)
    x = np.where(kind == 1, np.nextafter(x, np.float32(np.inf)), x)
    x = np.where(kind == 2, np.nextafter(x, np.float32(-np.inf)), x)
    x = np.where(kind == 3, rng.integers(0, 2**32, count, dtype=np.uint32).view(np.float32), x)
    specials = np.array([0.0, -0.0, 1e-45, -1e-45, 1e-40, 3e38, -3e38, np.inf, -np.inf, 3.4028235e38, 1.1754944e-38], np.float32)
    x = np.where(kind == 4, rng.choice(specials, count), x)
    return np.where(np.isnan(x), np.float32(0.5), x).astype(np.float32)


def oracle(x, scale, zero_point, name, axis=None, block_size=None):
    """x, quantized and dequantized by ONNX Runtime."""
    kind = TYPES[name][0]
    attributes = {} if axis is None else {"axis": axis} if block_size is None else {"axis": axis, "block_size": block_size}
    constants = [
        helper.make_tensor("scale", TensorProto.FLOAT, scale.shape, scale.ravel()),
        helper.make_tensor("zero_point", kind, zero_point.shape, zero_point.ravel()),
    ]
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero_point"], ["q"], **attributes),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero_point"], ["y"], **attributes),
    ]
    ends = [helper.make_tensor_value_info(end, TensorProto.FLOAT, x.shape) for end in ("x", "y")]
    graph = helper.make_graph(nodes, "qdq", ends[:1], ends[1:], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(model)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


GRANULARITIES = {  # shape, axis, block_size
    "tensor": ((1000, 70), None, None),
    "channel": ((25, 40, 70), 1, None),
    "last channel": ((250, 4, 70), 2, None),
    "block": ((40, 175, 10), 1, 25),
    "last block": ((100, 704), 1, 32),
}


def check_against_onnxruntime(name, granularity, seed=0):
    rng = np.random.default_rng(seed)
    shape, axis, block_size = GRANULARITIES[granularity]
    _, low, high = TYPES[name]
    options = {"axis": axis, "block_size": block_size}
    for repeat, one_scale in enumerate(SCALES if axis is None else SCALES[:1]):
        if axis is None:
            scale = wide = np.float32(one_scale).reshape(())
        elif block_size is None:
            scale = rng.choice(np.array(SCALES, np.float32), shape[axis])
            wide = scale.reshape([-1 if i == axis else 1 for i in range(len(shape))])
        else:
            scale = rng.choice(np.array(SCALES, np.float32), [n // block_size if i == axis else n for i, n in enumerate(shape)])
            wide = np.repeat(scale, block_size, axis)
        zero_point = rng.integers(low, high + 1, scale.shape, dtype=np.int32)
        x = adversarial(int(np.prod(shape)), np.broadcast_to(wide, shape).ravel(), seed + repeat).reshape(shape)
        compare(x, wide, scale, zero_point, name, options)
        if name == "int16" and granularity == "last channel":
            check_fewer_bits(x, wide, scale, options)


def compare(x, wide, scale, zero_point, name, options):
    _, low, high = TYPES[name]
    expected = oracle(x, scale, zero_point, name, **options)
    tensors = [torch.from_numpy(np.asarray(t)) for t in (x, scale, zero_point)]
    y = qsim.ops.fake_quantize(*tensors, low, high, **options).numpy()
    assert np.array_equal(y, qsim.reference.fake_quantize(*tensors, low, high, **options).numpy())
    # The kernels that ONNX Runtime has not vectorised convert to int32 before they clamp, which wraps around.
    with np.errstate(over="ignore", invalid="ignore"):
        wrapped = (np.abs(x / wide) >= 2**31) & (name in ("int4", "uint4") or options["block_size"] is not None)
    different = (y != expected) & ~wrapped
    assert not different.any(), (name, options, x[different][:5], y[different][:5], expected[different][:5])
    assert not np.signbit(y[y == 0]).any()
    nan = tensors[0].masked_fill(torch.rand(x.shape) < 0.1, torch.nan)
    assert torch.equal(qsim.ops.fake_quantize(nan, *tensors[1:], low, high, **options).isnan(), nan.isnan())
    return expected


def check_fewer_bits(x, wide, scale, options):
    """2 to 15 bits: what the oracle's 16 bits give, clipped to the ends of the smaller grid."""
    zero_point = np.zeros(scale.shape, np.int32)
    y = torch.from_numpy(compare(x, wide, scale, zero_point, "int16", options))
    tensors = [torch.from_numpy(t) for t in (x, scale, zero_point)]
    for bits in range(2, 16):
        grid = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        ends = [qsim.reference.fake_quantize(torch.full_like(tensors[0], end), *tensors[1:], *grid, **options) for end in (-np.inf, np.inf)]
        assert torch.equal(qsim.ops.fake_quantize(*tensors, *grid, **options), y.clamp(*ends))


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("name", TYPES)
def test_equals_onnxruntime(name, granularity):
    check_against_onnxruntime(name, granularity)


AT_EACH_LEVEL = """
from test_fake_quantize_onnxruntime import GRANULARITIES, check_against_onnxruntime
for name in ("int8", "uint16", "int4"):
    for granularity in GRANULARITIES:
        check_against_onnxruntime(name, granularity, seed=1)
"""


@pytest.mark.parametrize("level", LEVELS)
def test_equals_onnxruntime_at_each_level(level):
    output_at(level, AT_EACH_LEVEL)
