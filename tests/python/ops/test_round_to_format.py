import itertools
import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from levels import LEVELS, assert_same_output

from qsim import reference
from qsim.numbers.float_format import FLOAT_FORMATS
from qsim.ops import count_format_, round_to_format, round_to_format_, round_to_format_counted

NARROW = [name for name, form in FLOAT_FORMATS.items() if form.bits < 8]  # without Inf and NaN: their casts saturate
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def same_bits(a, b):
    """Equal values, NaN where the other is NaN, and equal signs of zeros."""
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(a.signbit() & ~a.isnan(), b.signbit() & ~b.isnan())


def every_number(name):
    """All finite numbers of a format, ascending, as float64."""
    patterns = torch.arange(2 ** FLOAT_FORMATS[name].bits)
    if not hasattr(torch, name):
        numbers = torch.from_numpy(patterns.numpy().astype(np.uint8).view(getattr(ml_dtypes, name)).astype(np.float64))
    else:
        dtype = getattr(torch, name)
        numbers = patterns.to(torch.uint8 if dtype.itemsize == 1 else torch.int16).view(dtype).double()
    return numbers[numbers.isfinite()].unique()


def adversarial(name, dtype, step=1):
    """Every number of the format (or every `step`-th), every tie, the neighbours of both in `dtype`, and what overflows."""
    if dtype.itemsize == 2:
        return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)[::step]  # all there are
    numbers = every_number(name)
    ties = (numbers[1:] + numbers[:-1]) / 2
    past = numbers[-1] + (numbers[-1] - numbers[-2]) * torch.tensor([0.5, 1.0, 1.5])
    beyond = torch.cat([past, torch.tensor([2.0, 1e30]) * numbers[-1]])
    specials = torch.tensor([math.inf, math.nan, 0.0, 1e-45, 1.2e-38, 5e-324, 2.3e-308, 3.4028235e38])
    x = torch.cat([numbers[::step], ties[::step], beyond, -beyond, specials, -specials]).to(dtype)
    patterns = torch.tensor([0x7F800001, 0x7FFFFFFF, 0x7FC12345, -1, -0x7FFFFF]).to(torch.int32).view(torch.float32)  # NaNs
    up, down = (torch.nextafter(x, torch.full_like(x, end)) for end in (math.inf, -math.inf))
    return torch.cat([x, up, down, patterns.to(dtype)])


def cast(x, name):
    """ml_dtypes' conversion, the oracle: float16, float8 and bfloat16 as IEEE 754 rounds."""
    with np.errstate(over="ignore", invalid="ignore"):
        return torch.from_numpy(x.numpy().astype(name if name == "float16" else getattr(ml_dtypes, name)).astype(x.numpy().dtype))


@pytest.mark.parametrize(("name", "dtype"), [*itertools.product(FLOAT_FORMATS, [torch.float32, torch.float16, torch.bfloat16])])
def test_equals_casting_to_the_format(name, dtype):
    x = adversarial(name, dtype)
    x = x[~x.isnan()] if name in NARROW else x
    same_bits(round_to_format(x, name, saturate=name in NARROW), cast(x.float(), name).to(dtype))


@pytest.mark.parametrize("name", FLOAT_FORMATS)
def test_saturating_equals_clamping_first(name):
    x = adversarial(name, torch.float32)
    x = x[~x.isnan()] if name in NARROW else x
    largest = FLOAT_FORMATS[name].largest
    same_bits(round_to_format(x, name, saturate=True), cast(x.clamp(-largest, largest), name))


@pytest.mark.parametrize("name", FLOAT_FORMATS)
def test_float64_is_rounded_once(name):
    """Brute force: the nearest number of the format, the even one at a tie. Rounding through float32 would move ties."""
    numbers = every_number(name)
    x = adversarial(name, torch.float64)
    x = x[x.abs() <= numbers[-1]]
    above = torch.searchsorted(numbers, x).clamp(max=len(numbers) - 1)
    below = (above - 1).clamp(min=0)
    to_above, to_below = numbers[above] - x, x - numbers[below]
    even = below - len(numbers) // 2  # index from zero: neighbours alternate between even and odd mantissas
    take_below = (to_below < to_above) | ((to_below == to_above) & (even % 2 == 0))
    assert torch.equal(round_to_format(x, name), torch.where(take_below, numbers[below], numbers[above]))


