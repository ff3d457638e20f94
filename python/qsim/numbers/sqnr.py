"""Signal-to-quantization-noise ratio."""

from __future__ import annotations

import math


def sqnr(signal: float, noise: float) -> float:
    """``10 log10(signal / noise)`` in dB.

    Parameters
    ----------
    signal, noise : float
        Sums of squares: of the reference, and of the difference.

    Returns
    -------
    float
        +Inf where nothing differs, zeros for zeros included; -Inf where the reference is zero and the other is not; NaN where a sum is
        not finite.

    Examples
    --------
    >>> sqnr(25.0, 0.25), sqnr(0.0, 0.0), sqnr(0.0, 1.0)
    (20.0, inf, -inf)
    """
    if not (math.isfinite(signal) and math.isfinite(noise)):
        return math.nan
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf
