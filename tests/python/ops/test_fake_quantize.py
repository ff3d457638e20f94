import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import qsim
from qsim import reference
from qsim.ops import fake_quantize, fake_quantize_

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
GRIDS = [(-128, 127), (0, 255), (-8, 7), (0, 3), (-1, 0), (-32768, 32767), (0, 65535), (-(2**23), 2**23)]
LAYOUTS = ["contiguous", "channels_last", "strided", "expanded"]
SPECIALS = [0.0, -0.0, 0.25, -0.25, 0.75, 1e-45, -1e-40, 3e38, -3e38, float("inf"), float("-inf"), float("nan")]


def same_bits(a, b):
    """Equal values, NaN where the other is NaN, and equal signs of zeros."""
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(a.signbit() & ~a.isnan(), b.signbit() & ~b.isnan())


def elements(shape, dtype, layout="contiguous", seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * 4
    for i, special in enumerate(SPECIALS):
        x.view(-1)[i::37] = special
    x = x.to(dtype)
    if layout == "channels_last" and x.dim() > 1:
        return x.movedim(1, -1).contiguous().movedim(-1, 1)
    if layout == "strided":
        return torch.stack([x, x], -1)[..., 0]
    if layout == "expanded" and x.dim():
        return x[:1].expand(shape)
    return x


def parameters(x, axis=None, block_size=None, learned=False, seed=1, grid=(-8, 7)):
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    shape = list(x.shape) if block_size else [] if axis is None else [x.shape[axis]]
    if block_size:
        shape[axis] = -(-shape[axis] // block_size)
    scale = torch.rand(shape, generator=generator, dtype=dtype) * 0.5 + 0.01
    scale.view(-1)[::2] = 0.5  # powers of two give exact ties
    low, high = grid
    zero_point = torch.randint(max(low, -9), min(high, 9) + 1, shape, generator=generator, dtype=torch.int32)
    return scale, zero_point.to(dtype) + 0.3 if learned else zero_point


@st.composite
def calls(draw, max_dim=4):
    shape = draw(st.lists(st.integers(0, 40), min_size=0, max_size=max_dim).filter(lambda s: torch.Size(s).numel() < 40000))
    x = elements(shape, draw(st.sampled_from(DTYPES)), draw(st.sampled_from(LAYOUTS)), draw(st.integers(0, 99)))
    axis = draw(st.none() | st.integers(-x.dim(), x.dim() - 1)) if x.dim() else None
    block_size = draw(st.none() | st.integers(1, 50)) if axis is not None else None
    grid = draw(st.sampled_from(GRIDS))
    scale, zero_point = parameters(x, axis, block_size, draw(st.booleans()), draw(st.integers(0, 99)), grid)
    options = {"axis": axis, "block_size": block_size, "rounding": draw(st.sampled_from(["divide", "reciprocal"]))}
    return (x, scale, zero_point, *grid), options


@given(calls())
def test_every_forward_matches_the_reference(call):
    args, options = call
    x = args[0]
    expected = reference.fake_quantize(*args, **options)
    y = fake_quantize(*args, **options)
    same_bits(y, expected)
    assert y.stride() == torch.empty_like(x).stride()
    assert not (y == 0).logical_and(y.signbit()).any()
    same_bits(torch.ops.qsim.fake_quantize_with_mask(*args, **options)[0], expected)
    for out in (torch.empty_like(x), torch.empty((*x.shape, 2), dtype=x.dtype)[..., 1], torch.empty_like(expected)):
        assert fake_quantize(*args, **options, out=out) is out
        same_bits(out, expected)
    in_place = x.clone()
    assert fake_quantize_(in_place, *args[1:], **options) is in_place
    same_bits(in_place, expected)


@given(calls(), st.floats(0.1, 2))
def test_every_backward_matches_the_reference(call, grad_factor):
    args, options = call
    x = args[0]
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(7)).to(x.dtype)
    dx, dscale, dzero_point = reference.fake_quantize_backward(grad, *args, **options, grad_factor=grad_factor)
    same_bits(torch.ops.qsim.fake_quantize_backward(grad, *args, **options), dx)
    y, mask = torch.ops.qsim.fake_quantize_with_mask(*args, **options)
    same_bits(torch.ops.qsim.fake_quantize_mask_backward(grad, mask, strides=y.stride()), dx)
    learned = torch.ops.qsim.fake_quantize_learnable_backward(grad, *args, **options, grad_factor=grad_factor)
    same_bits(learned[0], dx)
    tolerance = {"rtol": 1e-4, "atol": 1e-3 * (args[4] - args[3]) / 15}
    torch.testing.assert_close(learned[1].double(), dscale, **tolerance)
    torch.testing.assert_close(learned[2].double(), dzero_point, **tolerance)


@pytest.mark.parametrize("shape", [(7, 64, 33, 31), (70001,), (3, 40000), (300, 513), (5000, 3), (64, 3, 7, 7)])
@pytest.mark.parametrize(("axis", "block_size"), [(None, None), (0, None), (1, None), (-1, 32), (0, 32)])
def test_nothing_depends_on_the_number_of_threads(shape, axis, block_size):
    axis = None if len(shape) == 1 and axis == 1 else axis
    x = elements(shape, torch.float32)
    args = (x, *parameters(x, axis, block_size), -8, 7)
    grad = torch.randn(shape)
    options = {"axis": axis, "block_size": block_size}
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(
            (
                fake_quantize(*args, **options),
                *torch.ops.qsim.fake_quantize_with_mask(*args, **options),
                *torch.ops.qsim.fake_quantize_learnable_backward(grad, *args, **options),
            )
        )
    for result in results[1:]:
        for got, first in zip(result, results[0], strict=True):
            torch.testing.assert_close(got, first, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("shape", "axis", "block_size"), [((40, 3200), 1, 32), ((21, 3200), 1, 100), ((600, 60), 0, None), ((20000, 3), 1, None)]
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tiny", [False, True])
def test_many_grids_prepared_in_turn_or_repeated(shape, axis, block_size, dtype, tiny):
    x = elements(shape, dtype)
    scale, zero_point = parameters(x, axis, block_size)
    if tiny:  # too small for the kernels' short cuts, among others that are not
        scale.view(-1)[1] = 1e-38
    options = {"axis": axis, "block_size": block_size}
    expected = reference.fake_quantize(x, scale, zero_point, -8, 7, **options)
    same_bits(fake_quantize(x, scale, zero_point, -8, 7, **options), expected)
    same_bits(fake_quantize_(x.clone(), scale, zero_point, -8, 7, **options), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@given(calls())
def test_cuda_equals_the_cpu(call):
    args, options = call
    grad = torch.randn(args[0].shape, generator=torch.Generator().manual_seed(7)).to(args[0].dtype)
    results = []
    for device in ("cpu", "cuda"):
        x, scale, zero_point, g = (t.to(device) for t in (*args[:3], grad))
        moved = (x, scale, zero_point, *args[3:])
        y, mask = torch.ops.qsim.fake_quantize_with_mask(*moved, **options)
        learned = torch.ops.qsim.fake_quantize_learnable_backward(g, *moved, **options)
        again = torch.ops.qsim.fake_quantize_learnable_backward(g, *moved, **options)
        torch.testing.assert_close(again, learned, rtol=0, atol=0, equal_nan=True)
        results.append(
            (
                [
                    fake_quantize(*moved, **options),
                    fake_quantize_(x.clone(), *moved[1:], **options),
                    y,
                    torch.ops.qsim.fake_quantize_mask_backward(g, mask, strides=y.stride()),
                    torch.ops.qsim.fake_quantize_backward(g, *moved, **options),
                    learned[0],
                ],
                learned[1:],
            )
        )
    (exact, sums), (cuda_exact, cuda_sums) = results
    for got, expected in zip(cuda_exact, exact, strict=True):
        same_bits(got.cpu(), expected)
    for got, expected in zip(cuda_sums, sums, strict=True):
        torch.testing.assert_close(got.cpu(), expected, rtol=1e-4, atol=1e-3 * (args[4] - args[3]) / 15)


def test_large_sums_keep_float64_accuracy():
    x = torch.randn(2_000_003) * 2
    grad = torch.randn_like(x)
    args = (x, torch.tensor(0.1), torch.tensor(3.0), -8, 7)
    _, dscale, dzero_point = reference.fake_quantize_backward(grad, *args)
    _, got_scale, got_zero_point = torch.ops.qsim.fake_quantize_learnable_backward(grad, *args)
    torch.testing.assert_close(got_scale.double(), dscale, rtol=1e-6, atol=1e-3)
    torch.testing.assert_close(got_zero_point.double(), dzero_point, rtol=1e-6, atol=1e-3)


def test_nan_elements_have_no_say_in_a_scale_but_nan_gradients_are_not_hidden():
    x = torch.tensor([float("nan"), 0.3, 100.0])
    args = (x, torch.tensor(0.5), torch.tensor(0.0), -8, 7)
    dx, dscale, dzero_point = torch.ops.qsim.fake_quantize_learnable_backward(torch.tensor([float("inf"), 1.0, 1.0]), *args)
    assert dx.tolist() == [0.0, 1.0, 0.0]
    torch.testing.assert_close(dscale, torch.tensor(7 + 1 - 0.6))
    torch.testing.assert_close(dzero_point, torch.tensor(-0.5))
    assert torch.ops.qsim.fake_quantize_learnable_backward(torch.tensor([1.0, float("nan"), 1.0]), *args)[1].isnan()


def test_scale_and_zero_point_of_nan_are_not_hidden():
    x, nan = torch.ones(5), torch.tensor(float("nan"))
    assert fake_quantize(x, nan, torch.tensor(0, dtype=torch.int32), -8, 7).isnan().all()
    assert fake_quantize(x, torch.tensor(0.5), nan, -8, 7).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("axis", "block_size"), [(None, None), (1, None), (1, 4)])
@pytest.mark.parametrize("learned", [False, True])
def test_gradients_reach_x_scale_and_zero_point(dtype, axis, block_size, learned):
    x = elements((6, 9), dtype).requires_grad_()
    scale, zero_point = parameters(x, axis, block_size, learned)
    scale.requires_grad_()
    zero_point.requires_grad_(learned)
    grad = torch.randn(x.shape).to(dtype)
    fake_quantize(x, scale, zero_point, -8, 7, axis=axis, block_size=block_size, grad_factor=0.5).backward(grad)
    with torch.no_grad():
        expected = reference.fake_quantize_backward(grad, x, scale, zero_point, -8, 7, axis=axis, block_size=block_size, grad_factor=0.5)
    same_bits(x.grad, expected[0])
    torch.testing.assert_close(scale.grad, expected[1].to(scale.dtype), rtol=1e-4, atol=1e-4)
    if learned:
        torch.testing.assert_close(zero_point.grad, expected[2].to(scale.dtype), rtol=1e-4, atol=1e-4)


def saved_bytes(run):
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.nbytes) or t, lambda t: t):
        run()
    return sorted(sizes)


