"""Grids of the hand-written simulation: from values to scale and zero point, and onto the grid, by `docs/numerics.md` alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from qsim import reference

from .dataflow import NotUnderstood


@dataclass(frozen=True)
class Grid:
    """Scale (float32), zero point and ends; `axis` is that of the channels, None for one scale."""

    scale: Tensor
    zero_point: Tensor
    low: int
    high: int
    axis: int | None = None

    def apply(self, x: Tensor) -> Tensor:
        """`x` on the grid, with the straight-through gradient."""
        moved: Tensor = _Rounded.apply(x, self.scale.to(x.dtype), self.zero_point, self.low, self.high, self.axis)
        return moved


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *grid: Any) -> Tensor:
        ctx.save_for_backward(x)
        ctx.grid = grid
        return reference.fake_quantize(x, *grid[:4], axis=grid[4])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,), grid = ctx.saved_tensors, ctx.grid
        dx, _, _ = reference.fake_quantize_backward(grads[0], x, *grid[:4], axis=grid[4])
        return dx, None, None, None, None, None


@dataclass(frozen=True)
class Widths:
    """What the config of a case says: bits, and whether activations are symmetric and biases int32."""

    weight_bits: int = 8
    activation_bits: int = 8
    symmetric: bool = False
    bias: bool = True

    def of_range(self, low: Tensor, high: Tensor) -> Grid:
        """For an activation that was seen between these ends."""
        ends = -(2 ** (self.activation_bits - 1)), 2 ** (self.activation_bits - 1) - 1
        scale, zero_point = reference.choose_qparams(low.float(), high.float(), *ends, symmetric=self.symmetric)
        return Grid(scale, zero_point, *ends)

    def of_weight(self, weight: Tensor, axis: int | None) -> Grid:
        """For a weight, from its values: symmetric, one scale for each channel."""
        ends = -(2 ** (self.weight_bits - 1)), 2 ** (self.weight_bits - 1) - 1
        values = weight.detach() if isinstance(weight, nn.Parameter) else weight.detach().float()  # what is computed is observed
        axis = None if axis is None or weight.dim() < 2 else axis % weight.dim()
        rows = values.reshape(1, -1) if axis is None else values.transpose(0, axis).reshape(values.shape[axis], -1)
        low, high = rows.amin(1), rows.amax(1)
        if axis is None:
            low, high = low[0], high[0]
        scale, zero_point = reference.choose_qparams(low, high, *ends, symmetric=True)
        return Grid(scale, zero_point, *ends, axis)


def int32_bias(bias: Tensor, input: Grid, weight: Grid) -> Tensor:
    """A bias as integer kernels hold it, with the scale of the products (section 6)."""
    scale = (input.scale * weight.scale).reshape(-1)
    if scale.numel() != bias.numel():
        scale = scale.expand(bias.numel())
    ends = torch.iinfo(torch.int32)
    if bool((bias.detach().abs() / scale > ends.max / 2).any()):
        raise NotUnderstood("a bias that leaves int32 no room for the products: the weight's scale is raised")
    moved: Tensor = _Rounded.apply(bias.double(), scale.double(), torch.zeros_like(scale, dtype=torch.int32), ends.min, ends.max, 0)
    return moved.to(bias.dtype)


@dataclass
class Seen:
    """The range of what was observed."""

    low: Tensor = field(default_factory=lambda: torch.tensor(torch.inf))
    high: Tensor = field(default_factory=lambda: torch.tensor(-torch.inf))

    def add(self, x: Tensor) -> None:
        values = x.detach().float()
        self.low, self.high = torch.minimum(self.low, values.min()), torch.maximum(self.high, values.max())

    @property
    def is_empty(self) -> bool:
        return bool(self.low > self.high)
