"""Integers: channels, biases and joins that a grid serves badly, and data that are too few or another scale."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from qsim.clinic.batch_ranges import Ranges, Span
from qsim.clinic.examination import Examination
from qsim.clinic.finding import Finding
from qsim.ops.choose_qparams import choose_qparams
from qsim.quantizers.bias import bias_scale

_INT32 = torch.iinfo(torch.int32).max
_LOST = 4.0  # bits of 8: what is left is an int4 grid, and int4 without care costs most networks their accuracy


def wide_channels(exam: Examination) -> list[Finding]:
    """QS030: weights whose widest output channel leaves the median channel 4 bits or fewer, if they share one scale.

    A warning for targets with one scale per weight; with one per output channel it is worth knowing, for other exports of the model.
    """
    findings = []
    for name, product in _ranges(exam).products.items():
        largest = _by_channel(product.weight, product.axis).abs().amax(1)
        largest = largest[largest > 0]  # a channel of zeros needs no bits
        lost = math.log2((largest.max() / largest.median()).item()) if largest.numel() else 0.0
        if lost >= _LOST:
            evidence = {"bits lost in the median channel": lost, "widest": largest.max().item(), "median": largest.median().item()}
            fix = "Use one scale per output channel (TensorSpec(axis=0)); where the runtime has one per weight, call qsim.equalize."
            findings.append(exam.finding("QS030", "info" if exam.target.per_channel else "warning", name, evidence, fix))
    return findings


def overflowing_biases(exam: Examination) -> list[Finding]:
    """QS031: biases beyond int32 at the scale of the products: ``|bias| > (2^31 - 1) * input scale * weight scale``.

    Exactly that limit, with the scales of min-max ranges. A warning for targets that hold biases so; info for the others.
    """
    ranges, findings = _ranges(exam), []
    for name, product in ranges.products.items():
        if product.bias is None or (scale := _scale(ranges.operands.get((name, 0), Span()))) is None:
            continue
        largest = _by_channel(product.weight, product.axis).abs().amax(1)
        weights = choose_qparams(-largest, largest, -127, 127, symmetric=True)[0]
        if not exam.target.per_channel:
            weights = weights.max()
        steps = product.bias.detach().abs().double() / bias_scale(scale.double(), weights.double(), product.bias.numel())
        over = int((steps > _INT32).sum())
        if over:
            evidence = {"channels": over, "of": steps.numel(), "largest": steps.max().item(), "limit": float(_INT32)}
            fix = "Zero the channels whose weights vanish, or calibrate with qsim.QuantSim, which raises their scales until the bias fits."
            findings.append(exam.finding("QS031", "warning" if exam.target.int32_bias else "info", name, evidence, fix))
    return findings


def uneven_joins(exam: Examination) -> list[Finding]:
    """QS032: inputs of a concatenation whose range is a sixteenth of the whole or less: the common grid leaves them 4 bits.

    Info where that one is a constant of the model, such as a class token: training has met it beside the others, and no data changes it.
    """
    ranges, findings = _ranges(exam), []
    joins: dict[str, dict[int, Span]] = {}
    for (name, i), span in ranges.operands.items():
        if name not in ranges.products and span.width > 0:
            joins.setdefault(name, {})[i] = span
    for name, spans in joins.items():
        whole = Span()
        for span in spans.values():
            whole = whole.union(span)
        i, narrow = min(spans.items(), key=lambda item: item[1].width)
        lost = math.log2(whole.width / narrow.width)
        if lost >= _LOST:
            evidence: dict[str, Any] = {"bits lost": lost, "input": i, "width": narrow.width, "width of all": whole.width}
            fix = "Bring the inputs to one scale before they are joined, or leave the concatenation, and what it joins, in float."
            findings.append(exam.finding("QS032", "info" if _is_constant(exam, name, i) else "warning", name, evidence, fix))
    return findings


def _is_constant(exam: Examination, name: str, i: int) -> bool:
    site = exam.subject.sites.get(name)
    origins = frozenset() if site is None else site.steps[0].operands.get((0, i), frozenset())
    return bool(origins) and all(origin.kind == "const" for origin in origins)


def _ranges(exam: Examination) -> Ranges:
    return exam.ranges if exam.ranges is not None else Ranges()


def _by_channel(weight: Tensor, axis: int) -> Tensor:
    return weight.detach().float().movedim(axis, 0).flatten(1)


def _scale(span: Span) -> Tensor | None:
    """The scale of an int8 grid over a range."""
    if not span.lowest <= span.highest:
        return None
    return choose_qparams(torch.tensor(span.lowest), torch.tensor(span.highest), -128, 127)[0]


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
