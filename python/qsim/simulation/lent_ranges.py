"""Ranges for what few values reached: those of all that do the same, as the experts of a mixture do, and the passes of a loop.

An observer's state is a sum: what the others saw is added to what one saw itself, in a copy. Observers keep what is their own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from qsim.numbers.encoding import Encoding
from qsim.numbers.spec import TensorSpec
from qsim.quantizers.observer import Observer
from qsim.quantizers.quantizer import Quantizer
from qsim.simulation.simulation import Simulation

# From so few values a range is chosen by luck: 0.1 dB of SQNR at 8 bits (docs/numerics.md, section 4). Layers of one
# shape but for the first axis (`find_alike`) see equally many values, whatever their number; experts do not.
_FEW = 10_000
_TIMES = 4


class Lent(NamedTuple):
    """What a quantizer is to have its range from, and a sentence that says so."""

    observer: Observer
    sentence: str


class Borrower(NamedTuple):
    """A quantizer that gets its encoding from what an observer saw that is not its own (`qsim.quantizers.observed.WithObserver`)."""

    quantizer: Quantizer
    observer: Observer

    def use(self, spec: TensorSpec, chosen: Encoding | None) -> Encoding:
        return self.quantizer.use(spec, chosen)


def lent(sim: Simulation) -> dict[str, Lent]:
    """The quantizers that fewer than `_FEW` values reached, and no fourth of what reached others that do the same."""
    quantizers = sim.quantizers()
    return {key: found for group in sim.decisions.alike for key, found in _of_group({key: quantizers[key] for key in group})}


def _of_group(group: Mapping[str, Quantizer]) -> Iterator[tuple[str, Lent]]:
    observers = {key: quantizer.observer for key, quantizer in group.items() if quantizer.enabled}
    finite = {key: observer.counts.elements - observer.counts.nonfinite for key, observer in observers.items()}
    most = max(finite.values(), default=0)
    poor = [key for key, count in finite.items() if count < _FEW and count * _TIMES < most]
    shapes = {observer.held_shape for observer in observers.values()} - {None}
    if not poor or len(shapes) > 1:  # a range for each of as many channels as one has is none for others
        return
    fullest = max(finite, key=lambda key: finite[key])
    whole = copy.deepcopy(observers[fullest])
    for key, observer in observers.items():
        if key != fullest:
            whole.merge(observer)
    for key in poor:
        met = "no value" if finite[key] == 0 else "few values"
        yield (
            key,
            Lent(whole, f"'{key}' met {met} (an expert that few tokens come to?): its range is of all that do the same, as '{fullest}'"),
        )
