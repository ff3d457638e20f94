"""Ranges from what was observed, by every method: ``percentile``, ``mse``, ``tf_enhanced``, ``entropy`` (docs/numerics.md, section 4)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from qsim.numbers.range_methods import SEARCHES
from qsim.reference.choose_qparams import choose_qparams

_BINS, _FINITE_BINS = 16384, 8160  # all, and those of one sign that hold finite values
_ENTROPY_BINS, _ENTROPY_TIE = 2048, 1e-9
_LATTICE_POINTS, _COARSE_POINTS, _LATTICE_EVIDENCE, _LATTICE_MAX_SPAN = 8, 32, 32, 16


def _sketch_edges() -> Tensor:
    """The smallest magnitude of each bin of one sign, and Inf, where the last finite bin ends."""
    return (torch.arange(_FINITE_BINS + 1) << 18).to(torch.int32).view(torch.float32).double()


def candidate_ranges(low: Tensor, high: Tensor, quant_min: int, quant_max: int, *, symmetric: bool = False) -> tuple[Tensor, Tensor]:
    """The candidate ranges of ``"mse"`` and ``"tf_enhanced"`` for values in ``[low, high]``, in the order that settles ties."""
    limit = torch.finfo(low.dtype).max
    low64, high64 = low.double().clamp(max=0), high.double().clamp(min=0)
    if symmetric:
        percent = torch.arange(1, 102, dtype=torch.float64)
        lows, highs = low64 * percent / 100, high64 * percent / 100
    else:
        steps, width = quant_max - quant_min, high64 - low64
        delta = (width / steps * torch.arange(1, 18, dtype=torch.float64) / 16)[:, None]
        even = (steps * torch.arange(20, dtype=torch.float64) / 19 - steps).round()
        offset = torch.cat([even, (low64 / width * steps).round()[None]])
        lows, highs = (delta * offset).clamp(min=low64).flatten(), (delta * (offset + steps)).clamp(max=high64).flatten()
    lows, highs = lows.clamp(-limit, limit).to(low.dtype), highs.clamp(-limit, limit).to(low.dtype)
    kept = lows < highs
    return lows[kept], highs[kept]


def _lowest_set_bit(x: Tensor) -> float:
    """The largest power of two that divides every element; Inf for none but zeros."""
    mantissa, exponent = torch.frexp(x[x != 0].double().abs())
    whole = torch.ldexp(mantissa, torch.tensor(53)).long()
    return min((math.ldexp(int(w & -w), int(e) - 53) for w, e in zip(whole, exponent, strict=True)), default=math.inf)


def _places_in_a_bin(low_bits: Tensor | None) -> int:
    """How many values of a bin have no other mantissa bits than these."""
    if low_bits is None:
        return 1 << 18
    bits = int(low_bits) & 0x3FFFF
    return (1 << 18) // (bits & -bits) if bits else 1


@dataclass(frozen=True)
class Distribution:
    """What a sketch stands for: masses at points and masses spread evenly over intervals, exact zeros left out."""

    points: Tensor
    point_mass: Tensor
    starts: Tensor
    ends: Tensor
    mass: Tensor
    unit: float  # every value is a multiple of this power of two; 0: not so

    @classmethod
    def from_sketch(
        cls, lowest: Tensor, highest: Tensor, sketch: Tensor, covering_scale: Tensor, low_bits: Tensor | None = None
    ) -> Distribution:
        """`covering_scale`: that of the grid which covers everything; much finer units than its step do not matter."""
        low, high = lowest.double(), highest.double()
        extremes = [end for end in {low.item(), high.item()} if end != 0]
        bins = [b for b in sketch.nonzero().flatten().tolist() if b not in (0, _BINS // 2)]
        edges = _sketch_edges()
        near, far = edges[[b % (_BINS // 2) for b in bins]], edges[[b % (_BINS // 2) + 1 for b in bins]]
        count = sketch[bins]

        unit = min(_lowest_set_bit(near), _lowest_set_bit(torch.tensor(extremes, dtype=torch.float64)))
        evidence = count[far - near < unit].sum()
        step = float(covering_scale)
        coarse = max(step, (high.clamp(min=0) - low.clamp(max=0)).item() * 2**-16)
        places = _places_in_a_bin(low_bits)
        finer = low_bits is not None and places > 1 and len(bins) > 0  # some value is no multiple of its bin's width
        refuted = finer and (far - near).max() / places < unit
        if unit < step / _LATTICE_MAX_SPAN or evidence < _LATTICE_EVIDENCE or refuted:
            unit = 0.0

        points, intervals = [], []
        for b, magnitude, beyond, mass in zip(bins, near.tolist(), far.tolist(), count.tolist(), strict=True):
            sign = -1 if b >= _BINS // 2 else 1
            inside = [end for end in extremes if end * sign > 0 and magnitude <= abs(end) < beyond][:mass]
            points += [(end, 1.0) for end in inside]
            mass -= len(inside)
            start, end = sorted((sign * magnitude, sign * beyond))
            start, end = max(start, low.item()), min(end, high.item())
            if mass == 0:
                continue
            spacing = max(unit, (beyond - magnitude) / places)
            few = spacing < math.inf and beyond - magnitude <= _LATTICE_POINTS * spacing
            many = spacing < math.inf and beyond - magnitude <= _COARSE_POINTS * spacing
            if (few and spacing >= step / _LATTICE_MAX_SPAN) or (not few and many and spacing >= coarse):
                multiples = [i * spacing for i in range(math.ceil(start / spacing), math.floor(end / spacing) + 1)]
                multiples = [m for m in multiples if magnitude <= abs(m) < beyond]
                points += [(m, mass / len(multiples)) for m in multiples]
            elif start == end:
                points.append((start, float(mass)))
            else:
                intervals.append((start, end, float(mass)))
        x, x_mass = torch.tensor(points, dtype=torch.float64).reshape(-1, 2).unbind(1)
        starts, ends, masses = torch.tensor(intervals, dtype=torch.float64).reshape(-1, 3).unbind(1)
        return cls(x, x_mass, starts, ends, masses, unit)

    def cost(self, scale: Tensor, zero_point: Tensor, quant_min: int, quant_max: int, *, gamma: float = 1.0) -> Tensor:
        """Squared error of encodings (0-dim or 1-dim); what rounds off the grid, half a step beyond its ends, weighs `gamma`."""
        scale = scale.double().reshape(-1, 1)
        low, high = (quant_min - zero_point.reshape(-1, 1)) * scale, (quant_max - zero_point.reshape(-1, 1)) * scale

        def integral(x: Tensor) -> Tensor:  # of the weighted squared error from 0 to x
            t = torch.minimum(torch.maximum(x, low - scale / 2), high + scale / 2) / scale
            f = t.round()
            off = x - torch.minimum(torch.maximum(x, low), high)  # signed: errors to the left of zero count down
            far = (off.abs() ** 3 - (scale / 2) ** 3).clamp(min=0) * off.sign()
            return scale**3 * (f / 12 + (t - f) ** 3 / 3) + gamma * far / 3

        spread = (integral(self.ends) - integral(self.starts)) / (self.ends - self.starts)
        rounded = torch.minimum(torch.maximum((self.points / scale).round() * scale, low), high)
        error = self.points - rounded
        weighted = error**2 * torch.where(error.abs() > scale / 2, gamma, 1.0)
        return (spread * self.mass).sum(1) + (weighted * self.point_mass).sum(1)

    @property
    def total(self) -> Tensor:
        return self.mass.sum() + self.point_mass.sum()


def _lossless(low: Tensor, high: Tensor, unit: float, quant_min: int, quant_max: int, symmetric: bool) -> tuple[Tensor, Tensor] | None:
    """The range whose scale is the least half, quarter ... of `unit` for which the multiples of it in ``[low, high]`` fit the grid."""
    covering, zero_point = choose_qparams(low.double(), high.double(), quant_min, quant_max, symmetric=symmetric)
    if unit == 0 or unit < covering:
        return None
    while unit >= 2 * covering:
        unit /= 2
    start = (quant_min - zero_point) * unit if symmetric else low.double().clamp(max=0)
    return start.to(low.dtype), (start + (quant_max - quant_min) * unit).to(low.dtype)


def _percentile_of_sketch(lowest: Tensor, highest: Tensor, sketch: Tensor, percentile: float) -> tuple[Tensor, Tensor]:
    side = _BINS // 2
    edges = _sketch_edges()
    low, high = lowest.double(), highest.double()
    zeros = sketch[0] + sketch[side]
    # every bin in ascending order of its values: negative, zero, positive
    starts = torch.cat([-edges[2:].flip(0), torch.zeros(1, dtype=torch.float64), edges[1:-1]]).clamp(low, high)
    ends = torch.cat([-edges[1:-1].flip(0), torch.zeros(1, dtype=torch.float64), edges[2:]]).clamp(low, high)
    counts = torch.cat([sketch[side + 1 : side + _FINITE_BINS].flip(0), zeros[None], sketch[1:_FINITE_BINS]])
    dropped = counts.sum().double() * ((100 - percentile) / 200)

    def quantile(starts: Tensor, ends: Tensor, counts: Tensor) -> Tensor:
        before = counts.cumsum(0) - counts
        i = int(((counts > 0) & (before + counts >= dropped)).nonzero()[0])
        return starts[i] + (ends[i] - starts[i]) * ((dropped - before[i]) / counts[i])

    return quantile(starts, ends, counts), quantile(ends.flip(0), starts.flip(0), counts.flip(0))


def _entropy_threshold(histogram: Tensor, levels: int) -> int:
    """How many of the histogram's bins to keep; bins beyond are clipped into the last one kept."""
    total, divergences = histogram.sum(), torch.full((len(histogram) + 1,), math.inf, dtype=torch.float64)
    for kept in range(levels, len(histogram) + 1):
        inside = histogram[:kept]
        if inside[-1] == 0:
            continue
        reference = inside.clone()
        reference[-1] += histogram[kept:].sum()
        bounds = torch.arange(levels + 1) * kept // levels
        group = torch.bucketize(torch.arange(kept), bounds[1:], right=True)
        mass = torch.zeros(levels, dtype=torch.float64).index_add_(0, group, inside)
        occupied = torch.zeros(levels, dtype=torch.float64).index_add_(0, group, (inside > 0).double())
        coarse = (mass / occupied)[group] / inside.sum()
        p, q = reference[inside > 0] / total, coarse[inside > 0]
        divergences[kept] = (p * (p / q).log()).sum()
    return int((divergences <= divergences.min() + _ENTROPY_TIE).nonzero()[-1])


