"""Scales from the tensor itself: equal to the twin and to the operators one after the other; block formats equal to ml_dtypes."""

import itertools
import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from levels import LEVELS, assert_same_output

from qsim import ops, reference
from qsim.numbers.float_format import FLOAT_FORMATS

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
GROUPS = [(None, None), (-1, None), (-1, 16), (-1, 5), (0, None), (0, 2)]
SHAPES = [(5,), (7, 33), (3, 4, 64), (2, 300), (0, 5), (3, 0), (1, 1), (6, 17, 3)]
GRIDS = [(-128, 127), (0, 255), (-8, 7), (-2, 1)]
ROUNDINGS = ["floor", "ceil", "even", "rceil"]
SCALES = [(None, "floor"), *(("float8_e8m0fnu", rounding) for rounding in ROUNDINGS), ("float8_e4m3fn", "floor")]
SCALED = [name for name, form in FLOAT_FORMATS.items() if form.scaled]
SPECIALS = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, -3e38]


def same(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(a.signbit() & ~a.isnan(), b.signbit() & ~b.isnan())


def sample(shape, dtype, seed=0):
    """Normal values of some magnitude, a few of them special; the first row, where there are several, holds NaN alone."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=draw, dtype=torch.float64) * 2.0 ** torch.randint(-20, 20, (1,), generator=draw)
    flat = x.view(-1)
    if flat.numel() > 3:
        at = torch.randint(flat.numel(), (flat.numel() // 20 + 1,), generator=draw)
        flat[at] = torch.tensor(SPECIALS, dtype=torch.float64)[torch.randint(len(SPECIALS), at.shape, generator=draw)]
        if x.dim() > 1 and len(x) > 1:
            x[0] = math.nan
    return x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("axis", "block"), GROUPS)
def test_integers_equal_the_twin(dtype, axis, block):
    for i, shape in enumerate(SHAPES):
        x = sample(shape, dtype, i)
        for (low, high), symmetric in itertools.product(GRIDS, [False, True]):
            options = {"axis": axis, "block_size": block, "symmetric": symmetric}
            same(ops.fake_quantize_dynamic(x, low, high, **options), reference.fake_quantize_dynamic(x, low, high, **options))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", SCALED)
def test_formats_equal_the_twin(dtype, format):
    scales = [scale for scale in SCALES if scale[0] or not FLOAT_FORMATS[format].has_fraction]
    for (i, shape), (axis, block), (scale_format, rounding) in itertools.product(enumerate(SHAPES), GROUPS, scales):
        x = sample(shape, dtype, i)
        options = {"axis": axis, "block_size": block, "scale_format": scale_format, "scale_rounding": rounding}
        same(ops.round_to_format_dynamic(x, format, **options), reference.round_to_format_dynamic(x, format, **options))


@pytest.mark.parametrize(("scale_format", "rounding"), SCALES[1:])
def test_integers_with_stored_scales_equal_the_twin(scale_format, rounding):
    for shape, low in itertools.product(SHAPES, [-127, -128]):
        options = {"axis": -1, "block_size": 32, "symmetric": True, "scale_format": scale_format, "scale_rounding": rounding}
        x = sample(shape, torch.float32)
        same(ops.fake_quantize_dynamic(x, low, 127, **options), reference.fake_quantize_dynamic(x, low, 127, **options))


@given(st.integers(0, 2**16), st.sampled_from(DTYPES), st.sampled_from(GROUPS), st.booleans())
def test_fused_equals_the_operators_in_turn(seed, dtype, group, symmetric):
    """What only a large tensor, or a view, takes: other ways through the bindings."""
    axis, block = group
    x = sample((3, 40, 70), dtype, seed)
    views = [x, x.transpose(0, 2), x[:, ::3], x[..., 1:65], x.expand(2, 3, 40, 70)[1]]
    for view in views:
        options = {"axis": axis, "block_size": block}
        fused = ops.fake_quantize_dynamic(view, -128, 127, symmetric=symmetric, **options)
        length = block or (None if axis is None else view.shape[axis])
        shape = () if axis is None else [-(-n // length) if i == axis % view.dim() else n for i, n in enumerate(view.shape)]
        low, high, counts = torch.full(shape, math.inf), torch.full(shape, -math.inf), torch.zeros(4, dtype=torch.int64)
        ops.observe_range_(view, low, high, counts, axis, block_size=length)
        scale, zero_point = ops.choose_qparams(low, high, -128, 127, symmetric)
        scale = scale.double() if dtype == torch.float64 else scale
        same(fused, ops.fake_quantize(view, scale, zero_point, -128, 127, axis=axis, block_size=length))
        assert fused.stride() == torch.empty_like(view).stride()


def test_a_row_of_nan_keeps_to_itself():
    x = torch.tensor([[math.nan, math.nan], [math.inf, -math.inf], [math.nan, 2.0], [math.inf, -1.0], [3.0, -1.0]])
    y = ops.fake_quantize_dynamic(x, -127, 127, axis=-1, symmetric=True)
    assert y[:2].isnan().all()
    assert y[2, 0].isnan()
    assert y[2, 1] == 2
    assert y[3].tolist() == [1, -1]  # Inf goes to the end of the grid that the finite elements span
    assert y[4, 0] == 3
    z = ops.round_to_format_dynamic(x, "float4_e2m1fn", axis=-1, scale_format="float8_e8m0fnu")
    assert z[:2].isnan().all()
    assert z[3].tolist() == [1.5, -1.0]


def test_ranges_at_the_ends_of_float32():
    for x in (torch.tensor([3.4e38, -3.4e38, 1e38]), torch.tensor([1e-45, -1e-45]), torch.zeros(3)):
        for y in (ops.fake_quantize_dynamic(x, -128, 127), ops.round_to_format_dynamic(x, "float8_e4m3fn")):
            assert y.isfinite().all()


def test_gradient_holds_the_scale_fixed():
    """1 within the range and at its ends, also where the range is set by the element itself; 0 at NaN and Inf, and where it is clipped."""
    x = torch.tensor([[-1.0, 0.3, 2.0, math.nan], [5.0, -5.0, math.inf, 0.0]], requires_grad=True)
    ops.fake_quantize_dynamic(x, -128, 127, axis=-1, symmetric=True).sum().backward()
    assert x.grad.tolist() == [[1, 1, 1, 0], [1, 1, 0, 1]]
    y = torch.tensor([7.5, 1.0, -7.4], requires_grad=True)  # the scale is 1, and 7.5 rounds beyond 6
    ops.round_to_format_dynamic(y, "float4_e2m1fn", axis=-1, scale_format="float8_e8m0fnu").sum().backward()
    assert y.grad.tolist() == [0, 1, 0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_with_and_without_a_gradient_it_computes_the_same(dtype):
    x = sample((4, 50), dtype)
    with_gradient = x.clone().requires_grad_()
    same(ops.fake_quantize_dynamic(x, 0, 255, axis=-1), ops.fake_quantize_dynamic(with_gradient, 0, 255, axis=-1).detach())
    options = {"axis": -1, "block_size": 16, "scale_format": "float8_e4m3fn"}
    plain = ops.round_to_format_dynamic(x, "float4_e2m1fn", **options)
    same(plain, ops.round_to_format_dynamic(with_gradient, "float4_e2m1fn", **options).detach())


def test_compiled():
    def both(x):
        tokens = ops.fake_quantize_dynamic(x, -128, 127, axis=-1)
        return tokens + ops.round_to_format_dynamic(x, "float4_e2m1fn", axis=-1, block_size=16, scale_format="float8_e4m3fn")

    for x in (torch.randn(3, 40), torch.randn(3, 40, requires_grad=True)):
        y = torch.compile(both, fullgraph=True, backend="aot_eager")(x)  # under Inductor: test_operator_tags.py
        same(y.detach(), both(x).detach())
        if x.requires_grad:
            (compiled,), (eager,) = torch.autograd.grad(y.sum(), x), torch.autograd.grad(both(x).sum(), x)
            assert torch.equal(compiled, eager)


def adversarial(name):
    """2**20 values: numbers of a format and ties between them at many scales, their neighbours, and noise; blocks mix magnitudes."""
    draw = torch.Generator().manual_seed(1)
    n = 2**18
    steps = torch.randint(-(2**9), 2**9, (n,), generator=draw) / 32
    near = steps * 2.0 ** torch.randint(-12, 12, (n,), generator=draw)
    up, down = (torch.nextafter(near, torch.full_like(near, end)) for end in (math.inf, -math.inf))
    noise = torch.randn(n, generator=draw) * 2.0 ** torch.randint(-20, 20, (n,), generator=draw)
    return torch.cat([near, up, down, noise])[torch.randperm(4 * n, generator=draw)]


@pytest.mark.parametrize("format", SCALED)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_mx_equals_ml_dtypes(format, rounding):
    """Scales from the specification's words, in exact float64; elements by ml_dtypes."""
    x, form = adversarial(format).reshape(-1, 32), FLOAT_FORMATS[format]
    y = ops.round_to_format_dynamic(x, format, axis=-1, block_size=32, scale_format="float8_e8m0fnu", scale_rounding=rounding)
    largest = x.abs().amax(1, keepdim=True).double().numpy()
    top = math.floor(math.log2(form.largest))
    exponent = {
        "floor": lambda: np.floor(np.log2(largest)) - top,
        "ceil": lambda: np.ceil(np.log2(largest)) - top,
        "even": lambda: np.floor(np.log2(largest + 2.0 ** np.floor(np.log2(largest)) * form.eps / 2)) - top,
        "rceil": lambda: np.ceil(np.log2(largest / form.largest)),
    }[rounding]()
    scale = 2.0**exponent
    elements = np.clip(x.double().numpy() / scale, -form.largest, form.largest).astype(getattr(ml_dtypes, format))
    assert int((torch.from_numpy(elements.astype(np.float64) * scale) != y.double()).sum()) == 0


def test_mxint8_is_the_specification():
    """Section 5.3.4: two's complement fractions with six bits behind the point."""
    x = adversarial("int8").reshape(-1, 32)
    y = ops.fake_quantize_dynamic(x, -127, 127, axis=-1, block_size=32, symmetric=True, scale_format="float8_e8m0fnu")
    scale = 2.0 ** np.floor(np.log2(x.abs().amax(1, keepdim=True).double().numpy()))
    expected = np.clip(np.rint(x.double().numpy() / scale * 64), -127, 127) / 64 * scale
    assert int((torch.from_numpy(expected) != y.double()).sum()) == 0


def test_nvfp4_equals_ml_dtypes():
    x = adversarial("float4_e2m1fn").reshape(-1, 16).numpy()
    y = ops.round_to_format_dynamic(torch.from_numpy(x), "float4_e2m1fn", axis=-1, block_size=16, scale_format="float8_e4m3fn")
    whole = np.float32(np.abs(x).max()) / np.float32(6 * 448)
    block = np.clip(np.abs(x).max(1, keepdims=True) / (np.float32(6) * whole), 2.0**-9, 448).astype(ml_dtypes.float8_e4m3fn)
    scale = block.astype(np.float32) * whole
    elements = np.clip(x / scale, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert int((torch.from_numpy(elements * scale) != y).sum()) == 0


def test_scales_of_blocks():
    ends = torch.tensor([448.0 * 6, 6.0, 1e-30, 0.0, math.inf, -1.0])
    scale = ops.choose_block_scale(-ends, ends, "float4_e2m1fn", "float8_e4m3fn")
    assert scale[:4].tolist() == [448, 1, 2**-9, 1]
    assert scale[4:].isnan().all()  # an infinite range, and an empty one
    tiny = torch.tensor([1e-45, 3.4e38])
    assert ops.choose_block_scale(-tiny, tiny, "float8_e4m3fn", "float8_e8m0fnu").tolist() == [2.0**-127, 2.0**119]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: ops.fake_quantize_dynamic(x, 0, 255, symmetric=True, scale_format="float8_e8m0fnu"), "signed grid"),
        (lambda x: ops.fake_quantize_dynamic(x, -8, 7, block_size=4), "without an axis"),
        (lambda x: ops.round_to_format_dynamic(x, "float16"), "without a scale"),
        (lambda x: ops.round_to_format_dynamic(x, "float6_e2m3fn"), "scale_format"),
        (lambda x: ops.round_to_format_dynamic(x, "float4_e2m1fn", scale_format="e8m0"), "float8_e8m0fnu"),
        (lambda x: ops.choose_block_scale(x, x, "int1", "float8_e8m0fnu"), "int2"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.randn(4, 8))


_PROGRAM = """
import torch
from qsim import ops
torch.manual_seed(0)
x = torch.randn(33, 77) * torch.logspace(-30, 30, 33)[:, None]
x[3, 4], x[5, 6], x[7] = torch.nan, torch.inf, torch.nan
for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
    y = x.to(dtype)
    found = [ops.fake_quantize_dynamic(y, -128, 127, axis=-1), ops.fake_quantize_dynamic(y, -8, 7, axis=-1, block_size=32, symmetric=True)]
    for scale in ("float8_e8m0fnu", "float8_e4m3fn"):
        found.append(ops.round_to_format_dynamic(y, "float4_e2m1fn", axis=-1, block_size=16, scale_format=scale))
    print([f(t.nan_to_num(7.0).double()).item().hex() for t in found for f in (torch.sum, torch.std)])
"""


@pytest.mark.parametrize("level", LEVELS[1:])
def test_every_level_gives_the_same(level):
    assert_same_output(level, _PROGRAM)
