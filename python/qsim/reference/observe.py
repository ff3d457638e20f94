"""What observing notes of a batch: its finite range, counts of the rest, and the histogram called sketch (docs/numerics.md, section 3)."""

from __future__ import annotations

import torch
from torch import Tensor

from qsim.numbers.blocks import Axes
from qsim.reference.layout import least

SKETCH_SHIFT, SKETCH_BINS = 18, 1 << 14


def _add_counts(x: Tensor, counts: Tensor) -> None:
    found = [torch.tensor(x.numel()), x.isnan().sum(), (x == torch.inf).sum(), (x == -torch.inf).sum()]
    counts += torch.stack([count.to(counts.device) for count in found])


def _extend(lowest: Tensor, highest: Tensor, low: Tensor, high: Tensor) -> None:
    lowest.copy_(torch.minimum(lowest, low) + 0.0)  # -0.0 + 0.0 is 0.0
    highest.copy_(torch.maximum(highest, high) + 0.0)


def observe_range_(x: Tensor, lowest: Tensor, highest: Tensor, counts: Tensor, axis: Axes = None, *, block_size: Axes = None) -> None:
    """Twin of `qsim.ops.observe_range_` (docs/numerics.md, section 3).

    Examples
    --------
    >>> lowest, highest, counts = torch.tensor(torch.inf), torch.tensor(-torch.inf), torch.zeros(4, dtype=torch.int64)
    >>> observe_range_(torch.tensor([-2.0, 3.0, torch.nan]), lowest, highest, counts)
    >>> lowest.item(), highest.item(), counts.tolist()
    (-2.0, 3.0, [3, 1, 0, 0])
    """
    x = x.detach().float()
    _add_counts(x, counts)
    low, high = torch.where(x.isfinite(), x, torch.inf), torch.where(x.isfinite(), x, -torch.inf)
    if x.numel() == 0:
        return
    _extend(lowest, highest, least(low, axis, block_size), -least(-high, axis, block_size))


def observe_(x: Tensor, lowest: Tensor, highest: Tensor, counts: Tensor, sketch: Tensor, low_bits: Tensor) -> None:
    """Twin of `qsim.ops.observe_` (docs/numerics.md, section 3).

    Examples
    --------
    >>> lowest, highest, low_bits = torch.tensor(torch.inf), torch.tensor(-torch.inf), torch.zeros((), dtype=torch.int32)
    >>> counts, sketch = torch.zeros(4, dtype=torch.int64), torch.zeros(16384, dtype=torch.int64)
    >>> observe_(torch.tensor([1.0, 1.01]), lowest, highest, counts, sketch, low_bits)
    >>> sketch[sketch > 0].tolist()  # in one bin
    [2]
    """
    observe_range_(x, lowest, highest, counts)
    finite = x.detach().float()[x.detach().float().isfinite()] + 0.0  # +0.0 for both zeros
    bits = finite.view(torch.int32).long() & 0xFFFFFFFF
    sketch += torch.bincount(bits >> SKETCH_SHIFT, minlength=SKETCH_BINS)
    low_bits |= sum(1 << b for b in range(SKETCH_SHIFT) if bool((bits >> b & 1).any()))
