"""Fake-quantize by a range that runs: it moves with each batch, and quantizes that batch (docs/numerics.md, section 4, ``ema``)."""

from __future__ import annotations

import torch
from torch import Tensor

from qsim.reference.choose_qparams import choose_qparams
from qsim.reference.fake_quantize import fake_quantize
from qsim.reference.observe import observe_range_


def observe_fake_quantize(
    x: Tensor,
    observing: Tensor,
    quantizing: Tensor,
    lowest: Tensor,
    highest: Tensor,
    counts: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    quant_min: int,
    quant_max: int,
    *,
    averaging: float = 0.01,
    axis: int | None = None,
    block_size: int | None = None,
    symmetric: bool = False,
    min_scale: float = 0.0,
    rounding: str = "divide",
) -> Tensor:
    """Twin of `qsim.ops.observe_fake_quantize` (docs/numerics.md, section 4).

    Examples
    --------
    >>> on, counts = torch.tensor(True), torch.zeros(4, dtype=torch.int64)
    >>> lowest, highest = torch.tensor(torch.inf), torch.tensor(-torch.inf)
    >>> scale, zero_point = torch.tensor(torch.nan), torch.tensor(0, dtype=torch.int32)
    >>> x = torch.tensor([-1.0, 2.75])
    >>> observe_fake_quantize(x, on, on, lowest, highest, counts, scale, zero_point, -8, 7).tolist()
    [-1.0, 2.75]
    """
    if observing:
        low, high = torch.full_like(lowest, torch.inf), torch.full_like(highest, -torch.inf)
        observe_range_(x, low, high, counts, axis, block_size=block_size)
        found, first = low <= high, lowest > highest
        for running, batch in ((lowest, low), (highest, high)):
            moved = ((1 - averaging) * running.double() + averaging * batch.double()).float() + 0.0
            running.copy_(torch.where(found, torch.where(first, batch, moved), running))
        chosen = choose_qparams(lowest, highest, quant_min, quant_max, symmetric, min_scale=min_scale)
        for held, new in zip((scale, zero_point), chosen, strict=True):
            held.copy_(torch.where(found, new, held))
    if not quantizing:
        return x.clone()
    grid_scale = scale.double() if x.dtype == torch.float64 else scale
    return fake_quantize(x, grid_scale, zero_point, quant_min, quant_max, axis=axis, block_size=block_size, rounding=rounding)
