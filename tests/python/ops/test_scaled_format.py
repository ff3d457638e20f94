"""round_to_format with a scale: x / scale rounded, times scale."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from levels import LEVELS, assert_same_output
from test_round_to_format import adversarial, same_bits

from qsim import reference
from qsim.numbers.float_format import FLOAT_FORMATS
from qsim.numbers.spec import range_shape
from qsim.ops import count_format_, round_to_format, round_to_format_, round_to_format_counted

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
FLOAT8 = ["float8_e4m3fn", "float8_e5m2"]


def scales_for(x, axis, block_size, seed=0):
    """Positive scales over five orders of magnitude, of the dtype that x wants."""
    exponents = torch.rand(range_shape(x.shape, axis, block_size), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (10 ** (5 * exponents - 4)).to(torch.float64 if x.dtype is torch.float64 else torch.float32)


@st.composite
def cases(draw):
    """Any size, strides and granularity; ordinary, small, large and broken values."""
    sizes = st.tuples(st.integers(0, 3000)) | st.tuples(*[st.integers(0, 70)] * 2) | st.tuples(*[st.integers(0, 17)] * 3)
    shape, dtype = draw(sizes), draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    x = torch.randn(shape, generator=generator).flatten()
    for factor in draw(st.lists(st.sampled_from([0.0, -1e-9, 1e5, 1e39, math.nan]), max_size=3)):
        x[draw(st.integers(0, 99)) :: draw(st.integers(1, 99))] *= factor
    x = x.to(dtype).reshape(shape)
    x = draw(st.sampled_from([x, x.transpose(0, -1), x[:, ::2] if x.dim() > 1 else x[::2]]))
    axis = draw(st.none() | st.integers(-x.dim(), x.dim() - 1))
    tile = (tuple(range(x.dim())), (7,) * x.dim())
    axis, block_size = draw(st.sampled_from([(axis, None), tile] if axis is None else [(axis, None), (axis, 32), (axis, 5), tile]))
    return x, {"scale": scales_for(x, axis, block_size, draw(st.integers(0, 99))), "axis": axis, "block_size": block_size}


@given(cases(), st.sampled_from(list(FLOAT_FORMATS)), st.sampled_from([None, False, True]))
def test_equals_the_reference(case, name, saturate):
    x, options = case
    options["saturate"] = saturate
    states = [[torch.zeros(6, dtype=torch.int64), torch.zeros(2, dtype=torch.float64)] for _ in range(3)]
    expected = reference.round_to_format(x, name, **options)
    reference.count_format_(x, name, *states[0], **options)
    count_format_(x, name, *states[2], **options)
    same_bits(round_to_format(x, name, **options), expected)
    same_bits(round_to_format_counted(x, name, *states[1], **options), expected)
    same_bits(round_to_format(x, name, **options, out=torch.empty_like(x)), expected)
    same_bits(round_to_format_(x.clone(), name, **options), expected)
    assert states[0][0].tolist() == states[1][0].tolist() == states[2][0].tolist()
    assert torch.equal(states[1][1], states[2][1])
    torch.testing.assert_close(states[1][1], states[0][1], rtol=1e-6, atol=0)
    leaf = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(round_to_format(leaf, name, **options), leaf, torch.ones_like(x))
    del options["saturate"]
    assert torch.equal(grad, reference.round_to_format_backward(torch.ones_like(x), x, name, **options))


@pytest.mark.parametrize("name", FLOAT8)
@pytest.mark.parametrize("axis", [None, 0, 1])
def test_equals_quantize_linear_of_onnx_runtime(name, axis):
    onnx, onnxruntime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    helper, proto = onnx.helper, onnx.TensorProto
    x = adversarial(name, torch.float32)
    x = torch.cat([x, torch.randn(24_000 - len(x) % 12, generator=torch.Generator().manual_seed(0))]).reshape(12, -1)
    shape = range_shape(x.shape, axis, None)
    scale = torch.logspace(-6, 2, math.prod(shape)).reshape(shape) if shape else torch.tensor(0.0371)
    kind = getattr(proto, name.replace("float8_", "FLOAT8").upper())
    zeros = helper.make_tensor("zero", kind, list(shape), bytes(math.prod(shape)), raw=True)
    along = {} if axis is None else {"axis": axis}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"], saturate=1, **along),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["y"], **along),
    ]
    ends = [helper.make_tensor_value_info(end, proto.FLOAT, list(x.shape)) for end in "xy"]
    constants = [onnx.numpy_helper.from_array(scale.numpy(), "scale"), zeros]
    graph = helper.make_graph(nodes, "scaled", ends[:1], ends[1:], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {"x": x.numpy()})
    same_bits(round_to_format(x, name, scale=scale, axis=axis), torch.from_numpy(np.asarray(expected)))


@pytest.mark.parametrize("name", FLOAT8)
def test_a_scale_of_one_and_powers_of_two_change_nothing(name):
    x = adversarial(name, torch.float32)
    x = x[(x.abs() > 1e-30) | (x == 0)]
    expected = round_to_format(x, name)
    for power in (1.0, 2.0**-20, 2.0**20):
        same_bits(round_to_format(x * power, name, scale=torch.tensor(power)), expected * power)


def test_extreme_values_and_scales():
    x = torch.tensor([3e38, -3e38, math.inf, math.nan, -0.0, 1e-38, 1e-45])
    counts = torch.zeros(6, dtype=torch.int64)
    y = round_to_format_counted(x, "float8_e4m3fn", counts, scale=torch.tensor(1e-3))  # the quotient of the first is Inf
    torch.testing.assert_close(y[:3], torch.tensor([0.448, -0.448, 0.448]))
    assert y[3].isnan()
    assert y[4:].tolist() == [0, 0, 0]
    assert y.signbit().tolist()[4:] == [True, False, False]
    assert counts.tolist() == [7, 1, 1, 2, 2, 0]  # a finite element overflows, whatever its quotient
    smallest = torch.tensor(torch.finfo(torch.float32).tiny)
    assert round_to_format(smallest * 448, "float8_e4m3fn", scale=smallest) == smallest * 448
    largest = torch.tensor(3.4028235e38)
    assert round_to_format(largest, "float8_e4m3fn", scale=largest / 448) == largest / 448 * 448
    wide = torch.tensor([1e300, 448e297], dtype=torch.float64)
    assert round_to_format(wide, "float8_e4m3fn", scale=wide[1] / 448)[1] == wide[1] / 448 * 448


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0.0, math.nan])
def test_a_scale_that_divides_to_no_number_counts_each_element_once(scale, dtype):
    """Rows of every length, so that some end within a vector register, whose rest is no element."""
    for length in range(1, 40):
        x = torch.randn(3, length).to(dtype)
        x[:, ::3] = 0
        options = {"scale": torch.tensor([1.0, scale, 2.0], dtype=torch.float64 if dtype is torch.float64 else torch.float32), "axis": 0}
        found, expected = torch.zeros(6, dtype=torch.int64), torch.zeros(6, dtype=torch.int64)
        count_format_(x, "float8_e4m3fn", found, **options)
        reference.count_format_(x, "float8_e4m3fn", expected, **options)
        assert found.tolist() == expected.tolist(), length
        assert found[3] == length  # the row with that scale: finite, and no number of the format once divided


def test_nothing_depends_on_the_number_of_threads():
    x, results = torch.randn(301, 701), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for axis, block_size in ((0, None), (1, None), (1, 32)):
            options = {"scale": scales_for(x, axis, block_size), "axis": axis, "block_size": block_size}
            state = torch.zeros(6, dtype=torch.int64), torch.zeros(2, dtype=torch.float64)
            y = round_to_format_counted(x, "float8_e4m3fn", *state, **options)
            results.append((y, *state, *torch.ops.qsim.round_to_format_with_mask(x, "float8_e4m3fn", **options)))
    for i, result in enumerate(results):
        assert all(torch.equal(got, first) for got, first in zip(result, results[i % 3], strict=True))


SCRIPT = """
import hashlib, torch, test_scaled_format as t
digest = hashlib.sha256()
for dtype in t.DTYPES:
    x = torch.cat([t.adversarial("float8_e4m3fn", dtype, 17), torch.randn(3001, generator=torch.Generator().manual_seed(0)).to(dtype)])
    x = x[: len(x) // 12 * 12].reshape(12, -1)
    for axis, block_size in ((None, None), (0, None), (1, None), (1, 32), (0, 5)):
        for saturate in (False, True):
            options = {"scale": t.scales_for(x, axis, block_size), "axis": axis, "block_size": block_size, "saturate": saturate}
            state = torch.zeros(6, dtype=torch.int64), torch.zeros(2, dtype=torch.float64)
            y = t.round_to_format_counted(x, "float8_e4m3fn", *state, **options)
            z, mask = torch.ops.qsim.round_to_format_with_mask(x, "float8_e4m3fn", **options)
            for tensor in (y, t.round_to_format(x, "float8_e4m3fn", **options), z, mask, *state):
                known = tensor.nan_to_num(7.5) if tensor.is_floating_point() else tensor
                digest.update(known.contiguous().view(torch.uint8).numpy())
print(digest.hexdigest())
"""


@pytest.mark.parametrize("level", LEVELS[1:])
def test_levels_give_the_same_bits(level):
    assert_same_output(level, SCRIPT)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@given(cases(), st.sampled_from(list(FLOAT_FORMATS)), st.sampled_from([None, False, True]))
def test_cuda_equals_the_cpu(case, name, saturate):
    x, options = case
    there = {**options, "scale": options["scale"].cuda()}
    counts = [torch.zeros(6, dtype=torch.int64, device=device) for device in ("cpu", "cuda")]
    expected = round_to_format_counted(x, name, counts[0], saturate=saturate, **options)
    same_bits(round_to_format_counted(x.cuda(), name, counts[1], saturate=saturate, **there).cpu(), expected)
    same_bits(round_to_format(x.cuda(), name, saturate=saturate, **there).cpu(), expected)
    assert counts[0].tolist() == counts[1].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(dtype):
    ops, check, x = torch.ops.qsim, torch.library.opcheck, torch.randn(4, 6).to(dtype)
    counts, squares = torch.zeros(6, dtype=torch.int64), torch.zeros(2, dtype=torch.float64)
    for axis, block_size in ((None, None), (1, None), (1, 4)):
        options = {"scale": scales_for(x, axis, block_size), "axis": axis, "block_size": block_size}
        for needs_gradient in (False, True):
            leaf = x.clone().requires_grad_(needs_gradient)
            check(ops.round_to_format.default, (leaf, "float8_e4m3fn"), options)
            check(ops.round_to_format_counted.default, (leaf, "float8_e5m2", counts, squares), options)
        check(ops.round_to_format_.default, (x.clone(), "float8_e5m2"), options)
        check(ops.round_to_format.out, (x, "float8_e5m2"), {**options, "out": torch.empty_like(x)})
        check(ops.round_to_format_with_mask.default, (x, "float8_e5m2"), options)


def test_compiles_as_one_graph():
    def model(x, scale):
        y = round_to_format_(round_to_format(x, "float8_e4m3fn", scale=scale, axis=1) * 3, "float8_e5m2", scale=scale[:1])
        tiles = scale[None].expand(-(-x.shape[0] // 4), -1)
        return round_to_format(y, "float8_e4m3fn", scale=tiles, axis=(0, 1), block_size=(4, 1)).relu()

    scale, results = torch.rand(6) / 100 + 0.01, []
    for run in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        for rows in (8, 5):
            x = torch.linspace(-3, 9, rows * 6).reshape(rows, 6).requires_grad_()
            y = run(x, scale)
            results.append((y.detach(), *torch.autograd.grad(y.square().sum(), x)))
    for got, expected in zip(results[2:], results[:2], strict=True):
        assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


def test_errors_say_what_was_expected():
    x = torch.ones(3, 4)
    with pytest.raises(ValueError, match=r"scale has shape \[3\]; expected \[4\], one per channel of axis 1"):
        round_to_format(x, "float8_e4m3fn", scale=torch.ones(3), axis=1)
    with pytest.raises(TypeError, match="scale is Double; expected Float"):
        round_to_format(x, "float8_e4m3fn", scale=torch.ones((), dtype=torch.float64))
    with pytest.raises(ValueError, match="axis or block_size, but no scale"):
        round_to_format(x, "float8_e4m3fn", axis=0)
    for tensor in (x, x.clone().requires_grad_()):
        with pytest.raises(RuntimeError, match=r"pass scale.detach\(\)"):
            round_to_format(tensor, "float8_e4m3fn", scale=torch.ones((), requires_grad=True))
