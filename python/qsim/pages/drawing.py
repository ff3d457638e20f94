"""Small drawings as inline SVG."""

from __future__ import annotations

import math


def bar(share: float, bad: bool = False) -> str:
    """A bar whose length is a share from 0 to 1."""
    length = 100 * min(max(share, 0.0), 1.0) if not math.isnan(share) else 0.0
    kind = "outside" if bad else "inside"
    return (
        '<svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect class="range" width="100" height="10"/><rect class="{kind}" width="{length:.3g}" height="10"/></svg>'
    )
