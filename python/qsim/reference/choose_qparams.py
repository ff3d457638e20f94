"""From a range to scale and zero point (docs/numerics.md, section 2)."""

from __future__ import annotations

import torch
from torch import Tensor


def _largest_scale(steps: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest number of `dtype` whose product with `steps` does not overflow it."""
    largest = torch.finfo(dtype).max
    scale = (largest / steps).to(dtype)
    too_large = scale.double() * steps > largest
    return torch.where(too_large, torch.nextafter(scale, torch.zeros_like(scale)), scale)


def choose_qparams(
    min: Tensor, max: Tensor, quant_min: int, quant_max: int, symmetric: bool = False, *, min_scale: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Twin of `qsim.ops.choose_qparams` (docs/numerics.md, section 2).

    Examples
    --------
    >>> scale, zero_point = choose_qparams(torch.tensor(-1.0), torch.tensor(3.0), -128, 127)
    >>> torch.equal(scale, ops.choose_qparams(torch.tensor(-1.0), torch.tensor(3.0), -128, 127)[0])
    True
    """
    finite = (min <= max) & min.isfinite() & max.isfinite()
    low, high = min.double().clamp(max=0), max.double().clamp(min=0)
    if symmetric:
        middle = torch.tensor((quant_min + quant_max) / 2, dtype=torch.float64).round().to(low.device)
        below, above = middle - quant_min, quant_max - middle
        top = below if 2 * above <= below else above
        bottom = below if below > 0 else top
        scale = torch.maximum(high / top, -low / bottom)
    else:
        scale = (high - low) / (quant_max - quant_min)
    scale = scale.clamp(min=torch.finfo(torch.float32).tiny if min_scale < torch.finfo(torch.float32).tiny else min_scale)
    scale = torch.where(low == high, torch.ones_like(scale), scale)
    if symmetric:
        zero_point = middle.expand_as(low)
    else:
        zero_point = (quant_min - low / scale).round().clamp(quant_min, quant_max)
        zero_point = torch.where(finite, zero_point, torch.full_like(zero_point, quant_min))
    ceiling = _largest_scale(torch.maximum(zero_point - quant_min, quant_max - zero_point), min.dtype)
    scale = torch.where(scale < ceiling, scale, ceiling.double()).to(min.dtype)
    return torch.where(finite, scale, torch.full_like(scale, torch.nan)), zero_point.to(torch.int32)
