"""Biases on int32 grids: the reference's bits, a straight-through gradient, errors that say what was got."""

import pytest
import torch

import qsim
from qsim import ops

TYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def biases(channels, dtype):
    x = torch.randn(channels, dtype=torch.float64) * 10.0 ** torch.randint(-6, 4, (channels,))
    special = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf, 1e-45, 3e38, -1e-7, 2.5e-3], dtype=torch.float64)
    x[: min(channels, 9)] = special[:channels]
    return x.to(dtype)


def same(a, b):
    assert a.dtype == b.dtype
    bits = {8: torch.int64, 4: torch.int32, 2: torch.int16}[a.element_size()]
    assert ((a.view(bits) == b.view(bits)) | (a.isnan() & b.isnan())).all()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("channels", [0, 1, 5, 8, 9, 96, 1001])
def test_is_the_reference(dtype, channels):
    bias = biases(channels, dtype)
    for input_scale in (0.02, 1e-7, 1e-12, 1e-38, 1.2e-38 * 2**-20):  # small ones clamp, and make scales that are subnormal, or 0
        for weight_scale in (torch.tensor(0.003), torch.rand(channels) * 0.01 + 1e-6):
            given = bias, torch.tensor(input_scale), weight_scale
            same(ops.fake_quantize_bias(*given), qsim.reference.fake_quantize_bias(*given))


@pytest.mark.parametrize("dtype", TYPES)
def test_a_product_of_scales_that_is_too_small_for_float32(dtype):
    bias = torch.tensor([0.0, -0.0, 1.0, -3.0, torch.inf, torch.nan], dtype=dtype, requires_grad=True)
    y = ops.fake_quantize_bias(bias, torch.tensor(1e-30), torch.tensor(1e-20))
    assert y[:5].tolist() == [0.0] * 5
    assert y[5].isnan()
    y.backward(torch.ones_like(y))
    assert bias.grad.tolist() == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]


def test_few_scales_repeat_and_any_strides_are_read():
    bias, scales = torch.randn(24)[::2], torch.rand(6)[::2] * 1e-3
    expected = qsim.reference.fake_quantize_bias(bias.contiguous(), torch.tensor([0.1]), scales.repeat(4))
    same(ops.fake_quantize_bias(bias, torch.tensor([0.1]), scales), expected)
    assert ops.fake_quantize_bias(bias, torch.tensor([0.1]), scales).is_contiguous()


def test_the_gradient_passes_where_nothing_was_clipped():
    bias = torch.tensor([0.3, -0.7, 1e9, -1e9, torch.nan, 0.0, 2.0, 3.0, 4.0], requires_grad=True)
    y = ops.fake_quantize_bias(bias, torch.tensor(1e-3), torch.tensor(1e-3))
    y.backward(torch.arange(1.0, 10.0))
    assert bias.grad.tolist() == [1.0, 2.0, 0.0, 0.0, 0.0, 6.0, 7.0, 8.0, 9.0]
    with pytest.raises(RuntimeError, match="a scale requires grad"):
        ops.fake_quantize_bias(bias, torch.tensor(1e-3, requires_grad=True), torch.tensor(1e-3))


def test_in_every_way_that_torch_calls_operators():
    given = torch.randn(12, requires_grad=True), torch.tensor(0.1), torch.rand(12) * 0.01
    for operator in (torch.ops.qsim.fake_quantize_bias.default, torch.ops.qsim.fake_quantize_bias_with_mask.default):
        torch.library.opcheck(operator, tuple(t.detach() for t in given))
    torch.library.opcheck(torch.ops.qsim.fake_quantize_bias.default, given)
    many = torch.randn(3, 12)
    mapped = torch.vmap(lambda bias: ops.fake_quantize_bias(bias, *given[1:]))(many)
    for found, bias in zip(mapped, many, strict=True):
        same(found, ops.fake_quantize_bias(bias, *given[1:]))
    gradient = torch.func.vmap(torch.func.grad(lambda bias: ops.fake_quantize_bias(bias, *given[1:]).square().sum()))(many)
    torch.testing.assert_close(gradient, 2 * mapped, rtol=1e-6, atol=1e-6)


def test_flushed_subnormals_change_nothing():
    given = torch.tensor([1e-41, 3e-40, 1.0]), torch.tensor(1e-20), torch.tensor(1e-20)
    expected = ops.fake_quantize_bias(*given)
    torch.set_flush_denormal(True)
    try:
        same(ops.fake_quantize_bias(*given), expected)
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({0: torch.zeros(4, dtype=torch.int32)}, TypeError, "bias is Int; expected float16"),
        ({1: torch.tensor(0.1, dtype=torch.float64)}, TypeError, "input_scale is Double"),
        ({2: torch.tensor(0.1).half()}, TypeError, "weight_scale Half"),
        ({0: torch.zeros(2, 2)}, ValueError, r"bias has shape \[2, 2\]; expected one axis"),
        ({1: torch.ones(2)}, ValueError, r"input_scale has shape \[2\]; expected one element"),
        ({2: torch.ones(3)}, ValueError, r"weight_scale has shape \[3\]; expected one element, or a number that 4"),
        ({2: torch.ones(0)}, ValueError, r"weight_scale has shape \[0\]"),
        ({2: torch.ones(4, device="meta")}, ValueError, "weight_scale on meta; expected one device"),
    ],
)
def test_what_does_not_fit_is_told(change, error, said):
    given = [torch.zeros(4), torch.tensor(0.1), torch.ones(4)]
    for position, value in change.items():
        given[position] = value
    with pytest.raises(error, match=said):
        ops.fake_quantize_bias(*given)
