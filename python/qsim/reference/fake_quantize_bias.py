"""Biases on the int32 grids of the products that they are added to (docs/numerics.md, section 6)."""

from __future__ import annotations

import torch
from torch import Tensor

from qsim.reference.fake_quantize import fake_quantize


def fake_quantize_bias(bias: Tensor, input_scale: Tensor, weight_scale: Tensor) -> Tensor:
    """Twin of `qsim.ops.fake_quantize_bias` (docs/numerics.md, section 6).

    Examples
    --------
    >>> fake_quantize_bias(torch.tensor([0.5, -1.3]), torch.tensor(0.5), torch.tensor([0.25, 0.5])).tolist()
    [0.5, -1.25]
    """
    limits = torch.iinfo(torch.int32)
    scale = (input_scale.float() * weight_scale.float()).reshape(-1)
    scale = scale.repeat(bias.numel() // max(scale.numel(), 1)).double()
    zero_point = torch.zeros_like(scale, dtype=torch.int32)
    y = fake_quantize(bias.double(), scale, zero_point, limits.min, limits.max, axis=0)
    y = torch.where((scale == 0) & ~bias.isnan(), 0.0, y)  # the product is too small for float32: 0 is all of that grid
    return y if bias.dtype == torch.float64 else y.float().to(bias.dtype)