def test_what_is_saved_for_backward():
    weight = torch.randn(8000, requires_grad=True)
    activation = weight * 1.0
    scale, zero_point = torch.tensor(0.1), torch.tensor(0, dtype=torch.int32)
    assert saved_bytes(lambda: fake_quantize(activation, scale, zero_point, -8, 7)) == [1000]
    assert saved_bytes(lambda: fake_quantize_(weight * 1.0, scale, zero_point, -8, 7)) == [1000]
    assert saved_bytes(lambda: fake_quantize(weight, scale, zero_point, -8, 7)) == [4, 4, weight.nbytes]  # lives anyway
    assert saved_bytes(lambda: fake_quantize(weight.detach(), scale, zero_point, -8, 7)) == []
    with torch.no_grad():
        assert saved_bytes(lambda: fake_quantize(weight, scale, zero_point, -8, 7)) == []


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "strided"])
def test_gradient_of_an_activation_in_any_layout(layout):
    leaf = elements((3, 5, 4, 6), torch.float32, layout).requires_grad_()
    grad = torch.randn(3, 6, 5, 4).permute(0, 2, 3, 1)
    args = (*parameters(leaf, 1), -8, 7)
    fake_quantize(leaf * 1, *args, axis=1).backward(grad)
    expected = reference.fake_quantize_backward(grad, leaf.detach(), *args, axis=1)[0]
    same_bits(leaf.grad, expected)
    leaf.grad = None
    fake_quantize_(leaf * 1, *args, axis=1).backward(grad.sum().expand(3, 5, 4, 6))
    same_bits(leaf.grad.sign().abs(), (expected != 0).float())


