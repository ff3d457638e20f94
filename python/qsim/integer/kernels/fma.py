"""Fused multiply-add of float32 on every device."""

from __future__ import annotations

import torch
from torch import Tensor


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """``a * b + c`` rounded once to float32.

    The product of two float32 is exact in float64. The sum is rounded to odd there, which makes the second rounding, to float32, that of
    the exact sum (Boldo, Melquiond 2008, "Emulation of FMA and correctly rounded sums", theorem 3.1).

    Parameters
    ----------
    a, b, c : Tensor, float32, finite, of shapes that broadcast

    Returns
    -------
    Tensor, float32
    """
    product, c = a.double() * b.double(), c.double()
    total = product + c
    shifted = total - product  # Knuth's two-sum: what `total` lacks
    lost = (product - (total - shifted)) + (c - shifted)
    bits = total.view(torch.int64)
    even = (bits & 1) == 0
    towards_zero = (lost < 0) == (total > 0)
    odd = torch.where(towards_zero, bits - 1, bits + 1)
    return torch.where((lost != 0) & even, odd, bits).view(torch.float64).float()
