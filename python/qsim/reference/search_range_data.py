"""Ranges from the values themselves, as of weights, by every method (docs/numerics.md, section 4)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from qsim.numbers.blocks import Axes
from qsim.reference.choose_qparams import choose_qparams
from qsim.reference.layout import blocks_of
from qsim.reference.search_range import _clip_by_entropy, _lossless, _lowest_set_bit, _step_weight, candidate_ranges


def data_cost(x: Tensor, scale: Tensor, zero_point: Tensor, quant_min: int, quant_max: int, *, gamma: float = 1.0) -> Tensor:
    """Squared error of quantizing finite values with each encoding (1-dim); of what rounds off the grid it weighs `gamma`."""
    costs = []
    for s, z in zip(scale.double(), zero_point.double(), strict=True):
        error = x.double().flatten() / s
        error -= error.round().clamp(quant_min - z, quant_max - z)
        costs.append((error**2 * torch.where(error.abs() > 0.5, gamma, 1.0)).sum() * s**2)
    return torch.stack(costs)


def _search_values(
    x: Tensor, grid: tuple[int, int], symmetric: bool, method: str, percentile: float, gamma: float
) -> tuple[Tensor, Tensor]:
    x = x[x.isfinite()]
    if len(x) == 0:
        return x.new_tensor(math.inf), x.new_tensor(-math.inf)
    lowest, highest = x.min(), x.max()
    if method == "minmax":
        return lowest, highest
    if method == "percentile":
        ordered, dropped = x.double().sort().values, (len(x) - 1) * ((100 - percentile) / 200)

        def at(position: float) -> Tensor:
            rank = int(position)
            return torch.lerp(ordered[rank], ordered[min(rank + 1, len(x) - 1)], position - rank)

        return at(dropped), at(len(x) - 1 - dropped)
    if method == "entropy":
        magnitude = x[x != 0].double().abs()
        return _clip_by_entropy(lowest, highest, magnitude, magnitude, torch.ones_like(magnitude), *grid, symmetric)
    weight = _step_weight(method, gamma)
    lows, highs = candidate_ranges(lowest, highest, *grid, symmetric=symmetric)
    if len(lows) == 0:
        return lowest.clamp(max=0), highest.clamp(min=0)
    scale, zero_point = choose_qparams(lows, highs, *grid, symmetric=symmetric)
    cost = data_cost(x, scale, zero_point, *grid, gamma=weight)
    best = int(cost.argmin())
    lossless = _lossless(lowest, highest, _lowest_set_bit(x), *grid, symmetric)
    if lossless is not None and cost[best] > 1e-6 * len(x) * scale[best].double() ** 2 / 12:
        return lossless
    return lows[best], highs[best]


def search_range_data(
    x: Tensor,
    quant_min: int,
    quant_max: int,
    *,
    axis: Axes = None,
    block_size: Axes = None,
    symmetric: bool = False,
    method: str = "tf_enhanced",
    percentile: float = 99.99,
    gamma: float = 3.0,
) -> tuple[Tensor, Tensor]:
    """Twin of `qsim.ops.search_range_data` (docs/numerics.md, section 4).

    Examples
    --------
    >>> weight = torch.randn(4, 16)
    >>> torch.equal(search_range_data(weight, -7, 7, axis=0)[0], ops.search_range_data(weight, -7, 7, axis=0)[0])
    True
    """
    values = x if x.dtype == torch.float64 else x.float()
    pieces, shape = blocks_of(values, axis, block_size)
    found = [_search_values(piece, (quant_min, quant_max), symmetric, method, percentile, gamma) for piece in pieces]
    lows = values.new_tensor([float(low) for low, _ in found]).reshape(shape)
    highs = values.new_tensor([float(high) for _, high in found]).reshape(shape)
    return lows, highs


def search_range_weights(
    weights: Sequence[Tensor],
    quant_min: Sequence[int],
    quant_max: Sequence[int],
    *,
    axis: Sequence[Axes],
    block_size: Sequence[Axes],
    symmetric: Sequence[bool],
    method: str = "tf_enhanced",
    percentile: float = 99.99,
    gamma: float = 3.0,
) -> tuple[list[Tensor], list[Tensor]]:
    """Twin of `qsim.ops.search_range_weights`: each weight alone.

    Examples
    --------
    >>> low, high = search_range_weights([torch.randn(4, 16)], [-7], [7], axis=[0], block_size=[None], symmetric=[True])
    >>> [tuple(x.shape) for x in low]
    [(4,)]
    """
    found = [
        search_range_data(x, low, high, axis=a, block_size=b, symmetric=s, method=method, percentile=percentile, gamma=gamma)
        for x, low, high, a, b, s in zip(weights, quant_min, quant_max, axis, block_size, symmetric, strict=True)
    ]
    return [low for low, _ in found], [high for _, high in found]