@pytest.mark.parametrize(("name", "dtype", "saturate"), [*itertools.product(FLOAT_FORMATS, DTYPES, [None, False, True])])
def test_equals_the_reference(name, dtype, saturate):
    x = adversarial(name, dtype, step=1 if name.startswith("float8") else 7)
    expected = reference.round_to_format(x, name, saturate=saturate)
    counts, squares = torch.zeros(6, dtype=torch.int64), torch.zeros(2, dtype=torch.float64)
    expected_counts, expected_squares = counts.clone(), squares.clone()
    reference.count_format_(x, name, expected_counts, expected_squares, saturate=saturate)
    same_bits(round_to_format(x, name, saturate=saturate), expected)
    same_bits(round_to_format_counted(x, name, counts, squares, saturate=saturate), expected)
    assert counts.tolist() == expected_counts.tolist()
    torch.testing.assert_close(squares, expected_squares, rtol=1e-6, atol=0)
    rounded, mask = torch.ops.qsim.round_to_format_with_mask(x, name, saturate=saturate)
    same_bits(rounded, expected)
    passes = torch.from_numpy(np.unpackbits(mask.numpy(), bitorder="little")[: len(x)]).bool()
    assert torch.equal(passes, reference.round_to_format_backward(torch.ones(len(x)), x, name).bool())


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_saturating_equals_the_cast_of_onnx_runtime(name):
    """Without saturation ONNX Runtime 1.31 casts 480 to the float8_e4m3fn 448 and 61440 to a NaN of float8_e5m2: no oracle."""
    onnx, onnxruntime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    helper, kind = onnx.helper, getattr(onnx.TensorProto, name.replace("float8_", "FLOAT8").upper())
    nodes = [
        helper.make_node("Cast", ["x"], ["narrow"], to=kind, saturate=1),
        helper.make_node("Cast", ["narrow"], ["y"], to=onnx.TensorProto.FLOAT),
    ]
    ends = [helper.make_tensor_value_info(end, onnx.TensorProto.FLOAT, ["n"]) for end in "xy"]
    model = helper.make_model(
        helper.make_graph(nodes, "cast", ends[:1], ends[1:]), opset_imports=[helper.make_opsetid("", 21)], ir_version=10
    )
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL  # a pair of casts would be dropped
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    x = adversarial(name, torch.float32)
    (expected,) = session.run(None, {"x": x.numpy()})
    same_bits(round_to_format(x, name, saturate=True), torch.from_numpy(expected))


@pytest.mark.parametrize("name", FLOAT_FORMATS)
def test_saturation(name):
    largest = FLOAT_FORMATS[name].largest
    x = torch.tensor([math.inf, -math.inf, largest, math.nan, 1.0])
    assert round_to_format(x, name, saturate=True).nan_to_num(7).tolist() == [largest, -largest, largest, 7, 1]
    by_default = round_to_format(x, name)
    assert by_default[0].isfinite() == FLOAT_FORMATS[name].saturates


def test_a_saturated_number_exists_in_the_dtype():
    assert round_to_format(torch.tensor([1e38, -1e38], dtype=torch.bfloat16), "float16", saturate=True).tolist() == [65280, -65280]


@pytest.mark.parametrize(("name", "dtype"), [*itertools.product(FLOAT_FORMATS, [torch.float32, torch.float64, torch.bfloat16])])
def test_flushing_subnormals_changes_nothing(name, dtype):
    x = adversarial(name, dtype, step=5)
    counts = torch.zeros(2, 6, dtype=torch.int64)
    expected = round_to_format_counted(x, name, counts[0])
    torch.set_num_threads(1)  # the mode is the thread's
    assert torch.set_flush_denormal(True)
    try:
        flushed, plain = round_to_format_counted(x, name, counts[1]), round_to_format(x, name)
    finally:
        torch.set_flush_denormal(False)
    same_bits(flushed, expected)
    same_bits(plain, expected)
    assert counts[1].tolist() == counts[0].tolist()


