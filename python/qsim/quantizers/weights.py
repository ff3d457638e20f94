"""Encodings of weights: chosen from the weights themselves, those of a whole model together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from qsim import ops
from qsim.errors import CalibrationError
from qsim.numbers.encoding import Encoding
from qsim.numbers.spec import TensorSpec
from qsim.quantizers.observer import Observer, encoding_of_range

_Search = tuple[torch.device, str, float, float]  # what one call has in common: device, method, percentile, gamma


class OfWeight(Protocol):
    """What is asked of the quantizer of a weight."""

    @property
    def observer(self) -> Observer: ...

    def reset(self) -> None: ...

    def observe(self, x: Tensor) -> None: ...

    def use(self, spec: TensorSpec, chosen: Encoding | None) -> Encoding: ...


def look_at(quantizer: OfWeight, weight: Tensor, spec: TensorSpec) -> CalibrationError | None:
    """Have the quantizer's observer see the weight and nothing else. Returns why the weight has no range, if so."""
    quantizer.observer.check_method(spec)
    quantizer.reset()
    quantizer.observe(weight)
    if not spec.has_scale:
        return None
    try:
        quantizer.observer.check(spec)
    except CalibrationError as error:
        return error
    return None


def search_encodings(weights: Sequence[Tensor], specs: Sequence[TensorSpec]) -> list[Encoding | None]:
    """The encoding that each spec's method chooses for its weight; None for one without a scale. One search per device and method.

    Parameters
    ----------
    weights : sequence of Tensor
        With a finite value in every channel or block.
    specs : sequence of TensorSpec
    """
    groups: dict[_Search, list[int]] = {}
    for i, (weight, spec) in enumerate(zip(weights, specs, strict=True)):
        if spec.has_scale:
            groups.setdefault((weight.device, spec.method, spec.percentile, spec.gamma), []).append(i)
    found: list[Encoding | None] = [None] * len(weights)
    for (_, method, percentile, gamma), members in groups.items():
        chosen = [specs[i] for i in members]
        lows, highs = ops.search_range_weights(
            [weights[i].detach() for i in members],
            [spec.quant_min for spec in chosen],
            [spec.quant_max for spec in chosen],
            axis=[spec.axis for spec in chosen],
            block_size=[spec.block_size for spec in chosen],
            symmetric=[spec.symmetric for spec in chosen],
            method=method,
            percentile=percentile,
            gamma=gamma,
        )
        for i, low, high in zip(members, lows, highs, strict=True):
            found[i] = encoding_of_range(low, high, specs[i])
    return found


def encode_weights(
    quantizers: Sequence[OfWeight], weights: Sequence[Tensor], specs: Sequence[TensorSpec]
) -> list[Encoding | CalibrationError]:
    """`Quantizer.compute_encoding_from` of several weights in one search, with specs that differ from theirs in the range method only.

    Returns
    -------
    list of Encoding or CalibrationError
        The encoding that the quantizer uses from now on, or why it has none; it then keeps what it had.
    """
    problems = [look_at(*each) for each in zip(quantizers, weights, specs, strict=True)]
    sound = [i for i, problem in enumerate(problems) if problem is None]
    searched = [i for i in sound if not specs[i].is_running]
    chosen = dict(zip(searched, search_encodings([weights[i] for i in searched], [specs[i] for i in searched]), strict=True))
    chosen |= {i: quantizers[i].observer.encoding(specs[i]) for i in sound if specs[i].is_running}
    encodings = {i: quantizers[i].use(specs[i], chosen[i]) for i in sound}
    return [encodings[i] if problem is None else problem for i, problem in enumerate(problems)]
