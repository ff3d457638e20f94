import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from levels import LEVELS, assert_same_output
from test_fake_quantize import DTYPES, LAYOUTS, elements, parameters, same_bits

from qsim import reference
from qsim.ops import dequantize, fake_quantize, quantize

GRIDS = [(-128, 127), (0, 255), (-8, 7), (0, 3), (-1, 0), (-32768, 32767), (0, 65535), (-127, 127), (-5, 300)]
STORAGE = [torch.int8, torch.uint8, torch.int16, torch.uint16]


@st.composite
def calls(draw, max_dim=4):
    shape = draw(st.lists(st.integers(0, 40), min_size=0, max_size=max_dim).filter(lambda s: torch.Size(s).numel() < 40000))
    x = elements(shape, draw(st.sampled_from(DTYPES)), draw(st.sampled_from(LAYOUTS)), draw(st.integers(0, 99)))
    axis = draw(st.none() | st.integers(-x.dim(), x.dim() - 1)) if x.dim() else None
    block_size = draw(st.none() | st.integers(1, 50)) if axis is not None else None
    grid = draw(st.sampled_from(GRIDS))
    scale, zero_point = parameters(x, axis, block_size, seed=draw(st.integers(0, 99)), grid=grid)
    options = {"axis": axis, "block_size": block_size, "rounding": draw(st.sampled_from(["divide", "reciprocal"]))}
    return (x, scale, zero_point, *grid), options


def same_integers(got, expected):
    assert got.dtype == expected.dtype
    assert torch.equal(got.int(), expected.int())


@given(calls(), st.sampled_from([None, *STORAGE]))
def test_both_match_their_references_and_together_fake_quantize(call, dtype):
    args, options = call
    x, scale, zero_point, *grid = args
    if dtype is not None and not torch.iinfo(dtype).min <= grid[0] <= grid[1] <= torch.iinfo(dtype).max:
        dtype = None
    q = quantize(*args, **options, dtype=dtype)
    same_integers(q, reference.quantize(*args, **options, dtype=dtype))
    assert q.stride() == torch.empty_like(x).stride()
    where = {"axis": options["axis"], "block_size": options["block_size"]}
    y = dequantize(q, scale, zero_point, **where, dtype=x.dtype)
    same_bits(y, reference.dequantize(q, scale, zero_point, **where, dtype=x.dtype))
    assert y.stride() == q.stride()
    expected = fake_quantize(*args, **options)
    same_bits(y.masked_fill(x.isnan(), torch.nan), expected)
    assert (q[x.isnan()].int() == grid[0]).all()
    strided = torch.stack([q, q], -1)[..., 0]
    same_bits(dequantize(strided, scale, zero_point, **where, dtype=x.dtype), y)


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_integer_is_dequantized_once_rounded(storage, dtype):
    ends = torch.iinfo(storage)
    q = torch.arange(ends.min, ends.max + 1).to(storage)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for scale in (0.1, 1e-30, 3e36, 1e-44):
        for zero in (ends.min, 3, ends.max):
            scale, zero = torch.as_tensor(scale, dtype=wide), torch.as_tensor(zero, dtype=torch.int32)
            y = dequantize(q, scale, zero, dtype=dtype)
            exact = (q.double() - zero.double()) * scale.double()  # a product of 17 and 24 bits
            same_bits(y, (exact.to(wide).to(dtype) + 0.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_16_bit_value(dtype):
    x = torch.arange(-32768, 32768).to(torch.int16).view(dtype)
    for scale in (1.0, 0.1, 3e-8, 700.0):
        args = (x, torch.tensor(scale), torch.tensor(3, dtype=torch.int32), -128, 127)
        same_integers(quantize(*args), reference.quantize(*args))


def test_default_storage_is_the_smallest_that_holds_the_grid():
    x, scale, zero = torch.zeros(3), torch.tensor(1.0), torch.tensor(0, dtype=torch.int32)
    grids = {(0, 15): torch.uint8, (-8, 7): torch.int8, (-1, 127): torch.int8, (-1, 128): torch.int16, (0, 256): torch.uint16}
    for grid, expected in grids.items():
        assert quantize(x, scale, zero, *grid).dtype == expected


@pytest.mark.parametrize("shape", [(7, 64, 33, 31), (170001,), (300, 513), (5000, 3)])
@pytest.mark.parametrize(("axis", "block_size"), [(None, None), (0, None), (-1, None), (-1, 32)])
def test_nothing_depends_on_the_number_of_threads(shape, axis, block_size):
    x = elements(shape, torch.float32)
    scale, zero_point = parameters(x, axis, block_size)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        q = quantize(x, scale, zero_point, -8, 7, axis=axis, block_size=block_size)
        results.append((q, dequantize(q, scale, zero_point, axis=axis, block_size=block_size)))
    for q, y in results[1:]:
        assert torch.equal(q, results[0][0])
        assert torch.equal(y, results[0][1])


AT_EACH_LEVEL = """
import torch
from test_fake_quantize import DTYPES, elements, parameters
from test_quantize import GRIDS
from qsim.ops import dequantize, quantize
for dtype in DTYPES:
    for options in ({}, {"axis": 1}, {"axis": 1, "block_size": 7}, {"axis": 0, "rounding": "reciprocal"}):
        for grid in GRIDS:
            x = elements((37, 53), dtype)
            where = {"axis": options.get("axis"), "block_size": options.get("block_size")}
            scale, zero_point = parameters(x, **where, grid=grid)
            q = quantize(x, scale, zero_point, *grid, **options)
            print(q.tolist(), dequantize(q, scale, zero_point, **where, dtype=dtype).tolist())
"""


@pytest.mark.parametrize("level", LEVELS)
def test_levels_agree(level):
    assert_same_output(level, AT_EACH_LEVEL)


def test_integers_have_no_gradient_and_dequantize_says_so():
    x, scale, zero = torch.randn(5, requires_grad=True), torch.tensor(0.5, requires_grad=True), torch.tensor(0, dtype=torch.int32)
    q = quantize(x, scale, zero, -8, 7)
    assert not q.requires_grad
    y = dequantize(q, scale, zero)
    with pytest.raises(RuntimeError, match="not implemented"):
        y.sum().backward()
    assert not dequantize(q, scale.detach(), zero).requires_grad


SCALE, ZERO, X = torch.tensor(0.5), torch.tensor(0, dtype=torch.int32), torch.zeros(4, 6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quantize(X.int(), SCALE, ZERO, -8, 7), "qsim::quantize: x is Int"),
        (lambda: quantize(X, SCALE.double(), ZERO, -8, 7), "qsim::quantize: scale is Double; expected Float"),
        (lambda: quantize(X, SCALE, ZERO.float(), -8, 7), "qsim::quantize: zero_point is Float; expected Int"),
        (lambda: quantize(X, SCALE, ZERO, 7, -8), "quant_min 7 and quant_max -8"),
        (lambda: quantize(X, SCALE, ZERO, -8, 70000), "the grid -8 .. 70000 does not fit into int8"),
        (lambda: quantize(X, SCALE, ZERO, -8, 200, dtype=torch.int8), "the grid -8 .. 200 does not fit into Char"),
        (lambda: quantize(X, SCALE, ZERO, -8, 7, dtype=torch.int32), "dtype is Int; expected int8"),
        (lambda: quantize(X, SCALE, ZERO, -8, 7, axis=1), r"scale has shape \[\]; expected \[6\]"),
        (lambda: quantize(X, SCALE, ZERO, -8, 7, axis=2), "axis 2"),
        (lambda: quantize(X, SCALE, ZERO, -8, 7, rounding="up"), "rounding is 'up'"),
        (lambda: dequantize(X, SCALE, ZERO), "q is Float; expected int8"),
        (lambda: dequantize(X.byte(), SCALE.half(), ZERO), "scale is Half; expected float32 or float64"),
        (lambda: dequantize(X.byte(), SCALE, ZERO.float()), "qsim::dequantize: zero_point is Float"),
        (lambda: dequantize(X.byte(), SCALE, ZERO, dtype=torch.float64), "dtype is Double and scale Float"),
        (lambda: dequantize(X.byte(), SCALE, ZERO, block_size=2), "block_size 2 without an axis"),
        (lambda: dequantize(X.byte(), SCALE, ZERO.to("meta")), "expected one device"),
    ],
)
def test_errors_say_what_was_expected(call, message):
    with pytest.raises((ValueError, TypeError, IndexError), match=message):
        call()


@pytest.mark.parametrize(
    ("x", "axis", "block_size"),
    [(torch.randn(4, 6), None, None), (torch.randn(4, 6, 2).transpose(0, 2), 1, None), (torch.randn(4, 6, dtype=torch.bfloat16), 1, 4)],
)
def test_opcheck(x, axis, block_size):
    scale, zero_point = parameters(x, axis, block_size)
    where = {"axis": axis, "block_size": block_size}
    torch.library.opcheck(torch.ops.qsim.quantize, (x, scale, zero_point, -8, 7), where)
    torch.library.opcheck(torch.ops.qsim.quantize, (x, scale, zero_point, -8, 7), {**where, "dtype": torch.int16})
    q = quantize(x, scale, zero_point, -8, 7, **where)
    torch.library.opcheck(torch.ops.qsim.dequantize, (q, scale, zero_point), {**where, "dtype": x.dtype})


def test_compiles_in_one_graph_with_dynamic_shapes():
    scale, zero_point = torch.tensor(0.1), torch.tensor(2, dtype=torch.int32)

    def roundtrip(x):
        return dequantize(quantize(x, scale, zero_point, -8, 7), scale, zero_point)

    compiled = torch.compile(roundtrip, fullgraph=True, dynamic=True)
    for shape in ((4, 6), (3, 5)):
        x = torch.randn(shape)
        assert torch.equal(compiled(x), fake_quantize(x, scale, zero_point, -8, 7))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@given(calls())
def test_cuda_equals_the_cpu(call):
    args, options = call
    where = {"axis": options["axis"], "block_size": options["block_size"]}
    q = quantize(*args, **options)
    moved = [t.cuda() for t in args[:3]]
    on_device = quantize(*moved, *args[3:], **options)
    same_integers(on_device.cpu(), q)
    y = dequantize(q, *args[1:3], **where, dtype=args[0].dtype)
    same_bits(dequantize(on_device, *moved[1:], **where, dtype=args[0].dtype).cpu(), y)
