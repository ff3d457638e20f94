"""What users would write or call without qsim: torch core's operators, and plain formulas through torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch._inductor.config
from torch import Tensor

torch._inductor.config.compile_threads = 1  # no pool of processes beside the one that is timed


@cache
def compiled(formula: Callable[..., object]) -> Callable[..., object]:
    """One compilation for all sizes; per dtype and thread count, torch.compile makes another by itself."""
    return torch.compile(formula, dynamic=True)


def quantized(x: Tensor, scale: Tensor, zero_point: Tensor, quant_min: int, quant_max: int) -> Tensor:
    return (torch.clamp(torch.round(x / scale) + zero_point, quant_min, quant_max) - zero_point) * scale


def gradient(grad: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor, quant_min: int, quant_max: int) -> Tensor:
    steps = torch.round(x / scale) + zero_point
    return torch.where((quant_min <= steps) & (steps <= quant_max), grad, 0)


def learned_gradients(grad: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor, quant_min: int, quant_max: int) -> tuple[Tensor, Tensor]:
    exact = x / scale
    steps = torch.round(exact) + zero_point
    inside = (quant_min <= steps) & (steps <= quant_max)
    slope = torch.where(inside, torch.round(exact) - exact, torch.clamp(steps, quant_min, quant_max) - zero_point)
    return torch.where(inside, grad, 0), (grad * slope).sum()


def finite_range(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    finite = x.isfinite()
    least, most = torch.where(finite, x, torch.inf).amin(), torch.where(finite, x, -torch.inf).amax()
    return least, most, x.isnan().sum(), (x == torch.inf).sum(), (x == -torch.inf).sum()