class TestInPlace:
    scale, zero_point = torch.tensor(0.5), torch.tensor(0, dtype=torch.int32)

    def test_bumps_the_version(self):
        x, out = torch.randn(5), torch.empty(5)
        fake_quantize_(x, self.scale, self.zero_point, -8, 7)
        fake_quantize(x, self.scale, self.zero_point, -8, 7, out=out)
        assert (x._version, out._version) == (1, 1)
        with torch.inference_mode():
            fake_quantize_(x, self.scale, self.zero_point, -8, 7)
        assert x._version == 2

    def test_what_another_operation_saved_is_protected(self):
        x = torch.randn(5, requires_grad=True) * 1.0
        y = x.exp()
        fake_quantize_(y, self.scale, self.zero_point, -8, 7)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()

    def test_of_a_leaf_is_an_error(self):
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
            fake_quantize_(torch.randn(5, requires_grad=True), self.scale, self.zero_point, -8, 7)

    def test_of_a_view_reaches_the_base(self):
        leaf = torch.tensor([[0.3, 9.0], [0.4, -9.0]], requires_grad=True)
        base = leaf * 1.0
        fake_quantize_(base[:, 1], self.scale, self.zero_point, -8, 7)
        base.sum().backward()
        assert leaf.grad.tolist() == [[1.0, 0.0], [1.0, 0.0]]

    def test_learned_scale(self):
        leaf, scale = torch.randn(50, requires_grad=True), torch.tensor(0.1, requires_grad=True)
        y = leaf * 1.0
        fake_quantize_(y, scale, self.zero_point, -8, 7)
        y.sum().backward()
        expected = reference.fake_quantize_backward(torch.ones(50), leaf.detach(), scale.detach(), self.zero_point, -8, 7)
        same_bits(leaf.grad, expected[0])
        torch.testing.assert_close(scale.grad.double(), expected[1], rtol=1e-5, atol=1e-5)


