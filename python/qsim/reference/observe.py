from __future__ import annotations

import torch
from torch import Tensor

SKETCH_SHIFT, SKETCH_BINS = 18, 1 << 14


def _add_counts(x: Tensor, counts: Tensor) -> None:
    found = [torch.tensor(x.numel()), x.isnan().sum(), (x == torch.inf).sum(), (x == -torch.inf).sum()]
    counts += torch.stack([count.to(counts.device) for count in found])


def _extend(lowest: Tensor, highest: Tensor, low: Tensor, high: Tensor) -> None:
    lowest.copy_(torch.minimum(lowest, low) + 0.0)  # -0.0 + 0.0 is 0.0
    highest.copy_(torch.maximum(highest, high) + 0.0)


def observe_range_(
    x: Tensor, lowest: Tensor, highest: Tensor, counts: Tensor, *, axis: int | None = None, block_size: int | None = None
) -> None:
    """Twin of `qsim.ops.observe_range_` (NUMERICS, section 3)."""
    x = x.detach().float()
    _add_counts(x, counts)
    low, high = torch.where(x.isfinite(), x, torch.inf), torch.where(x.isfinite(), x, -torch.inf)
    if x.numel() == 0:
        return
    if axis is None:
        _extend(lowest, highest, low.min(), high.max())
    elif block_size is None:
        _extend(lowest, highest, low.movedim(axis, 0).reshape(x.shape[axis], -1).amin(1), high.movedim(axis, 0).reshape(x.shape[axis], -1).amax(1))
    else:
        lows = [block.amin(axis, keepdim=True) for block in low.split(block_size, axis)]
        highs = [block.amax(axis, keepdim=True) for block in high.split(block_size, axis)]
        _extend(lowest, highest, torch.cat(lows, axis), torch.cat(highs, axis))


def observe_(x: Tensor, lowest: Tensor, highest: Tensor, counts: Tensor, sketch: Tensor) -> None:
    """Twin of `qsim.ops.observe_` (NUMERICS, section 3)."""
    observe_range_(x, lowest, highest, counts)
    finite = x.detach().float()[x.detach().float().isfinite()] + 0.0  # +0.0 for both zeros
    bins = (finite.view(torch.int32).long() & 0xFFFFFFFF) >> SKETCH_SHIFT
    sketch += torch.bincount(bins, minlength=SKETCH_BINS)
