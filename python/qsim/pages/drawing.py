"""Drawings as inline SVG, about a kilobyte each."""

from __future__ import annotations

import math
from collections.abc import Sequence


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