def test_gradcheck():
    # A staircase is straight when the step of the finite difference is the scale (binary, so that it is exact).
    scale, zero_point = torch.tensor(0.25, dtype=torch.float64), torch.tensor(1, dtype=torch.int32)
    x = (torch.rand(20, dtype=torch.float64) * 2 - 1).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: fake_quantize(x, scale, zero_point, -8, 7), x, eps=0.25)
    assert torch.autograd.gradcheck(lambda x: fake_quantize(x * 1, scale, zero_point, -8, 7), x, eps=0.25)
    grad = torch.randn(20, dtype=torch.float64, requires_grad=True)
    mask = torch.ops.qsim.fake_quantize_with_mask(x.detach() * 3, scale, zero_point, -8, 7)[1]
    check = torch.autograd.gradcheck
    assert check(lambda g: torch.ops.qsim.fake_quantize_mask_backward(g, mask), grad)
    assert check(lambda g: torch.ops.qsim.fake_quantize_backward(g, x.detach() * 3, scale, zero_point, -8, 7), grad)


def test_double_backward_is_linear_in_the_gradient():
    x, grad = torch.tensor([0.3, 9.0], requires_grad=True), torch.ones(2, requires_grad=True)
    for activation in (x, x * 1):
        y = fake_quantize(activation, torch.tensor(0.5), torch.tensor(0, dtype=torch.int32), -8, 7)
        (dx,) = torch.autograd.grad(y, x, grad, create_graph=True)
        assert torch.autograd.grad(dx.sum(), grad)[0].tolist() == [1.0, 0.0]


def test_forward_mode_and_out_say_that_they_have_no_gradient():
    x, scale, zero_point = torch.randn(3, requires_grad=True), torch.tensor(0.5), torch.tensor(0, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="out= has no gradient"):
        fake_quantize(x, scale, zero_point, -8, 7, out=torch.empty(3))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match=r"jvp|forward"):
        fake_quantize(torch.autograd.forward_ad.make_dual(torch.randn(3), torch.ones(3)), scale, zero_point, -8, 7)


