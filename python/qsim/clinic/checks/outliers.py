"""Outliers of activations, which one scale for the tensor pays with the bits of everything else: few channels, or few tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from qsim.clinic.examination import Examination
from qsim.clinic.finding import Finding
from qsim.clinic.peaks import Peaks

_LOST = 4.0  # bits of 8, as of weights (QS030)
_PERSISTENT = 8.0  # a channel of outliers is larger than others in most tokens; one that is large in a few tokens is QS037's
_NEAR = 0.25  # of the largest: counted with it
_FEW = 0.125  # of all channels
_SHOWN = 4


def outlier_channels(exam: Examination) -> list[Finding]:
    """QS036: channels of what a product reads that are 16 times as large as the median one, throughout the data (Dettmers et al. 2022,
    section 4; Xiao et al. 2023, section 3)."""

    def large_ones(peaks: Peaks) -> list[int]:
        return (peaks.channels >= _NEAR * peaks.channels.max()).nonzero().flatten().tolist()

    def lost(peaks: Peaks) -> float:
        few = peaks.median_ratio >= _PERSISTENT and len(large_ones(peaks)) <= _FEW * peaks.channels.numel()
        return _bits(peaks.channel_ratio) if few else 0.0

    def evidence(peaks: Peaks) -> dict[str, Any]:
        large = large_ones(peaks)
        shown = ", ".join(map(str, large[:_SHOWN])) + (", ..." if len(large) > _SHOWN else "")
        return {"bits lost in the median channel": _bits(peaks.channel_ratio), "channels": shown, "of": peaks.channels.numel()}

    def fix(operand: str) -> str:
        if operand in ("key", "second operand"):
            return (
                "Give each channel of the keys a scale in the cache, kv_cache=(TensorSpec(bits=8, axis=-1, method='minmax'), 8), or leave "
                "the operation in float."
            )
        return (
            "Move them into the weights before simulating: qsim.equalize(model, example_inputs, data, methods=['smooth_quant']); or "
            "spread them over all channels: methods=['rotation']. A scale for each token does not help."
        )

    return _worst(exam, "QS036", lost, evidence, fix)


def outlier_tokens(exam: Examination) -> list[Finding]:
    """QS037: tokens that are 16 times as large as the median one, such as the first one of a prompt (Sun et al. 2024, section 2)."""

    def evidence(peaks: Peaks) -> dict[str, Any]:
        return {"bits lost in the median token": _bits(peaks.token_ratio), "largest": peaks.largest_token}

    fix = (
        "Give each token a scale of its own (qsim.w8a8_dynamic(), or TensorSpec(method='dynamic', axis=-1) for these activations), or "
        "leave the operation in float."
    )
    return _worst(exam, "QS037", lambda peaks: _bits(peaks.token_ratio), evidence, lambda _: fix)


def _worst(
    exam: Examination,
    code: str,
    lost: Callable[[Peaks], float],
    evidence: Callable[[Peaks], dict[str, Any]],
    fix: Callable[[str], str],
) -> list[Finding]:
    """One finding, on the operation that loses most, with how many others there are: all that read one residual stream have it alike."""
    found = {} if exam.ranges is None else exam.ranges.peaks
    bits = {place: loss for place, peaks in found.items() if (loss := lost(peaks)) >= _LOST}
    if not bits:
        return []
    name, operand = place = max(bits, key=lambda each: bits[each])
    others = list(dict.fromkeys(other for other, _ in bits))
    shown = evidence(found[place]) | {"operand": operand, "operations": len(others), "named": ", ".join(others[:_SHOWN])}
    return [exam.finding(code, "warning", name, shown, fix(operand))]


def _bits(factor: float) -> float:
    return math.log2(factor) if factor > 1 else 0.0
