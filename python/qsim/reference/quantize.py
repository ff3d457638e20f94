"""Integers as they are stored: quantize, rounding half to even, and dequantize (docs/numerics.md, section 1)."""

from __future__ import annotations

import torch
from torch import Tensor

from qsim.numbers.blocks import Axes
from qsim.reference.fake_quantize import _quotient
from qsim.reference.layout import per_element

_STORAGE = (torch.uint8, torch.int8, torch.uint16, torch.int16)


def quantize(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    quant_min: int,
    quant_max: int,
    *,
    axis: Axes = None,
    block_size: Axes = None,
    rounding: str = "divide",
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Twin of `qsim.ops.quantize` (docs/numerics.md, section 1).

    Examples
    --------
    >>> quantize(torch.tensor([-1.0, 0.25, 9.0]), torch.tensor(0.5), torch.tensor(0, dtype=torch.int32), -8, 7).tolist()
    [-2, 0, 7]
    """
    if dtype is None:
        dtype = next(t for t in _STORAGE if torch.iinfo(t).min <= quant_min and quant_max <= torch.iinfo(t).max)
    scale, zero_point = (per_element(values, x, axis, block_size) for values in (scale, zero_point))
    q = (_quotient(x.to(scale.dtype), scale, rounding).round() + zero_point).clamp(quant_min, quant_max)
    return torch.where(q.isnan(), quant_min, q).to(dtype)


def dequantize(
    q: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    *,
    axis: Axes = None,
    block_size: Axes = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Twin of `qsim.ops.dequantize`.

    Examples
    --------
    >>> dequantize(torch.tensor([-2, 7], dtype=torch.int8), torch.tensor(0.5), torch.tensor(0, dtype=torch.int32)).tolist()
    [-1.0, 3.5]
    """
    scale, zero_point = (per_element(values, q, axis, block_size) for values in (scale, zero_point))
    return ((q.to(torch.int32) - zero_point) * scale).to(dtype or scale.dtype) + 0.0  # -0.0 + 0.0 is +0.0
