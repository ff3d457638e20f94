import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from levels import LEVELS, assert_same_output
from test_observe import DTYPES, bits, range_shape, sample

import qsim

ON, OFF = torch.tensor(True), torch.tensor(False)


def state(shape=()):
    range_ = [torch.full(shape, torch.inf), torch.full(shape, -torch.inf), torch.zeros(4, dtype=torch.int64)]
    return [*range_, torch.full(shape, torch.nan), torch.zeros(shape, dtype=torch.int32)]


def assert_same(got, expected):
    for a, b in zip(bits(got), bits(expected), strict=True):
        assert torch.equal(a, b)


def run(function, x, held, observing=ON, quantizing=ON, quant_min=-128, quant_max=127, **options):
    return function(x, observing, quantizing, *held, quant_min, quant_max, **options)


def assert_same_values(got, expected):
    assert got.dtype == expected.dtype
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.nan_to_num(0.0), expected.nan_to_num(0.0))


@given(
    st.one_of(st.lists(st.integers(0, 30), min_size=1, max_size=2), st.lists(st.integers(0, 9), min_size=3, max_size=4)),
    st.sampled_from(DTYPES),
    st.integers(0, 1000),
    st.sampled_from([0.0, 0.05, 0.95]),
    st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    st.sampled_from([(-128, 127), (0, 255), (-8, 7), (-2, 1)]),
    st.randoms(use_true_random=False),
)
def test_batches_match_reference(shape, dtype, seed, specials, averaging, grid, random):
    order = random.sample(range(len(shape)), len(shape))
    first = sample(shape, dtype, seed, specials).permute(*order)
    axis = random.choice([None, *range(-first.dim(), first.dim())])
    block = random.choice([None, 1, 3, 16]) if axis is not None else None
    options = {"axis": axis, "block_size": block, "symmetric": random.random() < 0.5, "averaging": averaging}
    options["rounding"] = random.choice(["divide", "reciprocal"])
    got, expected = state(range_shape(first, axis, block)), state(range_shape(first, axis, block))
    for step in range(4):
        x = sample(shape, dtype, seed + step, specials).permute(*order)
        switches = [torch.tensor(random.random() < 0.7) for _ in range(2)]
        ours = run(qsim.ops.observe_fake_quantize, x, got, *switches, *grid, **options)
        twin = run(qsim.reference.observe_fake_quantize, x, expected, *switches, *grid, **options)
        assert_same(got, expected)
        assert_same_values(ours, twin)


def test_the_range_is_the_moving_average_of_float64():
    held, lowest, highest = state(), None, None
    for step in range(20):
        x = torch.randn(50) * (step + 1)
        run(qsim.ops.observe_fake_quantize, x, held, averaging=0.2)
        ends = x.min().double(), x.max().double()
        lowest, highest = ends if step == 0 else (0.8 * lowest + 0.2 * ends[0], 0.8 * highest + 0.2 * ends[1])
        torch.testing.assert_close(torch.stack(held[:2]).double(), torch.stack([lowest, highest]), rtol=1e-5, atol=0)


def test_what_is_not_finite_never_moves_a_range():
    held = state((3,))
    x = torch.tensor([[-1.0, 2.0], [torch.nan, torch.inf], [-torch.inf, 4.0]])
    run(qsim.ops.observe_fake_quantize, x, held, axis=0)
    assert held[0].tolist() == [-1, torch.inf, 4]
    assert held[1].tolist() == [2, -torch.inf, 4]
    assert held[3].isnan().tolist() == [False, True, False]
    before = [tensor.clone() for tensor in held]
    run(qsim.ops.observe_fake_quantize, torch.full((3, 2), torch.nan), held, axis=0)
    run(qsim.ops.observe_fake_quantize, torch.ones(3, 0), held, axis=0)
    assert held[2].tolist() == [12, 7, 1, 1]
    assert_same([*held[:2], *held[3:]], [*before[:2], *before[3:]])


def test_a_range_at_rest_stays_and_the_widest_is_legal():
    for ends in [(-0.3, 0.7), (-3.4028234e38, 3.4028234e38), (0.0, 1e-45), (-0.0, 0.0)]:
        held = state()
        for averaging in [0.5, 0.01, 0.3, 1.0]:
            y = run(qsim.ops.observe_fake_quantize, torch.tensor(ends), held, averaging=averaging)
            assert (held[0].item(), held[1].item()) == tuple(torch.tensor(ends).tolist())
            assert y.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("switched", [ON, torch.tensor([1], dtype=torch.uint8)])