@st.composite
def tensors(draw):
    """Any size and strides around the kernels' blocks; ordinary, small and broken stretches in turns."""
    n, dtype = draw(st.integers(0, 5000)), draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    x = torch.randn(n, generator=generator)
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, n))
        stretch = x[start : start + draw(st.integers(1, 2000))]
        factor = draw(st.sampled_from([0.0, 1e-3, 1e-6, 1e-9, 1e5, 1e39, math.nan]))
        stretch *= factor
    x = x.to(dtype)
    return draw(st.sampled_from([x, x[1:], x[::3], x[: n // 6 * 6].reshape(2, 3, -1).transpose(0, 2)]))


@given(tensors(), st.sampled_from(list(FLOAT_FORMATS)), st.sampled_from([None, False, True]))
def test_results_and_counts_of_any_tensor(x, name, saturate):
    state = [torch.zeros(6, dtype=torch.int64), torch.zeros(2, dtype=torch.float64)]
    alone, expected = [part.clone() for part in state], [part.clone() for part in state]
    only = state[0].clone()
    for _ in range(2):  # states add up
        reference.count_format_(x, name, *expected, saturate=saturate)
        y = round_to_format_counted(x, name, *state, saturate=saturate)
        count_format_(x, name, *alone, saturate=saturate)
    round_to_format_counted(x, name, only)
    same_bits(y, reference.round_to_format(x, name, saturate=saturate))
    same_bits(round_to_format(x, name, saturate=saturate), y)
    assert state[0].tolist() == alone[0].tolist() == expected[0].tolist() == [2 * count for count in only.tolist()]
    assert torch.equal(state[1], alone[1])
    torch.testing.assert_close(state[1], expected[1], rtol=1e-6, atol=0)


def test_nothing_depends_on_the_number_of_threads():
    x = torch.randn(200_001)
    x[::31], x[5::4001] = 1e5, math.nan
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        counts, squares = torch.zeros(6, dtype=torch.int64), torch.zeros(2, dtype=torch.float64)
        y = round_to_format_counted(x, "float16", counts, squares)
        results.append((y, counts, squares, *torch.ops.qsim.round_to_format_with_mask(x, "float16")))
    for result in results[1:]:
        for got, first in zip(result, results[0], strict=True):
            torch.testing.assert_close(got, first, rtol=0, atol=0, equal_nan=True)


SCRIPT = """
import hashlib, torch, test_round_to_format as t
digest = hashlib.sha256()
for name in t.FLOAT_FORMATS:
    for dtype in t.DTYPES:
        x = torch.cat([t.adversarial(name, dtype, 17), torch.randn(3001, generator=torch.Generator().manual_seed(0)).to(dtype)])
        for saturate in (False, True):
            counts, squares = torch.zeros(6, dtype=torch.int64), torch.zeros(2, dtype=torch.float64)
            y = t.round_to_format_counted(x, name, counts, squares, saturate=saturate)
            z, mask = torch.ops.qsim.round_to_format_with_mask(x, name, saturate=saturate)
            for tensor in (y, t.round_to_format(x, name, saturate=saturate), z, mask, counts, squares):
                known = tensor.nan_to_num(7.5) if tensor.is_floating_point() else tensor  # any NaN is as good as another
                digest.update(known.view(torch.uint8).numpy())
print(digest.hexdigest())
"""


@pytest.mark.parametrize("level", LEVELS[1:])
def test_levels_give_the_same_bits(level):
    assert_same_output(level, SCRIPT)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@given(tensors(), st.sampled_from(list(FLOAT_FORMATS)), st.sampled_from([None, False, True]))
def test_cuda_equals_the_cpu(x, name, saturate):
    states = {
        where: [torch.zeros(6, dtype=torch.int64, device=where), torch.zeros(2, dtype=torch.float64, device=where)]
        for where in ("cpu", "cuda")
    }
    results = {}
    for where, state in states.items():
        there = x.to(where)
        y = round_to_format_counted(there, name, *state, saturate=saturate)
        results[where] = (
            y,
            round_to_format(there, name, saturate=saturate),
            *torch.ops.qsim.round_to_format_with_mask(there, name, saturate=saturate),
        )
    for got, expected in zip(results["cuda"], results["cpu"], strict=True):
        same_bits(got.cpu(), expected) if got.is_floating_point() else torch.equal(got.cpu(), expected)
    assert states["cuda"][0].tolist() == states["cpu"][0].tolist()
    torch.testing.assert_close(states["cuda"][1].cpu(), states["cpu"][1], rtol=1e-9, atol=0)


@pytest.mark.parametrize(("name", "saturate"), [*itertools.product(FLOAT_FORMATS, [False, True])])
def test_gradient_passes_where_the_result_is_in_range(name, saturate):
    largest = FLOAT_FORMATS[name].largest
    x = torch.tensor([1.2, -0.0, largest, -math.inf, math.nan, 3.4e38], requires_grad=True)
    weights = torch.arange(1.0, 7.0)
    counts = torch.zeros(6, dtype=torch.int64)
    for call in (
        lambda: round_to_format(x, name, saturate=saturate),
        lambda: round_to_format_(x * 1, name, saturate=saturate),
        lambda: round_to_format_counted(x, name, counts, saturate=saturate),
    ):
        (grad,) = torch.autograd.grad((call().nan_to_num() * weights).sum(), x)
        assert grad.tolist() == [1, 2, 3, 0, 0, 0]
    assert counts.tolist() == [6, 1, 1, 1, 0, 0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_of_any_strides(dtype):
    leaf = (torch.randn(6, 5, 4) * 300).to(dtype).requires_grad_()
    for view in (lambda x: x.transpose(0, 2), lambda x: x[::2, 1:, :3], lambda x: x[:0], lambda x: x[0, 0, 0]):
        x = view(leaf)
        y = round_to_format(x, "float8_e4m3fn")
        same_bits(y.detach(), reference.round_to_format(x.detach(), "float8_e4m3fn"))
        grad = torch.randn_like(y)
        (got,) = torch.autograd.grad(y, x, grad)
        same_bits(got, reference.round_to_format_backward(grad, x.detach(), "float8_e4m3fn"))


def test_one_bit_per_element_is_saved():
    x, sizes = torch.randn(8000, requires_grad=True), []

    def pack(tensor):
        sizes.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        round_to_format(x, "float16")
        with torch.no_grad():
            round_to_format(x, "float16")
    assert sizes == [1000]


def test_double_backward_is_linear_in_the_gradient():
    x, grad = torch.tensor([0.3, 1e9], requires_grad=True), torch.ones(2, requires_grad=True)
    (dx,) = torch.autograd.grad(round_to_format(x, "float16"), x, grad, create_graph=True)
    assert torch.autograd.grad(dx.sum(), grad)[0].tolist() == [1.0, 0.0]


class TestMutation:
    def test_bumps_the_version(self):
        x, out = torch.randn(5), torch.empty(5)
        counts, squares = torch.zeros(6, dtype=torch.int64), torch.zeros(2, dtype=torch.float64)
        for times, mode in enumerate((torch.enable_grad, torch.no_grad, torch.inference_mode), 1):
            with mode():
                round_to_format_(x, "float16")
                round_to_format(x, "float16", out=out)
                round_to_format_counted(x, "float16", counts, squares)
                count_format_(x, "float16", counts)
            assert (x._version, out._version, counts._version, squares._version) == (times, times, 2 * times, times)

    def test_writes_strided_and_shared_memory(self):
        base = torch.tensor([[0.3, 9.1], [0.4, -9.1]])
        expected = round_to_format(base, "float8_e5m2")
        assert round_to_format_(base[:, 1], "float8_e5m2").data_ptr() == base[:, 1].data_ptr()
        assert torch.equal(base[:, 1], expected[:, 1])
        out = torch.empty(2, 2).T
        assert torch.equal(round_to_format(base, "float8_e5m2", out=out), expected)

    def test_of_a_leaf_is_an_error(self):
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
            round_to_format_(torch.randn(5, requires_grad=True), "float16")

    def test_out_has_no_gradient(self):
        with pytest.raises(RuntimeError, match="out= has no gradient"):
            round_to_format(torch.randn(5, requires_grad=True), "float16", out=torch.empty(5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(dtype):
    ops, check, x = torch.ops.qsim, torch.library.opcheck, torch.randn(4, 6).to(dtype)
    counts, squares = torch.zeros(6, dtype=torch.int64), torch.zeros(2, dtype=torch.float64)
    for needs_gradient in (False, True):
        given = x.clone().requires_grad_(needs_gradient)
        check(ops.round_to_format.default, (given, "float8_e4m3fn"), {"saturate": False})
        check(ops.round_to_format_counted.default, (given, "float16", counts, squares))
        check(ops.count_format_.default, (given, "float16", counts, squares))
    check(ops.round_to_format_counted.default, (x, "float16", counts))
    check(ops.round_to_format_.default, (x.clone(), "bfloat16"))
    check(ops.round_to_format.out, (x, "float16"), {"out": torch.empty_like(x)})
    check(ops.round_to_format_with_mask.default, (x, "float16"))
    check(ops.round_to_format_with_mask_.default, (x.clone(), "float16"))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles_as_one_graph(backend):
    def model(x, counts):
        y = round_to_format_(round_to_format_counted(x, "float16", counts) * 3, "bfloat16")
        return round_to_format(y * 1.1, "float8_e4m3fn").relu()

    results = []
    for run in (model, torch.compile(model, fullgraph=True, backend=backend, dynamic=True)):
        for size in (5, 9):
            x = torch.linspace(-200, 90000, size, requires_grad=True)
            counts = torch.zeros(6, dtype=torch.int64)
            with torch.no_grad():
                evaluated = run(x, counts)
            y = run(x, counts)
            results.append((evaluated, y.detach(), counts, *torch.autograd.grad(y.square().sum(), x)))
    for got, expected in zip(results[2:], results[:2], strict=True):
        for one, other in zip(got, expected, strict=True):
            assert torch.equal(one, other)


def test_errors_say_what_was_expected():
    x, counts = torch.ones(3), torch.zeros(6, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"'float4'.*expected one of 'float16'"):
        round_to_format(x, "float4")
    with pytest.raises(TypeError, match="expected float32, float16, bfloat16 or float64"):
        round_to_format(torch.ones(3, dtype=torch.int32), "float16")
    with pytest.raises(ValueError, match="qsim::round_to_format: out is"):
        round_to_format(x, "float16", out=torch.ones(4))
    with pytest.raises(ValueError, match=r"counts has shape \[4\]; expected \[6\]"):
        count_format_(x, "float16", counts[:4])
    with pytest.raises(TypeError, match="squares is Float; expected Double"):
        round_to_format_counted(x, "float16", counts, torch.zeros(2))