def _clip_by_entropy(
    low: Tensor, high: Tensor, starts: Tensor, ends: Tensor, mass: Tensor, quant_min: int, quant_max: int, symmetric: bool
) -> tuple[Tensor, Tensor]:
    low, high = low.clamp(max=0), high.clamp(min=0)
    steps, both_signs = quant_max - quant_min, bool(low < 0 < high)
    levels = (steps + 2) // 2 if symmetric or both_signs else steps + 1
    largest = torch.maximum(-low, high).double()
    if levels >= _ENTROPY_BINS or largest == 0:
        return low, high
    grid = torch.arange(_ENTROPY_BINS + 1, dtype=torch.float64)
    histogram = torch.zeros(_ENTROPY_BINS, dtype=torch.float64)
    for start, end, m in zip(starts / largest * _ENTROPY_BINS, ends / largest * _ENTROPY_BINS, mass, strict=True):
        if start == end:
            histogram[min(int(start), _ENTROPY_BINS - 1)] += m
        else:
            histogram += (torch.minimum(end, grid[1:]) - torch.maximum(start, grid[:-1])).clamp(min=0) * (m / (end - start))
    threshold = largest / _ENTROPY_BINS * _entropy_threshold(histogram, levels)
    return torch.maximum(low.double(), -threshold), torch.minimum(high.double(), threshold)


