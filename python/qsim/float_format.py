"""Rounding to float16, bfloat16 and float8, kept in the dtype of the input (docs/numerics.md, section 7)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class FloatFormat:
    """The numbers of a binary float format.

    Attributes
    ----------
    bits : int
        Width in memory.
    largest, smallest_normal, eps : float
        Largest finite number, smallest normal number, distance from 1 to the next number.
    infinite : bool
        Whether the format has Inf. Without it (float8_e4m3fn) an overflow is NaN.
    saturates : bool
        What hardware does with an overflow unless told otherwise: float8 units saturate, as ONNX's QuantizeLinear; float16 and
        bfloat16 arithmetic goes to Inf.
    """

    bits: int
    largest: float
    smallest_normal: float
    eps: float
    infinite: bool
    saturates: bool


def _format(dtype: torch.dtype, *, infinite: bool = True, saturates: bool = False) -> FloatFormat:
    info = torch.finfo(dtype)
    return FloatFormat(info.bits, info.max, info.smallest_normal, info.eps, infinite, saturates)


FLOAT_FORMATS = {
    "float16": _format(torch.float16),
    "bfloat16": _format(torch.bfloat16),
    "float8_e4m3fn": _format(torch.float8_e4m3fn, infinite=False, saturates=True),
    "float8_e5m2": _format(torch.float8_e5m2, saturates=True),
}

# Integer type of the same width, and its exponent bits, for each dtype that arithmetic is done in.
_EXPONENT = {torch.float32: (torch.int32, 0x7F80_0000), torch.float64: (torch.int64, 0x7FF0_0000_0000_0000)}


def _round_unbounded(x: Tensor, form: FloatFormat) -> Tensor:
    """Multiples of the format's step at each |x|, half to even, as if the format had no largest number."""
    integer, exponent_bits = _EXPONENT[x.dtype]
    power = (x.view(integer) & exponent_bits).view(x.dtype)  # 2 ** floor(log2 |x|); below the normals the step stays
    top = math.ldexp(1.0, math.frexp(form.largest)[1] - 1)
    step = power.clamp(form.smallest_normal, top) * form.eps
    return (x / step).round() * step  # the step is a power of two: only round() rounds


class _RoundToFormat(torch.autograd.Function):
    """Straight-through: the gradient passes where the result is a number of the format, and is 0 at an overflow or NaN."""

    @staticmethod
    def forward(x: Tensor, form: FloatFormat, saturate: bool) -> tuple[Tensor, Tensor]:
        rounded = _round_unbounded(x.contiguous() if x.dtype in _EXPONENT else x.float().contiguous(), form)
        in_range = rounded.abs() <= form.largest
        if saturate:
            rounded = rounded.clamp(-form.largest, form.largest)
        else:
            overflow = math.inf if form.infinite else math.nan
            rounded = torch.where(in_range, rounded, rounded * overflow)
        return rounded.to(x.dtype), in_range

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        in_range = output[1]
        ctx.mark_non_differentiable(in_range)
        ctx.save_for_backward(in_range)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (in_range,) = ctx.saved_tensors
        return torch.where(in_range, grad, 0), None, None


def round_to_format(x: Tensor, format: str, *, saturate: bool | None = None) -> Tensor:
    """The nearest number of a float format, as a tensor of the input's dtype.

    Parameters
    ----------
    x : Tensor, any shape, float16/bfloat16/float32/float64
    format : str
        "float16", "bfloat16", "float8_e4m3fn" or "float8_e5m2".
    saturate : bool, optional
        Whether what overflows becomes the largest finite number; otherwise it becomes Inf (NaN in float8_e4m3fn, which has no
        Inf). By default float8 saturates, float16 and bfloat16 do not.

    Returns
    -------
    Tensor, shape and dtype of `x`
        Rounded half to even, subnormals kept, NaN stays NaN, the sign of zero is kept. Differentiable: the gradient passes
        straight through, except where `x` overflowed or was NaN.

    Examples
    --------
    >>> round_to_format(torch.tensor([0.3, 1000.0]), "float8_e4m3fn").tolist()
    [0.3125, 448.0]
    >>> round_to_format(torch.tensor([2049.0, 70000.0]), "float16").tolist()
    [2048.0, inf]

    Notes
    -----
    IEEE 754-2019 section 4.3.1; Micikevicius et al. 2022, "FP8 Formats for Deep Learning".
    """
    if format not in FLOAT_FORMATS:
        raise ValueError(f"round_to_format: got format {format!r}; expected one of {', '.join(FLOAT_FORMATS)}")
    form = FLOAT_FORMATS[format]
    rounded: Tensor = _RoundToFormat.apply(x, form, form.saturates if saturate is None else saturate)[0]  # type: ignore[no-untyped-call]
    return rounded