def test_gradient(dtype, switched):
    held = state()
    for x in [torch.randn(1003).to(dtype), torch.randn(17, 59).t().to(dtype)]:
        leaf = (2 * x).requires_grad_()
        y = run(qsim.ops.observe_fake_quantize, leaf * 1, held, switched, switched, -8, 7, averaging=0.5)
        grad = torch.randn_like(y)
        y.backward(grad)
        scale = held[3].to(torch.float64 if dtype == torch.float64 else torch.float32)
        expected, _, _ = qsim.reference.fake_quantize_backward(grad, leaf.detach(), scale, held[4], -8, 7)
        assert torch.equal(leaf.grad, expected)


@pytest.mark.parametrize("n", [0, 5, 8, 1003])
def test_all_of_the_gradient_passes_when_not_quantizing(n):
    x = sample((n,), torch.float32, 0, specials=0.5).requires_grad_()
    y = run(qsim.ops.observe_fake_quantize, x, state(), ON, OFF)
    assert_same_values(y.detach(), x.detach())
    y.backward(torch.ones(n))
    assert torch.equal(x.grad, torch.ones(n))


def test_one_bit_an_element_is_saved_and_later_batches_do_not_disturb():
    saved = []
    held, x = state(), torch.randn(1000, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.nbytes) or t, lambda t: t):
        y = run(qsim.ops.observe_fake_quantize, x, held)
    assert saved == [125]
    run(qsim.ops.observe_fake_quantize, 9 * x, held)
    y.sum().backward()
    assert x.grad.sum() > 990


SAMPLES = [torch.randn(10), torch.randn(0), torch.randn(3, 3, dtype=torch.bfloat16), torch.randn(4, requires_grad=True)]


@pytest.mark.parametrize("x", SAMPLES)
@pytest.mark.parametrize("axis", [None, -1])
def test_opcheck(x, axis):
    held = state(range_shape(x, axis, None))
    for name in ["observe_fake_quantize", "observe_fake_quantize_with_mask"]:
        arguments = (x.detach() if name.endswith("mask") else x, ON, ON, *held, -8, 7)
        torch.library.opcheck(getattr(torch.ops.qsim, name).default, arguments, {"axis": axis})


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("learning", [False, True])
def test_versions_are_bumped_once(mode, learning):
    held, x = state(), torch.randn(3, requires_grad=learning)
    before = [tensor._version for tensor in held]
    with mode():
        run(qsim.ops.observe_fake_quantize, x, held)
    assert [tensor._version for tensor in held] == [version + 1 for version in before]


_DIGEST = """
import hashlib, torch, qsim
torch.manual_seed(0)
digest, on = hashlib.sha256(), torch.tensor(True)
for dtype in [torch.float32, torch.float16, torch.bfloat16, torch.float64]:
    for axis, shape in [(None, ()), (0, (3,)), (1, (50,)), (3, (7,))]:
        state = [torch.full(shape, torch.inf), torch.full(shape, -torch.inf), torch.zeros(4, dtype=torch.int64)]
        state += [torch.full(shape, torch.nan), torch.zeros(shape, dtype=torch.int32)]
        for _ in range(3):
            x = torch.randn(3, 50, 21, 7, dtype=torch.float64).to(dtype)
            y = qsim.ops.observe_fake_quantize(x, on, on, *state, -128, 127, averaging=0.1, axis=axis)
            for tensor in [*state, y]:
                digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
print(digest.hexdigest())
"""


@pytest.mark.parametrize("level", LEVELS[1:])
def test_every_level_gives_the_same_bits(level):
    assert_same_output(level, _DIGEST)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(3, dtype=torch.int32)}, "expected float32, float16"),
        ({"observing": torch.ones(1)}, "observing is Float; expected bool or uint8"),
        ({"quantizing": torch.ones(2, dtype=torch.bool)}, r"quantizing has shape \[2\] on cpu; expected one element"),
        ({"lowest": torch.zeros(2)}, r"lowest has shape \[2\]; expected \[\]"),
        ({"scale": torch.zeros((), dtype=torch.float64)}, "scale is Double; expected Float"),
        ({"zero_point": torch.zeros(())}, "zero_point is Float; expected Int"),
        ({"averaging": 1.5}, r"averaging is 1.5; expected 0 .. 1"),
        ({"averaging": torch.nan}, r"averaging is nan; expected 0 .. 1"),
        ({"min_scale": -1.0}, r"min_scale is -1; expected 0 or more"),
        ({"quant_min": 9}, "quant_min 9 and quant_max 7"),
        ({"rounding": "up"}, "rounding is 'up'"),
        ({"block_size": 2}, "without axis"),
    ],
)
def test_errors_say_what_was_expected(change, message):
    names = ["lowest", "highest", "counts", "scale", "zero_point"]
    arguments = {"x": torch.ones(3), "observing": ON, "quantizing": ON, **dict(zip(names, state(), strict=True))}
    with pytest.raises((ValueError, TypeError), match=message):
        qsim.ops.observe_fake_quantize(**{**arguments, "quant_min": -8, "quant_max": 7, **change})