@pytest.mark.parametrize(
    ("x", "axis", "block_size"),
    [(torch.randn(4, 6), None, None), (torch.randn(4, 6, 2), 1, None), (torch.randn(4, 6, dtype=torch.bfloat16), 1, 4)],
)
def test_opcheck(x, axis, block_size):
    options = {"axis": axis, "block_size": block_size}
    args = (*parameters(x, axis, block_size), -8, 7)
    ops, grad = torch.ops.qsim, torch.randn_like(x)
    check = torch.library.opcheck
    check(ops.fake_quantize.default, (x, *args), options)
    check(ops.fake_quantize.default, (x.clone().requires_grad_(), *args), options)
    learned = args[0].clone().requires_grad_()
    check(ops.fake_quantize.default, (x.clone().requires_grad_(), learned, *args[1:]), options)
    check(ops.fake_quantize_with_mask.default, (x, *args), options)
    check(ops.fake_quantize_with_mask_.default, (x.clone(), *args), options)
    check(ops.fake_quantize_mask_backward.default, (grad, ops.fake_quantize_with_mask(x, *args, **options)[1]), {"strides": x.stride()})
    check(ops.fake_quantize_backward.default, (grad, x, *args), options)
    check(ops.fake_quantize_learnable_backward.default, (grad, x, *args), options)
    check(ops.fake_quantize_.default, (x.clone(), *args), options)
    check(ops.fake_quantize.out, (x, *args), {**options, "out": torch.empty_like(x)})


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles_as_one_graph(backend):
    scale, zero_point = torch.tensor([0.1, 0.2, 0.3], requires_grad=True), torch.zeros(3, dtype=torch.int32)

    def model(x, weight):
        y = fake_quantize(x @ fake_quantize(weight, scale[0].detach(), zero_point[0], -8, 7), scale, zero_point, 0, 15, axis=1)
        y = fake_quantize_(y * 2, scale[0].detach(), zero_point[0], -8, 7)
        return fake_quantize(y * 2, scale[1].detach(), zero_point[0], -8, 7).relu()

    results = []
    for run in (model, torch.compile(model, fullgraph=True, backend=backend, dynamic=True)):
        for batch in (5, 9):
            x, weight = (torch.randn(s, generator=torch.Generator().manual_seed(0)).requires_grad_() for s in ((batch, 4), (4, 3)))
            with torch.no_grad():
                evaluated = run(x, weight)
            y = run(x, weight)
            results.append((evaluated, y.detach(), *torch.autograd.grad(y.square().sum(), (x, weight, scale))))
    for got, expected in zip(results[2:], results[:2], strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_inference_mode():
    with torch.inference_mode():
        x = torch.randn(5)
        y = fake_quantize(x, torch.tensor(0.5), torch.tensor(0, dtype=torch.int32), -8, 7)
        assert fake_quantize_(x, torch.tensor(0.5), torch.tensor(0, dtype=torch.int32), -8, 7) is x
    assert torch.equal(x, y)


INT = torch.int32


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.zeros(4, 6, dtype=INT)}, TypeError, "expected float16"),
        ({"scale": torch.ones(6, dtype=torch.float64)}, TypeError, "scale is Double; expected Float"),
        ({"zero_point": torch.zeros(6, dtype=torch.int64)}, TypeError, "zero_point is Long; expected Int"),
        ({"scale": torch.ones(6, device="meta")}, ValueError, "expected one device"),
        ({"scale": torch.ones(5), "zero_point": torch.zeros(5, dtype=INT)}, ValueError, r"expected \[6\], one per channel of axis 1"),
        ({"zero_point": torch.zeros(5, dtype=INT)}, ValueError, "zero_point .5.; expected the same shape"),
        ({"axis": None}, ValueError, "expected one element, or give axis"),
        ({"axis": 2}, IndexError, r"axis 2 of x with 2 dimensions; expected -2 \.\. 1"),
        ({"axis": None, "block_size": 3}, ValueError, "without an axis"),
        ({"block_size": 0}, ValueError, "expected at least 1"),
        ({"block_size": 4}, ValueError, r"with ceil\(6 / 4\) along axis 1"),
        ({"quant_min": 7}, ValueError, "quant_min < quant_max"),
        ({"quant_max": 2**31}, ValueError, "no int32 grid"),
        ({"quant_max": 2**24}, ValueError, "not exact in the float32 arithmetic"),
        ({"rounding": "up"}, ValueError, "rounding is 'up'"),
        ({"out": torch.empty(3)}, ValueError, r"expected Float of shape \[4, 6\]"),
    ],
)
def test_errors_say_what_was_expected(change, error, message):
    call = {"x": torch.zeros(4, 6), "scale": torch.ones(6), "zero_point": torch.zeros(6, dtype=INT)}
    call |= {"quant_min": -8, "quant_max": 7, "axis": 1, "block_size": None, "rounding": "divide", "out": None} | change
    with pytest.raises(error, match=message):
        qsim.ops.fake_quantize(**call)


def test_int32_grids_need_float64():
    x = torch.tensor([2.0**31, -(2.0**40), 12345678.4], dtype=torch.float64)
    args = (torch.tensor(1.0, dtype=torch.float64), torch.tensor(5, dtype=INT), -(2**31), 2**31 - 1)
    assert fake_quantize(x, *args).tolist() == [2.0**31 - 1 - 5, -(2.0**31) - 5, 12345678.0]
