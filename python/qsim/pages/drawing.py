"""Drawings as inline SVG, about a kilobyte each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence


def bar(share: float, bad: bool = False) -> str:
    """A bar whose length is a share from 0 to 1."""
    length = 100 * min(max(share, 0.0), 1.0) if not math.isnan(share) else 0.0
    kind = "outside" if bad else "inside"
    return (
        '<svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect class="range" width="100" height="10"/><rect class="{kind}" width="{length:.3g}" height="10"/></svg>'
    )


def lines(series: Mapping[str, Sequence[float]], top: float) -> str:
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


def front(along: Sequence[float], values: Sequence[float], picked: int) -> str:
    """Points with a line through them, from the least to the largest of both; the one that is `picked` stands out."""
    width, height, margin = 1000, 200, 12

    def place(values: Sequence[float], length: int) -> list[float]:
        low, high = min(values), max(values)
        return [margin + (length - 2 * margin) * (value - low) / ((high - low) or 1.0) for value in values]

    places = [(x, height - y) for x, y in zip(place(along, width), place(values, height), strict=True)]
    drawn = "".join(f'<path class="grid" d="M0 {height * i // 4}H{width}"/>' for i in range(1, 4))
    drawn += '<path class="line local" d="M{}"/>'.format("L".join(f"{x:.5g} {y:.5g}" for x, y in places))
    for i, (x, y) in enumerate(places):  # of no length: a round end of the stroke, which is round whatever the picture's shape
        drawn += f'<path class="dot{" accumulated" if i == picked else " local"}" d="M{x:.5g} {y:.5g}h0"/>'
    return f'<svg class="lines" viewBox="0 0 {width} {height}" preserveAspectRatio="none" aria-hidden="true">{drawn}</svg>'
