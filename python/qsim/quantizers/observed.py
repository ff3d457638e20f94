"""Encodings of what was observed, those of a whole model together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from qsim.errors import CalibrationError
from qsim.numbers.encoding import Encoding
from qsim.numbers.range_methods import RANGE_METHODS
from qsim.numbers.spec import TensorSpec
from qsim.quantizers.observer import Observer, encoding_of_range
from qsim.quantizers.sketch import search_sketches

_Search = tuple[torch.device, int, int, bool, str, float, float]  # device, grid, method and its parameters
_MOST_TOGETHER = 128  # sketches, which are copied side by side: 16 MiB


class WithObserver(Protocol):
    """What is asked of a quantizer."""

    @property
    def observer(self) -> Observer: ...

    def use(self, spec: TensorSpec, chosen: Encoding | None) -> Encoding: ...


def encode_observed(quantizers: Sequence[WithObserver], specs: Sequence[TensorSpec]) -> list[Encoding | CalibrationError]:
    """Choose encodings from what was observed, by specs that differ from the quantizers' in the range method only.

    Sketches that are searched alike are searched in one call: on a GPU side by side, on the CPU by all threads.

    Returns
    -------
    list of Encoding or CalibrationError
        The encoding that the quantizer uses from now on, or why it has none; it then keeps what it had.
    """
    found: dict[int, Encoding | CalibrationError] = {}
    groups: dict[_Search, list[int]] = {}
    for i, (quantizer, spec) in enumerate(zip(quantizers, specs, strict=True)):
        observer = quantizer.observer
        if not spec.has_scale:
            found[i] = quantizer.use(spec, None)
            continue
        try:
            observer.check_choice(spec)
        except CalibrationError as error:
            found[i] = error
            continue
        if RANGE_METHODS[spec.method].takes_range:
            found[i] = quantizer.use(spec, encoding_of_range(observer.lowest, observer.highest, spec))
            continue
        grid = spec.quant_min, spec.quant_max, spec.symmetric
        groups.setdefault((observer.lowest.device, *grid, spec.method, spec.percentile, spec.gamma), []).append(i)
    for alike in groups.values():
        for begin in range(0, len(alike), _MOST_TOGETHER):
            members = alike[begin : begin + _MOST_TOGETHER]
            ranges = search_sketches([quantizers[i].observer.seen(specs[i]) for i in members], specs[members[0]])
            for i, (low, high) in zip(members, ranges, strict=True):
                found[i] = quantizers[i].use(specs[i], encoding_of_range(low, high, specs[i]))
    return [found[i] for i in range(len(quantizers))]
