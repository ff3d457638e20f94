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
        +Inf where nothing differs, zeros for zeros included; -Inf where the reference is zero and the other is not, and where the noise
        alone is Inf; NaN where the signal is not finite, or the noise is NaN.

    Examples
    --------
    >>> sqnr(25.0, 0.25), sqnr(0.0, 0.0), sqnr(0.0, 1.0), sqnr(25.0, math.inf)
    (20.0, inf, -inf, -inf)
    """
    if not math.isfinite(signal) or math.isnan(noise):
        return math.nan
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal and math.isfinite(noise) else -math.inf
