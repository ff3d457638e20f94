"""The histogram of what a quantizer observed, as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from qsim.quantizers.sketch import Distribution, even_edges

_BINS, _STEP, _HEIGHT = 80, 4, 48  # 80 bars, 4 units wide


def histogram(seen: Distribution | None, ends: tuple[float | None, float | None], told: str) -> str:
    """Logarithms of counts over what was observed and what the grid spans; bars outside of the grid in another color.

    "" where there is no distribution, or all of it is one value and there is no range.

    Parameters
    ----------
    seen : Distribution, optional
    ends : (float or None, float or None)
        Of the grid.
    told : str
        What is said of the grid in words.
    """
    if seen is None:
        return ""
    first, last = ends
    low = seen.lowest if first is None else min(seen.lowest, first)
    high = seen.highest if last is None else max(seen.highest, last)
    if (
        first is not None and last is not None and last - first > 40 * (seen.highest - seen.lowest) > 0
    ):  # a format's own range, such as that of float16: the bars would be one
        low, high = seen.lowest, seen.highest
    if not low < high:
        return ""
    counts = seen.histogram(even_edges(low, high, _BINS)).tolist()
    tallest = math.log1p(max(counts))
    heights = [round(_HEIGHT * math.log1p(count) / tallest) for count in counts]

    def x(value: float) -> float:
        return min(max((value - low) / (high - low), 0.0), 1.0) * _BINS * _STEP

    parts = []
    left, right = (0.0, float(_BINS * _STEP)) if first is None or last is None else (x(first), x(last))
    if first is not None:
        parts.append(f'<rect class="range" x="{left:.4g}" width="{right - left:.4g}" height="{_HEIGHT}"/>')
    middles = [(i + 0.5) * _STEP for i in range(_BINS)]
    inside = [height if left <= middle <= right else 0 for height, middle in zip(heights, middles, strict=True)]
    outside = [height - within for height, within in zip(heights, inside, strict=True)]
    parts += [f'<path class="{name}" d="{_steps(bars)}"/>' for name, bars in (("inside", inside), ("outside", outside)) if any(bars)]
    if low < 0 < high:
        parts.append(f'<path class="zero" d="M{x(0):.4g} 0V{_HEIGHT}"/>')
    if first is not None:
        parts.append(f'<path class="edge" d="M{left:.4g} 0V{_HEIGHT}M{right:.4g} 0V{_HEIGHT}"/>')
    told = f"observed {seen.lowest:.4g} to {seen.highest:.4g}; {told}"
    size = f'viewBox="-2 0 {_BINS * _STEP + 4} {_HEIGHT}" preserveAspectRatio="none"'
    drawn = f'<svg class="histogram" {size} role="img"><title>{escape(told)}</title>{"".join(parts)}</svg>'
    return f'{drawn}<small class="ends"><span>{low:.3g}</span><span>{high:.3g}</span></small>'


def _steps(heights: Sequence[int]) -> str:
    """The outline of bars, as a path: runs of equal bars are one."""
    path, start = [f"M0 {_HEIGHT}"], 0
    for i in range(1, len(heights) + 1):
        if i == len(heights) or heights[i] != heights[start]:
            path.append(f"V{_HEIGHT - heights[start]}h{(i - start) * _STEP}")
            start = i
    return "".join(path) + f"V{_HEIGHT}z"
