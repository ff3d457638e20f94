"""Drawings as inline SVG, about a kilobyte each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from qsim.quantizers.sketch import even_edges
from qsim.report.summary import Row
from qsim.table import percent

_BINS, _STEP, _HEIGHT = 80, 4, 48  # 80 bars, 4 units wide


def histogram(row: Row) -> str:
    """Logarithms of counts over what was observed and what the grid spans; bars outside of the grid in another color.

    "" where there is no distribution, or all of it is one value and there is no range.
    """
    seen = row.distribution
    if seen is None:
        return ""
    low = seen.lowest if row.low is None else min(seen.lowest, row.low)
    high = seen.highest if row.high is None else max(seen.highest, row.high)
    if _is_far(seen.highest - seen.lowest, row):  # a format's own range, such as that of float16: the bars would be one
        low, high = seen.lowest, seen.highest
    if not low < high:
        return ""
    counts = seen.histogram(even_edges(low, high, _BINS)).tolist()
    tallest = math.log1p(max(counts))
    heights = [round(_HEIGHT * math.log1p(count) / tallest) for count in counts]

    def x(value: float) -> float:
        return min(max((value - low) / (high - low), 0.0), 1.0) * _BINS * _STEP

    parts = []
    left, right = (0.0, float(_BINS * _STEP)) if row.low is None or row.high is None else (x(row.low), x(row.high))
    if row.low is not None:
        parts.append(f'<rect class="range" x="{left:.4g}" width="{right - left:.4g}" height="{_HEIGHT}"/>')
    middles = [(i + 0.5) * _STEP for i in range(_BINS)]
    inside = [height if left <= middle <= right else 0 for height, middle in zip(heights, middles, strict=True)]
    outside = [height - within for height, within in zip(heights, inside, strict=True)]
    parts += [f'<path class="{name}" d="{_steps(bars)}"/>' for name, bars in (("inside", inside), ("outside", outside)) if any(bars)]
    if low < 0 < high:
        parts.append(f'<path class="zero" d="M{x(0):.4g} 0V{_HEIGHT}"/>')
    if row.low is not None:
        parts.append(f'<path class="edge" d="M{left:.4g} 0V{_HEIGHT}M{right:.4g} 0V{_HEIGHT}"/>')
    told = f"observed {seen.lowest:.4g} to {seen.highest:.4g}; range {row.range}; {percent(row.clipped) or 'nothing'} clipped"
    size = f'viewBox="-2 0 {_BINS * _STEP + 4} {_HEIGHT}" preserveAspectRatio="none"'
    drawn = f'<svg class="histogram" {size} role="img"><title>{escape(told)}</title>{"".join(parts)}</svg>'
    return f'{drawn}<small class="ends"><span>{low:.3g}</span><span>{high:.3g}</span></small>'


def _is_far(width: float, row: Row) -> bool:
    return width > 0 and row.low is not None and row.high is not None and row.high - row.low > 40 * width


def _steps(heights: Sequence[int]) -> str:
    """The outline of bars, as a path: runs of equal bars are one."""
    path, start = [f"M0 {_HEIGHT}"], 0
    for i in range(1, len(heights) + 1):
        if i == len(heights) or heights[i] != heights[start]:
            path.append(f"V{_HEIGHT - heights[start]}h{(i - start) * _STEP}")
            start = i
    return "".join(path) + f"V{_HEIGHT}z"


def bar(share: float, bad: bool = False) -> str:
    """A bar whose length is a share from 0 to 1."""
    length = 100 * min(max(share, 0.0), 1.0) if not math.isnan(share) else 0.0
    kind = "outside" if bad else "inside"
    return (
        '<svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect class="range" width="100" height="10"/><rect class="{kind}" width="{length:.3g}" height="10"/></svg>'
    )


def lines(series: dict[str, Sequence[float]], top: float) -> str:
    """Values from 0 to `top` along the model, one line each, named by the CSS class that colors it; NaN and Inf leave gaps."""
    width, height = 1000, 200
    drawn = "".join(f'<path class="grid" d="M0 {height * i // 4}H{width}"/>' for i in range(1, 4))
    for name, values in series.items():
        path, pen = [], "M"
        for i, value in enumerate(values):
            if not math.isfinite(value):
                pen = "M"
                continue
            x = width * (i + 0.5) / len(values)
            path.append(f"{pen}{x:.5g} {height * (1 - min(max(value / top, 0.0), 1.0)):.4g}")
            pen = "L"
        drawn += f'<path class="line {name}" d="{"".join(path)}"/>'
    return f'<svg class="lines" viewBox="0 0 {width} {height}" preserveAspectRatio="none" aria-hidden="true">{drawn}</svg>'
