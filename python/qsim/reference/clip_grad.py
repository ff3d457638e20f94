"""Gradients clipped by their norm, what is not finite skipped and counted."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def clip_grad_(grads: Sequence[Tensor], max_norm: float, *, norm_type: float = 2.0, nonfinite: str = "skip") -> tuple[Tensor, Tensor]:
    """Twin of `qsim.ops.clip_grad_`; its sums are taken in another order.

    Examples
    --------
    >>> grads = [torch.tensor([3.0, 0.0]), torch.tensor([4.0])]
    >>> clip_grad_(grads, 1.0)[0].item()
    5.0
    """
    dtype = torch.float64 if any(grad.dtype == torch.float64 for grad in grads) else torch.float32
    counts = torch.stack([grad.numel() - grad.isfinite().sum() for grad in grads])
    broken = bool(counts.sum() > 0)
    if broken and nonfinite != "zero":
        if nonfinite == "skip":
            for grad in grads:
                grad.zero_()
        return torch.tensor(torch.nan, dtype=dtype), counts
    elements = torch.cat([grad.double()[grad.isfinite()] for grad in grads])
    norm = torch.linalg.vector_norm(elements, norm_type) if elements.numel() > 0 else torch.tensor(0.0, dtype=torch.float64)
    coefficient = min(1.0, max_norm / (norm.item() + 1e-6)) if not math.isinf(max_norm) else 1.0
    for grad in grads:
        wide = torch.where(grad.isfinite(), grad, 0).to(torch.promote_types(grad.dtype, torch.float32))
        grad.copy_(wide * torch.tensor(coefficient, dtype=wide.dtype))
    return norm.to(dtype), counts