def _step_weight(method: str, gamma: float) -> float:
    """What the methods with a least cost have for the error of values that round off the grid; nothing else is one."""
    weights = {"mse": 1.0, "tf_enhanced": gamma}
    if method not in weights:
        raise ValueError(f"got method={method!r}; expected {', '.join(SEARCHES[:-1])} or {SEARCHES[-1]}")
    return weights[method]


def _search_one(
    lowest: Tensor,
    highest: Tensor,
    sketch: Tensor,
    low_bits: Tensor | None,
    grid: tuple[int, int],
    symmetric: bool,
    method: str,
    percentile: float,
    gamma: float,
) -> tuple[Tensor, Tensor]:
    if not lowest <= highest:
        return torch.full_like(lowest, math.inf), torch.full_like(lowest, -math.inf)
    if method == "minmax":
        return lowest, highest
    if method == "percentile":
        return _percentile_of_sketch(lowest, highest, sketch, percentile)
    if method == "entropy":
        side = _BINS // 2
        bins = [b for b in sketch.nonzero().flatten().tolist() if b not in (0, side)]
        edges = _sketch_edges()
        sign = torch.tensor([-1.0 if b >= side else 1.0 for b in bins], dtype=torch.float64)
        ends = (sign * edges[[b % side + 1 for b in bins]]).clamp(lowest.double(), highest.double()).abs()
        starts = (sign * edges[[b % side for b in bins]]).clamp(lowest.double(), highest.double()).abs()
        return _clip_by_entropy(lowest, highest, starts, ends, sketch[bins].double(), *grid, symmetric)
    covering = choose_qparams(lowest.double(), highest.double(), *grid, symmetric=symmetric)[0]
    seen = Distribution.from_sketch(lowest, highest, sketch, covering, low_bits)
    weight = _step_weight(method, gamma)
    lows, highs = candidate_ranges(lowest, highest, *grid, symmetric=symmetric)
    if len(lows) == 0:
        return lowest.clamp(max=0), highest.clamp(min=0)
    scale, zero_point = choose_qparams(lows, highs, *grid, symmetric=symmetric)
    cost = seen.cost(scale, zero_point, *grid, gamma=weight)
    best = int(cost.argmin())
    lossless = _lossless(lowest, highest, seen.unit, *grid, symmetric)
    if lossless is not None and cost[best] > 1e-6 * seen.total * scale[best].double() ** 2 / 12:
        return lossless
    return lows[best], highs[best]


