"""Fake-quantize: rounding half to even onto a grid of integers, and its gradients, LSQ among them (docs/numerics.md, section 1)."""

from __future__ import annotations

import torch
from torch import Tensor

from qsim.numbers.blocks import Axes
from qsim.reference.layout import per_element


def _quotient(x: Tensor, scale: Tensor, rounding: str) -> Tensor:
    return x / scale if rounding == "divide" else x * (1 / scale)


def _steps(quotient: Tensor, zero_point: Tensor, quant_min: int, quant_max: int) -> tuple[Tensor, Tensor]:
    """Integers counted from the zero point, as floats, and where rounding stayed inside the grid. NaN stays NaN, outside."""
    zero = zero_point.to(quotient.dtype).round().clamp(quant_min, quant_max)
    low, high = quant_min - zero, quant_max - zero
    rounded = quotient.round()
    return rounded.clamp(low, high), (rounded >= low) & (rounded <= high)


def fake_quantize(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    quant_min: int,
    quant_max: int,
    *,
    axis: Axes = None,
    block_size: Axes = None,
    rounding: str = "divide",
) -> Tensor:
    """Twin of `qsim.ops.fake_quantize` (docs/numerics.md, section 1).

    Examples
    --------
    >>> fake_quantize(torch.tensor([0.24, 0.75, 9.0]), torch.tensor(0.5), torch.tensor(0, dtype=torch.int32), -8, 7).tolist()
    [0.0, 1.0, 3.5]
    """
    scale = per_element(scale, x, axis, block_size)
    steps, _ = _steps(_quotient(x.to(scale.dtype), scale, rounding), per_element(zero_point, x, axis, block_size), quant_min, quant_max)
    return (steps * scale).to(x.dtype) + 0.0  # -0.0 + 0.0 is +0.0


def fake_quantize_backward(
    grad: Tensor,
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    quant_min: int,
    quant_max: int,
    *,
    axis: Axes = None,
    block_size: Axes = None,
    rounding: str = "divide",
    grad_factor: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, scale and zero_point; the last two in float64 (docs/numerics.md, section 1). An integer zero point has none: 0.

    Examples
    --------
    >>> x, scale, zero_point = torch.tensor([0.5, 9.0]), torch.tensor(0.5), torch.tensor(0, dtype=torch.int32)
    >>> grad_x, grad_scale, grad_zero_point = fake_quantize_backward(torch.ones(2), x, scale, zero_point, -8, 7)
    >>> grad_x.tolist(), grad_scale.item()  # outside the grid the scale gets its end
    ([1.0, 0.0], 7.0)
    """
    wide_scale = per_element(scale, x, axis, block_size)
    elements = x.to(scale.dtype)
    quotient = _quotient(elements, wide_scale, rounding)
    steps, inside = _steps(quotient, per_element(zero_point, x, axis, block_size), quant_min, quant_max)
    dx = torch.where(inside, grad, torch.zeros_like(grad))
    gradient, known = grad.double(), ~elements.isnan()
    slope = torch.where(inside, steps.double() - quotient.double(), steps.double())
    scale_terms = torch.where(known, gradient * slope, 0.0)
    zero_point_terms = torch.where(known & ~inside, -gradient * wide_scale.double(), 0.0)

    def total(terms: Tensor) -> Tensor:
        sums = torch.zeros(scale.numel(), dtype=torch.float64, device=x.device)
        which = per_element(torch.arange(scale.numel(), device=x.device).reshape(scale.shape), x, axis, block_size).expand(x.shape)
        return sums.index_add(0, which.reshape(-1), terms.reshape(-1)).reshape(scale.shape) * grad_factor

    return dx, total(scale_terms), total(zero_point_terms) * zero_point.is_floating_point()
