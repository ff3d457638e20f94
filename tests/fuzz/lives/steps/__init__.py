"""What may be done to a simulation: a function a step, by its name. Steps are drawn by `share`."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from ..life import Life

Do = Callable[[Life, random.Random], None]


@dataclass(frozen=True)
class Step:
    """One kind of step.

    Attributes
    ----------
    do : callable
        ``do(life, rng)``; raises `Skip` where there is nothing to do.
    share : float
        How often it is drawn.
    pure : bool
        Whether it leaves the simulation as it was: every tensor, every result.
    keeps : bool
        Whether it leaves modes, switches and what learns as they were.
    parameters : bool
        Whether it leaves the model's parameters and buffers as they were, and torch's random numbers.
    """

    do: Do
    share: float = 1.0
    pure: bool = False
    keeps: bool = False
    parameters: bool = False


STEPS: dict[str, Step] = {}


def step(name: str, *, share: float = 1.0, pure: bool = False, keeps: bool = False, parameters: bool = False) -> Callable[[Do], Do]:
    """Names a step."""

    def named(do: Do) -> Do:
        STEPS[name] = Step(do, share, pure, keeps, parameters)
        return do

    return named


from . import copies, quantizers, reports, restoring, weights  # noqa: E402, F401  # they fill STEPS