def search_range(
    lowest: Tensor,
    highest: Tensor,
    sketch: Tensor,
    quant_min: int,
    quant_max: int,
    symmetric: bool = False,
    method: str = "tf_enhanced",
    *,
    percentile: float = 99.99,
    gamma: float = 3.0,
    low_bits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Twin of `qsim.ops.search_range` (docs/numerics.md, section 4).

    Examples
    --------
    >>> x = torch.randn(1000)
    >>> sketch = torch.bincount((x.view(torch.int32) >> 18) & 16383, minlength=16384)
    >>> low, high = search_range(x.min(), x.max(), sketch, -8, 7, symmetric=True)
    >>> bool(high < x.max())
    True
    """
    bits = [None] * lowest.numel() if low_bits is None else low_bits.reshape(-1)
    found = [
        _search_one(low, high, counts, seen, (quant_min, quant_max), symmetric, method, percentile, gamma)
        for low, high, counts, seen in zip(lowest.reshape(-1), highest.reshape(-1), sketch.reshape(-1, _BINS), bits, strict=True)
    ]
    lows, highs = zip(*found, strict=True) if found else ((), ())
    return (
        torch.tensor([float(v) for v in lows], dtype=lowest.dtype).reshape(lowest.shape),
        torch.tensor([float(v) for v in highs], dtype=lowest.dtype).reshape(lowest.shape),
    )
