"""Reading the sketch that observers keep: which values its bins hold, and a histogram over even bins."""

from __future__ import annotations

import torch
from torch import Tensor

SKETCH_BINS = 16384  # sign, exponent and 5 mantissa bits of a float32 (docs/numerics.md, section 3)
_SIDE = SKETCH_BINS // 2
_FINITE = 8160  # of one sign; the bins after them would hold Inf and NaN


def sketch_edges() -> Tensor:
    """Magnitudes between the bins of one sign: float64 ``[8161]``, from 0 to 2^128."""
    bits = torch.arange(_FINITE, dtype=torch.int32) << 18
    return torch.cat([bits.view(torch.float32).double(), torch.tensor([2.0**128], dtype=torch.float64)])


def histogram(sketch: Tensor, lowest: Tensor, highest: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    """Counts over `bins` intervals of equal width between `lowest` and `highest`.

    Parameters
    ----------
    sketch : Tensor, int64 [16384]
    lowest, highest : Tensor, float32 []
        The exact finite range of what was counted; ``lowest < highest``.
    bins : int

    Returns
    -------
    edges : Tensor, float64 [bins + 1]
    counts : Tensor, float64 [bins]
        Sums to the number of finite elements. A bin of the sketch is at most 1/32 of its value wide and is taken as evenly filled;
        zeros are all counted in the interval that holds 0.
    """
    low, high = lowest.double().cpu(), highest.double().cpu()
    magnitudes = sketch_edges()
    both = torch.cat([-magnitudes.flip(0)[:-1], magnitudes]).clamp(low, high)  # ascending, from the largest negative bin on
    counts = sketch.cpu().double()
    zeros = counts[0] + counts[_SIDE]
    sides = torch.cat([counts[_SIDE + 1 : _SIDE + _FINITE].flip(0), torch.zeros(2, dtype=torch.float64), counts[1:_FINITE]])
    before = torch.cat([torch.zeros(1, dtype=torch.float64), sides.cumsum(0)])  # elements up to each edge, zeros left out

    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64) * (high - low) + low
    edges[-1] = high  # not one rounding beside it
    right = torch.searchsorted(both, edges, right=True).clamp(1, len(both) - 1)
    width = both[right] - both[right - 1]
    share = torch.where(width > 0, (edges - both[right - 1]) / width, 1.0).clamp(0, 1)
    cumulative = before[right - 1] + share * sides[right - 1]
    cumulative[0], cumulative[-1] = 0, before[-1]
    found = cumulative.diff()
    home = int(torch.searchsorted(edges, torch.zeros(1, dtype=torch.float64), right=True)) - 1
    found[min(max(home, 0), bins - 1)] += zeros
    return edges, found
