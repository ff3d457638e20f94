"""What operations that are written out are made of: sums, and tensors that are stored, which a function given by the caller sees."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from qsim.numbers.blocks import Axes

# Takes sums, a function that returns the mean magnitude of the terms of each (it broadcasts to the sums), and how many there were. What is
# stored between two operations is a sum of one.
Total = Callable[[Tensor, Callable[[], Tensor], float], Tensor]
Inside = Callable[..., Any]


def stored(total: Total, x: Tensor) -> Tensor:
    """What an engine stores between two operations."""
    return total(x, x.abs, 1.0)


def added_up(total: Total, x: Tensor, dim: Axes, keepdim: bool = True) -> tuple[Tensor, float]:
    """The sum over some axes (None or none: over all), and how many numbers it adds."""
    axes = tuple(range(x.dim())) if dim is None or dim == () else (dim,) if isinstance(dim, int) else tuple(dim)
    count = float(math.prod([x.shape[a] for a in axes]))
    added = x.sum(axes, keepdim=keepdim) if x.dim() else x
    return total(added, lambda: x.abs().mean(axes, keepdim=keepdim) if x.dim() else x.abs(), count), count


def averaged(total: Total, x: Tensor, dim: Axes, keepdim: bool = True) -> Tensor:
    """The mean over some axes."""
    added, count = added_up(total, x, dim, keepdim)
    return added / count


def multiplied(total: Total, a: Tensor, b: Tensor) -> Tensor:
    """A product of matrices, summed up and stored."""
    terms = float(a.shape[-1])
    return stored(total, total(a @ b, lambda: a.abs() @ b.abs() / terms, terms))


def root(x: Tensor, power: float = 0.5) -> Tensor:
    """``x.pow(power)`` of what is not negative, whose gradient at zero is zero, as those of torch's norms and deviations are."""
    none = x == 0
    return torch.where(none, 0.0, torch.where(none, 1.0, x).pow(power))


def affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def last(shape: Sequence[int]) -> tuple[int, ...]:
    """The axes that a normalization over `shape` takes together."""
    return tuple(range(-len(shape), 0))
