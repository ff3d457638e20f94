"""What operators do with tensors that are not what they expect: an error that says so, or the right answer."""

import math

import pytest
import torch
from operator_fuzz.scene import operators

import qsim

OPS = torch.ops.qsim
SCALE, ZERO_POINT = torch.tensor(0.5), torch.tensor(0, dtype=torch.int32)
GRID = (SCALE, ZERO_POINT, -8, 7)


def state(sizes=(), sketch=False):
    held = [torch.full(sizes, math.inf), torch.full(sizes, -math.inf), torch.zeros(4, dtype=torch.int64)]
    return held + [torch.zeros(16384, dtype=torch.int64), torch.zeros((), dtype=torch.int32)] * sketch


class TestMaskBackward:
    """A gradient of another element size, or strides of no dense tensor, read and wrote outside of their memory."""

    @pytest.mark.parametrize(
        "dtype", [torch.uint8, torch.bool, torch.float8_e4m3fn, torch.int16, torch.int64, torch.complex64, torch.complex128]
    )
    def test_gradients_are_floats(self, dtype):
        with pytest.raises(TypeError, match=r"grad is .* of shape \[64\] on cpu; expected float16"):
            OPS.fake_quantize_mask_backward(torch.zeros(64).to(dtype), torch.zeros(8, dtype=torch.uint8))

    @pytest.mark.parametrize("strides", [[0, 0], [0, 1], [16, 2], [1, 1], [8], [8, 1, 1], [-8, 1], [2**62, 1]])
    def test_strides_are_those_of_a_dense_tensor(self, strides):
        with pytest.raises(ValueError, match=r"expected those of a dense tensor of shape \[4, 8\]"):
            OPS.fake_quantize_mask_backward(torch.zeros(4, 8), torch.zeros(4, dtype=torch.uint8), strides=strides)

    def test_not_even_those_of_the_gradient(self):
        with pytest.raises(ValueError, match="expected those of a dense tensor"):
            OPS.fake_quantize_mask_backward(torch.zeros(4, 16)[:, ::2], torch.zeros(4, dtype=torch.uint8), strides=[16, 2])

    def test_expanded_gradients(self):
        x = torch.randn(4, 8)
        y, mask = OPS.fake_quantize_with_mask(x, *GRID)
        dx = OPS.fake_quantize_mask_backward(torch.ones(()).expand(4, 8), mask, strides=y.stride())
        assert torch.equal(dx, OPS.fake_quantize_backward(torch.ones(4, 8), x, *GRID))


@pytest.mark.parametrize("view", [lambda x: x[:, ::2], lambda x: x[1:3, 1:5], lambda x: x.t()[::3], lambda x: x[:, 2]])
@pytest.mark.parametrize(
    "quantize_", [lambda x: qsim.ops.fake_quantize_(x, *GRID), lambda x: OPS.round_to_format_(x, "float8_e5m2", saturate=False)]
)
def test_gradients_of_views_that_are_quantized_in_place(view, quantize_):
    leaf = (torch.randn(4, 8) * 1e5).requires_grad_()
    weights = torch.randn(4, 8)
    whole = leaf * 1
    quantize_(view(whole))
    (found,) = torch.autograd.grad((whole * weights).sum(), leaf)
    separate = view(leaf).detach().clone().requires_grad_()
    quantized = quantize_(separate * 1)
    (part,) = torch.autograd.grad((quantized * view(weights)).sum(), separate)
    expected = weights.clone()
    view(expected).copy_(part)
    assert torch.equal(found, expected)


class TestMemory:
    def test_what_is_written_is_no_parameter(self):
        x = torch.randn(6)
        with pytest.raises(ValueError, match=r"out is written and shares memory with scale; pass scale.clone\(\)"):
            OPS.fake_quantize.out(torch.randn(6), x, torch.zeros(6, dtype=torch.int32), -8, 7, axis=0, out=x)
        with pytest.raises(ValueError, match="x is written and shares memory with scale"):
            OPS.round_to_format_(x, "float16", scale=x[2])

    def test_no_place_is_written_twice(self):
        for twice in (torch.randn(1).expand(6), torch.randn(9).as_strided((3, 4), (2, 1))):
            with pytest.raises(ValueError, match="several of its elements share memory"):
                OPS.fake_quantize_(twice, *GRID)
        OPS.fake_quantize_(torch.randn(20).as_strided((2, 3), (3, 2)), *GRID)  # odd, but nothing lies on anything

    def test_out_may_lie_in_x(self):
        memory = torch.randn(40)
        expected = OPS.fake_quantize(memory[:32], *GRID)
        OPS.fake_quantize.out(memory[:32], *GRID, out=memory[3:35])
        assert torch.equal(memory[3:35], expected)

    def test_states_have_memory_of_their_own(self):
        lowest, highest, counts = state()
        with pytest.raises(ValueError, match="highest is written and shares memory with x"):
            OPS.observe_range_(highest, lowest, highest, counts)
        with pytest.raises(ValueError, match="lowest is written and shares memory with highest"):
            OPS.observe_range_(torch.randn(3), lowest, lowest, counts)
        sketch = torch.zeros(16384, dtype=torch.int64)
        with pytest.raises(ValueError, match="counts is written and shares memory with sketch"):
            OPS.observe_(torch.randn(3), lowest, highest, sketch[:4], sketch, torch.zeros((), dtype=torch.int32))

    def test_a_gradient_is_scaled_once(self):
        grad = torch.full((6, 4), 3.0)
        for twice in ([grad, grad], [grad, torch.ones(3), grad[1:]], [grad[:, ::2], grad[:, 1:3]]):
            with pytest.raises(ValueError, match="gradients share memory"):
                OPS.clip_grad_(twice, 1.0)
        assert torch.equal(grad, torch.full((6, 4), 3.0))
        OPS.clip_grad_(list(grad.unbind(1)), 1.0)  # neighbours, but apart
        torch.testing.assert_close(grad.norm(), torch.tensor(1.0))

    def test_a_parameter_given_twice_counts_once(self):
        weight = torch.nn.Parameter(torch.ones(4))
        weight.grad = torch.full((4,), 2.0)
        assert qsim.clip_grad_norm_([weight, weight], 1.0) == 4
        torch.testing.assert_close(weight.grad, torch.full((4,), 0.5))


