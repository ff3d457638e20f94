"""Rounding half to even to a float format: its numbers, its gradient, what is counted of it (docs/numerics.md, section 7)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qsim.numbers.blocks import Axes
from qsim.numbers.float_format import FLOAT_FORMATS, FloatFormat
from qsim.reference.layout import per_element

# Integer type of the same width, and its exponent bits, for each dtype that arithmetic is done in.
_EXPONENT = {torch.float32: (torch.int32, 0x7F80_0000), torch.float64: (torch.int64, 0x7FF0_0000_0000_0000)}


def _round_unbounded(x: Tensor, form: FloatFormat) -> Tensor:
    """Multiples of the format's step at each |x|, half to even, as if the format had no largest number."""
    integer, exponent_bits = _EXPONENT[x.dtype]
    power = (x.view(integer) & exponent_bits).view(x.dtype)  # 2 ** floor(log2 |x|); below the normals the step stays
    top = math.ldexp(1.0, math.frexp(form.largest)[1] - 1)
    step = power.clamp(form.smallest_normal, top) * form.eps
    return (x / step).round() * step  # the step is a power of two: only round() rounds


def _arithmetic(x: Tensor) -> Tensor:
    return (x if x.dtype in _EXPONENT else x.float()).contiguous()


def _largest(form: FloatFormat, dtype: torch.dtype) -> float:
    """The largest number of the format that `dtype` has."""
    held = torch.tensor(form.largest, dtype=torch.float64).to(dtype)
    return (held if held.double() <= form.largest or held.isinf() else held.nextafter(torch.zeros_like(held))).item()


def _scaled(x: Tensor, scale: Tensor | None, axis: Axes, block_size: Axes) -> tuple[Tensor, Tensor]:
    """What is rounded, in the dtype of arithmetic, and the scale of each element."""
    wide = _arithmetic(x)
    scales = torch.ones_like(wide) if scale is None else per_element(scale, x, axis, block_size).expand_as(x)
    return wide / scales, scales


def _round(quotient: Tensor, format: str, saturate: bool | None, dtype: torch.dtype) -> Tensor:
    """`quotient` rounded to the format; saturated to the largest number of it that `dtype` has."""
    form = FLOAT_FORMATS[format]
    rounded = _round_unbounded(quotient, form)
    if form.saturates if saturate is None else saturate:
        largest = _largest(form, dtype)
        return rounded.clamp(-largest, largest)
    overflow = math.inf if form.infinite else math.nan
    return torch.where(rounded.abs() <= form.largest, rounded, rounded * overflow)


def _rounded(x: Tensor, format: str, saturate: bool | None, scale: Tensor | None, axis: Axes, block_size: Axes) -> Tensor:
    """The result in the dtype of arithmetic. What is scaled may be any number of that dtype until it is rounded to x's."""
    quotient, scales = _scaled(x, scale, axis, block_size)
    return _round(quotient, format, saturate, x.dtype if scale is None else quotient.dtype) * scales


def round_to_format(
    x: Tensor,
    format: str,
    *,
    saturate: bool | None = None,
    scale: Tensor | None = None,
    axis: Axes = None,
    block_size: Axes = None,
) -> Tensor:
    """Twin of `qsim.ops.round_to_format` (docs/numerics.md, section 7).

    Examples
    --------
    >>> round_to_format(torch.tensor([2049.0, 70000.0]), "float16").tolist()
    [2048.0, inf]
    """
    return _rounded(x, format, saturate, scale, axis, block_size).to(x.dtype)


def round_to_format_backward(
    grad: Tensor, x: Tensor, format: str, *, scale: Tensor | None = None, axis: Axes = None, block_size: Axes = None
) -> Tensor:
    """The straight-through gradient: 0 where `x` is NaN, Inf or overflows.

    Examples
    --------
    >>> round_to_format_backward(torch.ones(2), torch.tensor([1.0, 70000.0]), "float16").tolist()
    [1.0, 0.0]
    """
    form = FLOAT_FORMATS[format]
    quotient, _ = _scaled(x, scale, axis, block_size)
    return torch.where(_round_unbounded(quotient, form).abs() <= form.largest, grad, 0)


def count_format_(
    x: Tensor,
    format: str,
    counts: Tensor,
    squares: Tensor | None = None,
    *,
    saturate: bool | None = None,
    scale: Tensor | None = None,
    axis: Axes = None,
    block_size: Axes = None,
) -> None:
    """Twin of `qsim.ops.count_format_`.

    Examples
    --------
    >>> counts = torch.zeros(6, dtype=torch.int64)
    >>> count_format_(torch.tensor([3.0, 70000.0, torch.nan]), "float16", counts)
    >>> counts.tolist()
    [3, 1, 0, 1, 0, 0]
    """
    form = FLOAT_FORMATS[format]
    wide = _arithmetic(x)
    quotient, _ = _scaled(x, scale, axis, block_size)
    unbounded = _round_unbounded(quotient, form).abs()
    found = [
        torch.ones_like(wide, dtype=torch.bool),
        wide.isnan(),
        wide.isinf(),
        wide.isfinite() & ~(unbounded <= form.largest),  # 0 / 0 too, where a scale is 0
        (quotient != 0) & (unbounded == 0),
        (unbounded > 0) & (unbounded < form.smallest_normal),
    ]
    counts += torch.stack([which.sum() for which in found])
    if squares is not None:
        rounded = _rounded(x, format, saturate, scale, axis, block_size)
        known = wide.isfinite() & rounded.isfinite()
        signal, result = wide[known].double(), rounded[known].double()
        squares += torch.stack([(signal - result).square().sum(), signal.square().sum()])
