"""Timing in one process: candidates take turns, so what disturbs the machine disturbs all of them, and the minimum is kept."""

from __future__ import annotations

import gc
from collections.abc import Callable
from time import perf_counter

_SAMPLE = 200e-6  # seconds; short calls are repeated until one sample takes about this long


def _sample(call: Callable[[], object], repeats: int) -> float:
    start = perf_counter()
    for _ in range(repeats):
        call()
    return (perf_counter() - start) / repeats


def interleaved(candidates: dict[str, Callable[[], object]], *, seconds: float = 1.0, warmup: int = 3) -> dict[str, float]:
    """Minimal seconds per call of each candidate.

    Parameters
    ----------
    candidates : dict of name to function without arguments
        Compare few at a time: their memory adds up, and a copy that leaves the cache is another copy.
    seconds : float
        Time spent on all candidates together, after warming up; at least five rounds are run.
    warmup : int
        Calls of each candidate before the first measurement.

    Examples
    --------
    >>> seconds = interleaved({"clone": x.clone, "neg": x.neg})
    >>> seconds["neg"] / seconds["clone"]
    1.02
    """
    repeats, best = {}, {}
    for name, call in candidates.items():
        for _ in range(warmup):
            call()
        best[name] = _sample(call, 1)
        repeats[name] = max(1, int(_SAMPLE / best[name]))
    collecting = gc.isenabled()
    gc.disable()
    try:
        rounds, stop = 0, perf_counter() + seconds
        while rounds < 5 or perf_counter() < stop:
            for name, call in candidates.items():
                best[name] = min(best[name], _sample(call, repeats[name]))
            rounds += 1
    finally:
        if collecting:
            gc.enable()
    return best