class TestSizes:
    @pytest.mark.parametrize("size", [8, 2**31, 2**61, 2**62, 2**63 - 1])
    def test_blocks_may_be_longer_than_anything(self, size):
        x, scale, zero_point = torch.randn(3, 8), torch.rand(3, 1) + 0.1, torch.zeros(3, 1, dtype=torch.int32)
        y = OPS.fake_quantize(x, scale, zero_point, -8, 7, axis=1, block_size=size)
        assert torch.equal(y, OPS.fake_quantize(x, scale[:, 0], zero_point[:, 0], -8, 7, axis=0))
        lowest, highest, counts = state((1, 8))
        OPS.observe_range_(x, lowest, highest, counts, 0, block_size=size)
        assert torch.equal(lowest[0], x.amin(0))
        assert OPS.search_range_data(x, -8, 7, axis=1, block_size=size, method="minmax")[1].shape == (3, 1)

    @pytest.mark.parametrize("shape", [[2**40], [2**40, 2**40], [-1], [2**32, 2**32], [7]])
    def test_no_memory_for_integers_that_are_not_there(self, shape):
        with pytest.raises(ValueError, match=r"packed has 3 bytes|expected lengths of 0 or more"):
            OPS.unpack_int4(torch.zeros(3, dtype=torch.uint8), shape)

    @pytest.mark.parametrize("min_scale", [-1.0, math.nan])
    def test_min_scale(self, min_scale):
        with pytest.raises(ValueError, match="expected 0 or more"):
            OPS.choose_qparams(-SCALE, SCALE, -8, 7, min_scale=min_scale)


class TestKinds:
    @pytest.mark.parametrize("operator", operators(), ids=str)
    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: torch.ones(2, 2).to_sparse(), "Sparse tensor; expected a dense one"),
            (lambda: torch.ones(2, 2).to_sparse_csr(), "SparseCsr tensor; expected a dense one"),
            (lambda: torch.ones(2, 2).to_mkldnn(), "Mkldnn tensor; expected a dense one"),
            (lambda: torch.nested.nested_tensor([torch.ones(2)]), "nested tensor; expected a dense one"),
        ],
    )
    def test_every_operator_names_what_is_not_dense(self, operator, make, message):
        values = {"Tensor": torch.ones(2, 2), "List[Tensor]": [torch.ones(2, 2)], "int": 1, "float": 1.0, "str": "divide", "bool": True}
        needed = [argument for argument in operator._schema.arguments if not argument.has_default_value()]
        arguments = {argument.name: values.get(str(argument.type), []) for argument in needed}
        arguments[needed[0].name] = [make()] if str(needed[0].type) == "List[Tensor]" else make()
        with pytest.raises(TypeError, match=message):
            operator(**arguments)

    def test_none_is_named(self):
        with pytest.raises(TypeError, match="scale is None; expected Float"):
            OPS.fake_quantize(torch.ones(3), None, ZERO_POINT, -8, 7)
        with pytest.raises(ValueError, match="mask is None"):
            OPS.fake_quantize_mask_backward(torch.ones(3), None)

    def test_negated_views(self):
        negated = torch.randn(5, dtype=torch.complex64).conj().imag
        assert negated.is_neg()
        held, expected = state(), state()
        OPS.observe_range_(negated, *held)
        OPS.observe_range_(negated.resolve_neg(), *expected)
        assert all(torch.equal(x, y) for x, y in zip(held, expected, strict=True))
        with pytest.raises(ValueError, match=r"lowest is written, but is a lazily negated view; pass lowest.resolve_neg\(\)"):
            OPS.observe_range_(torch.ones(5), negated, *held[1:], axis=0)

    def test_inference_tensors_are_refused_before_they_are_written(self):
        with torch.inference_mode():
            held, x = state(), torch.randn(3)
        for call in (lambda: OPS.observe_range_(torch.randn(3), *held), lambda: OPS.fake_quantize_(x, *GRID)):
            with pytest.raises(RuntimeError, match="inference"):
                call()
        assert held[2].tolist() == [0, 0, 0, 0]
        with torch.inference_mode():
            OPS.observe_range_(torch.randn(3), *held)
