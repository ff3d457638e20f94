"""Integer grids that do not fit what they hold: weights, biases, concatenations."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from qsim.clinic.examination import Examination
from qsim.clinic.finding import Finding
from qsim.clinic.ranges import Ranges, Span
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
            fix = "Use one scale per output channel (TensorSpec(axis=0)); where the runtime has one per weight, equalize the layers first."
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

    Info for a parameter among them, such as a class token: it is part of the model, and no data changes what it gets.
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
            findings.append(exam.finding("QS032", "info" if (name, i) in ranges.parameters else "warning", name, evidence, fix))
    return findings


def _ranges(exam: Examination) -> Ranges:
    return exam.ranges if exam.ranges is not None else Ranges()


def _by_channel(weight: Tensor, axis: int) -> Tensor:
    return weight.detach().float().movedim(axis, 0).flatten(1)


def _scale(span: Span) -> Tensor | None:
    """The scale of an int8 grid over a range."""
    if not span.lowest <= span.highest:
        return None
    return choose_qparams(torch.tensor(span.lowest), torch.tensor(span.highest), -128, 127)[0]
