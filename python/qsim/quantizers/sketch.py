"""Reading the sketch that observers keep: which values its bins hold, the range to cover, a histogram over even bins, and how much lies
outside a range."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from qsim import ops
from qsim.numbers.spec import TensorSpec

SKETCH_BINS = 16384  # sign, exponent and 5 mantissa bits of a float32 (docs/numerics.md, section 3)
_SIDE = SKETCH_BINS // 2
_FINITE = 8160  # of one sign; the bins after them would hold Inf and NaN


class SketchedRange(NamedTuple):
    """What an observer has seen of a tensor."""

    lowest: Tensor
    highest: Tensor
    sketch: Tensor
    low_bits: Tensor


def search_sketches(seen: Sequence[SketchedRange], spec: TensorSpec) -> list[tuple[Tensor, Tensor]]:
    """The range that the spec's method and grid choose for each, by one search for all of them; they are on one device."""
    lowest, highest, sketch, low_bits = seen[0] if len(seen) == 1 else map(torch.stack, zip(*seen, strict=True))
    low, high = ops.search_range(
        lowest,
        highest,
        sketch,
        spec.quant_min,
        spec.quant_max,
        symmetric=spec.symmetric,
        method=spec.method,
        percentile=spec.percentile,
        gamma=spec.gamma,
        low_bits=low_bits,
    )
    return [(low, high)] if len(seen) == 1 else list(zip(low.unbind(), high.unbind(), strict=True))


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
    edges = even_edges(lowest.item(), highest.item(), bins)
    return edges, _between(sketch, lowest, highest, edges)


def even_edges(low: float, high: float, bins: int) -> Tensor:
    """Edges of intervals of equal width: float64 ``[bins + 1]``, the first and the last exactly `low` and `high`."""
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64) * (high - low) + low
    edges[-1] = high  # not one rounding beside it
    return edges


def _between(sketch: Tensor, lowest: Tensor, highest: Tensor, edges: Tensor) -> Tensor:
    """Counts between edges that ascend and enclose the range: the rules of `histogram`."""
    cumulative, zeros = _below(sketch, lowest, highest, edges)
    found = cumulative.diff()
    home = int(torch.searchsorted(edges, torch.zeros(1, dtype=torch.float64), right=True)) - 1
    found[min(max(home, 0), len(found) - 1)] += zeros
    return found


def _below(sketch: Tensor, lowest: Tensor, highest: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """How many elements lie below each of `values` (ascending, float64), zeros left out; and the number of zeros."""
    low, high = lowest.double().cpu(), highest.double().cpu()
    magnitudes = sketch_edges()
    both = torch.cat([-magnitudes.flip(0)[:-1], magnitudes]).clamp(low, high)  # ascending, from the largest negative bin on
    counts = sketch.cpu().double()
    zeros = counts[0] + counts[_SIDE]
    sides = torch.cat([counts[_SIDE + 1 : _SIDE + _FINITE].flip(0), torch.zeros(2, dtype=torch.float64), counts[1:_FINITE]])
    before = torch.cat([torch.zeros(1, dtype=torch.float64), sides.cumsum(0)])  # elements up to each edge

    right = torch.searchsorted(both, values, right=True).clamp(1, len(both) - 1)
    width = both[right] - both[right - 1]
    share = torch.where(width > 0, (values - both[right - 1]) / width, 1.0).clamp(0, 1)
    found = before[right - 1] + share * sides[right - 1]
    found[values <= low], found[values >= high] = 0, before[-1]
    return found, zeros


@dataclass(frozen=True, eq=False)
class Distribution:
    """What a sketch held at one moment, on the CPU, without its empty bins: a few kilobytes.

    Attributes
    ----------
    bins, counts : Tensor, int64 [n]
    lowest, highest : float
        The exact finite range of what was counted.
    """

    bins: Tensor
    counts: Tensor
    lowest: float
    highest: float

    @classmethod
    def of(cls, sketch: Tensor, lowest: Tensor, highest: Tensor) -> Distribution:
        """The distribution that an observer holds per tensor."""
        counts = sketch.cpu()
        bins = counts.nonzero().squeeze(1)
        return cls(bins, counts[bins], lowest.item(), highest.item())

    def histogram(self, edges: Tensor) -> Tensor:
        """Counts between edges, float64 ``[n]``, ascending, the first at most `lowest` and the last at least `highest`."""
        return _between(*self._sketch(), edges)

    def outside(self, low: float, high: float) -> float:
        """How many elements lie below `low` or above `high`, for a range that holds 0: exactly none where it holds the range observed,
        exact too where a bin of the sketch ends, and elsewhere within the counts of the two bins that the ends cut."""
        below, _ = _below(*self._sketch(), torch.tensor([low, high, torch.inf], dtype=torch.float64))
        under = below[0] if low > self.lowest else 0.0
        over = below[2] - below[1] if high < self.highest else 0.0
        return float(under + over)

    def _sketch(self) -> tuple[Tensor, Tensor, Tensor]:
        sketch = torch.zeros(SKETCH_BINS, dtype=torch.int64)
        sketch[self.bins] = self.counts
        return sketch, torch.tensor(self.lowest), torch.tensor(self.highest)
