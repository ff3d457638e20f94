"""Calibration data: too little of it, or not what the model will see."""

from __future__ import annotations

import math
from typing import Any

from qsim.clinic.examination import Examination
from qsim.clinic.finding import Finding
from qsim.clinic.ranges import Ranges, Span

_DECLARED, _BY_HALVES = 2.0, 4.0
_SAMPLES = 32
_GROWTH = 2.0  # a bit of every value of the tensor
_SHOWN = 4


def other_scale(exam: Examination) -> list[Finding]:
    """QS033: calibration data whose root mean square differs from that of the evaluation data by a factor of 2, which is one bit; without
    evaluation data the first half of the batches beside the second, by a factor of 4, as batches differ among each other."""
    ranges = exam.ranges
    if ranges is None:
        return []
    middle = len(ranges.spans) // 2
    if exam.evaluation is not None:
        names, least = ("calibration", "evaluation"), _DECLARED
        (left, a), (right, b) = ranges.given(), exam.evaluation.given()
    elif middle:
        names, least = ("first half", "second half"), _BY_HALVES
        (left, a), (right, b) = ranges.given(slice(middle)), ranges.given(slice(middle, None))
    else:
        return []
    ratio = max(a, b) / min(a, b) if min(a, b) > 0 else 1.0 if a == b else math.inf
    if ratio < least:
        return []
    evidence: dict[str, Any] = {"ratio": ratio}
    for name, span, rms in zip(names, (left, right), (a, b), strict=True):
        evidence |= {f"rms, {name}": rms, f"range, {name}": f"[{span.lowest:.4g}, {span.highest:.4g}]"}
    fix = "Feed both through the same preprocessing (0..255 or 0..1, the same mean and deviation), and calibrate on data that is shuffled."
    return [Finding("QS033", "warning", "", "", evidence, fix)]


def too_few(exam: Examination) -> list[Finding]:
    """QS034: fewer than 32 samples. Of exchangeable samples the next one is beyond a range of n with probability 1 / (n + 1) at each end:
    below 32, one in 16 samples in use is clipped somewhere in every tensor. Worth knowing, no fault: QS035 tells when a range grows."""
    ranges = exam.ranges
    if ranges is None or ranges.samples >= _SAMPLES or not ranges.samples:
        return []
    evidence = {"samples": ranges.samples, "batches": len(ranges.spans), "clipped": 2 / (ranges.samples + 1)}
    fix = f"Calibrate on more data: some hundred samples, at least {_SAMPLES}."
    return [Finding("QS034", "info", "", "", evidence, fix)]


def still_growing(exam: Examination) -> list[Finding]:
    """QS035: ranges that the last batch made at least twice as wide as all batches before it; the first such operation is named."""
    ranges = exam.ranges
    if ranges is None or len(ranges.spans) < 2:
        return []
    growth = {name: _growth(ranges, name) for name in exam.subject.sites}
    grown = [name for name, factor in growth.items() if factor >= _GROWTH]
    if not grown:
        return []
    first = grown[0]
    before = ranges.over(first, slice(-1))
    evidence: dict[str, Any] = {
        "factor": growth[first],
        "width before": before.width,
        "width": ranges.over(first).width,
        "batches": len(ranges.spans),
    }
    evidence |= {"operations": len(grown), "named": ", ".join(grown[:_SHOWN])}
    fix = "Calibrate on more batches, until the last ones change nothing; leave out a batch that is not like the others."
    return [exam.finding("QS035", "warning", first, evidence, fix)]


def _growth(ranges: Ranges, name: str) -> float:
    """The factor by which the last batch widened a range; 1 where it is not known before."""
    before, last = ranges.over(name, slice(-1)), ranges.spans[-1].get(name, Span())
    return before.union(last).width / before.width if before.width > 0 else 1.0
