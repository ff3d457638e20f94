"""What a backward pass costs in memory, and that its sums are the same bits everywhere."""

import pytest
import torch
from levels import LEVELS, assert_same_output

from qsim import reference
from qsim.ops import fake_quantize, fake_quantize_

SCALE, ZERO_POINT = torch.tensor(0.1), torch.tensor(0, dtype=torch.int32)


def saved(run):
    """The tensors that autograd keeps for `run`, by pointer and size of what they view."""
    found = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append((t.data_ptr(), t.nbytes)) or t, lambda t: t):
        run()
    return found


class TestSavedForBackward:
    def test_a_weight_costs_nothing(self):
        weight = torch.nn.Parameter(torch.randn(64, 125))
        scale, zero_point = torch.full((64,), 0.1), torch.zeros(64, dtype=torch.int32)
        kept = {t.data_ptr() for t in (weight, scale, zero_point)}  # alive anyway
        assert {pointer for pointer, _ in saved(lambda: fake_quantize(weight, scale, zero_point, -8, 7, axis=0))} <= kept

    @pytest.mark.parametrize("shape", [(8000,), (8001,), (3, 5, 7), ()])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("operator", [fake_quantize, fake_quantize_])
    def test_an_activation_costs_one_bit_per_element(self, shape, dtype, operator):
        leaf = torch.randn(shape, dtype=dtype, requires_grad=True)
        activation = leaf * 1
        assert [size for _, size in saved(lambda: operator(activation, SCALE, ZERO_POINT, -8, 7))] == [(leaf.numel() + 7) // 8]

    def test_a_learned_scale_keeps_x_itself(self):
        activation, scale = torch.randn(8000, requires_grad=True) * 1, torch.tensor(0.1, requires_grad=True)
        pointers = [pointer for pointer, _ in saved(lambda: fake_quantize(activation, scale, ZERO_POINT, -8, 7))]
        assert sorted(pointers) == sorted(t.data_ptr() for t in (activation, scale, ZERO_POINT))


def peak_bytes(run):
    """Largest sum of what torch allocated and `run` had not yet freed."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = run()
    held = peak = 0
    for event in sorted((e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    del result
    return peak


class TestPeakMemory:
    @pytest.mark.parametrize("learned", [False, True])
    @pytest.mark.parametrize("channels_last", [False, True])
    @pytest.mark.parametrize(("axis", "block_size"), [(None, None), (0, None), (1, None), (1, 32)])
    def test_of_learned_gradients_is_little_more_than_dx(self, axis, block_size, channels_last, learned):
        x = torch.randn(16, 64, 24, 24)
        x = x.contiguous(memory_format=torch.channels_last) if channels_last else x
        shape = [] if axis is None else [x.shape[axis]] if block_size is None else [16, 2, 24, 24]
        zero_point = torch.zeros(shape, dtype=torch.float32 if learned else torch.int32)
        scale, grad = torch.full(shape, 0.1), torch.randn_like(x)
        learn = torch.ops.qsim.fake_quantize_learnable_backward
        peak = peak_bytes(lambda: learn(grad, x, scale, zero_point, -8, 7, axis=axis, block_size=block_size))
        parameters = 4 * scale.nbytes if block_size else 0  # their gradients, and both in memory order
        assert x.nbytes <= peak <= x.nbytes * 1.05 + parameters

    def test_is_measured(self):
        assert peak_bytes(lambda: torch.ones(1000) + torch.ones(1000)) >= 8000


SUMS = """
import qsim, torch
torch.manual_seed(0)
learn = torch.ops.qsim.fake_quantize_learnable_backward
cases = [((70001,), None, None), ((64, 3, 3, 3), 0, None), ((40, 9), 0, None), ((4, 20, 7, 7), 1, None)]
cases += [((50, 300), 1, None), ((50, 300), 1, 32), ((300, 50), 0, 32), ((9, 5), 1, 3), ((3001, 3), 1, None)]
for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for shape, axis, block in cases:
        for magnitude in (1.0, 1e-37, 1e-42):
            x, grad = (torch.randn(shape) * 4 * magnitude).to(dtype), torch.randn(shape).to(dtype)
            x.view(-1)[::501] = float("nan")
            sizes = [] if axis is None else [shape[axis]] if block is None else list(shape)
            if block:
                sizes[axis] = -(-shape[axis] // block)
            scale, zero_point = torch.rand(sizes, dtype=wide) + 0.1, torch.randn(sizes, dtype=wide) * 3
            for result in learn(grad, x, scale, zero_point, -8, 7, axis=axis, block_size=block):
                print(hash(tuple(result.double().nan_to_num(12345.0).reshape(-1).tolist())))
"""


@pytest.mark.parametrize("level", LEVELS[1:])
def test_sums_do_not_depend_on_the_level(level):
    assert_same_output(level, SUMS)


@pytest.mark.parametrize("scale", [1e-29, 0.1, 3.0, 2.0**-120, 2.0**30])
@pytest.mark.parametrize("magnitude", [1e-44, 1e-38, 1e-31, 1e-3, 1.0, 1e30])
def test_a_single_term_is_exact(scale, magnitude):
    """Quotients of any size are rounded as true division rounds them: with one element there is nothing but its term."""
    x = torch.randn(300, generator=torch.Generator().manual_seed(1)) * magnitude
    args = (torch.full((300,), scale), torch.zeros(300), -8, 7)
    for layout, axis in ((x, 0), (x.repeat(2, 1), 1), (x.repeat(40, 1), 1)):
        grad = torch.zeros_like(layout)
        grad.view(-1)[:300] = 1.0
        _, dscale, dzero_point = torch.ops.qsim.fake_quantize_learnable_backward(grad, layout, *args, axis=axis)
        _, expected, expected_zero_point = reference.fake_quantize_backward(grad, layout, *args, axis=axis)
        assert torch.equal(dscale, expected.float())
        assert torch.equal(dzero_point, expected_zero_point.float())
