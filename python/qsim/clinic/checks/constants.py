"""Constants that half precision turns into Inf or 0: mask fills, epsilons, bounds, numbers in the formulas."""

from __future__ import annotations

import math
from typing import Any

from qsim.clinic.examination import Examination
from qsim.clinic.finding import Finding, Severity
from qsim.clinic.shadow import Trace
from qsim.clinic.trace import LostConstant

_CLOSE = 2.0  # a bound is in play where the values come within this factor of the format's limit
_HOPS = 2  # x / (x.var() + eps).sqrt(): the division breaks, two operations after the epsilon is lost
_MASKS = 1e30  # from here on a number is no quantity, even in the data
_BOUNDS = frozenset({"clamp", "clip", "clamp_min", "clamp_max", "maximum", "minimum", "hardtanh", "nan_to_num", "threshold"})


def constants(exam: Examination) -> list[Finding]:
    """QS012 and QS013 as warnings: lost constants that the output does not show with this data, and may with other data."""
    findings = []
    for constant in exam.traces[0].constants:
        if math.isinf(constant.becomes):
            bound = constant.func in _BOUNDS and exam.seen(constant.op).largest * _CLOSE < exam.limit
            if not bound and not is_data(exam, constant):
                findings.append(lost_here(exam, constant, "warning"))
        elif _guards_small_values(exam, constant):
            findings.append(lost_here(exam, constant, "warning"))
    return findings


def is_data(exam: Examination, constant: LostConstant) -> bool:
    """Whether what overflowed is what the model was given, not a constant."""
    site = exam.subject.sites.get(constant.op)
    if site is not None and not any(o.kind == "input" for step in site.steps for found in step.operands.values() for o in found):
        return False
    return constant.raw and not constant.parameter and abs(constant.value) <= min(exam.survey.largest_input, _MASKS)


def _guards_small_values(exam: Examination, constant: LostConstant) -> bool:
    """Whether an epsilon that becomes zero is added to, or bounds, values that come near it."""
    seen = exam.survey.operations.get(constant.op)
    return seen is not None and 0 <= seen.lowest < exam.numbers.smallest_normal and seen.highest > 0


def lost_nearby(exam: Examination, trace: Trace, name: str, *, broken: bool) -> list[LostConstant]:
    """Lost constants that explain why a result is broken (NaN or Inf) or wrong: it reads them, or what was computed with them."""
    near = {name}
    for _ in range(_HOPS):
        near |= {producer for link in near for producer in exam.flow.producers.get(link, ())}
    found = [c for c in trace.constants if c.op == name or not near.isdisjoint({c.op, *c.readers})]
    harmful = [c for c in found if not is_data(exam, c) and (broken or math.isinf(c.becomes) or c.op == name)]
    return sorted(harmful, key=lambda c: (math.isfinite(c.becomes), c.op != name))


def lost_here(exam: Examination, constant: LostConstant, severity: Severity, shows: str = "") -> Finding:
    """The finding on a constant; `shows`: the operation whose result is broken because of it."""
    numbers = exam.numbers
    chain = _between(exam, constant, shows) if shows else []
    evidence: dict[str, Any] = {"constant": constant.value, "becomes": constant.becomes}
    if constant.parameter:
        evidence["parameter"] = _name(exam, constant)
    if math.isinf(constant.becomes):
        evidence["limit"] = exam.limit
        safe = -1e4 if constant.value < 0 else numbers.largest
        what = "parameter" if constant.parameter else "number"
        fix = f"Use a {what} that the format has, such as {safe:g}: {constant.value:.4g} becomes {constant.becomes:g}"
        fix += ", and 0 times that, or a row full of it under a softmax, is NaN." if constant.value < 0 else "."
    else:
        evidence["smallest"] = numbers.smallest_normal
        fix = f"Use at least {numbers.smallest_normal:.2g}, or keep the operation in float32: {constant.value:.4g} becomes 0."
    if chain:
        evidence["chain"] = chain
    code = "QS012" if math.isinf(constant.becomes) else "QS013"
    return exam.finding(code, severity, constant.op, evidence, fix, constant.source)


def _name(exam: Examination, constant: LostConstant) -> str:
    """Which of the parameters that an operation reads holds the constant."""
    site = exam.subject.sites.get(constant.op)
    names = set(site.steps[0].constants.values()) if site is not None else set()
    holding = [name for name, p in exam.subject.model.named_parameters() if name in names and bool((p == constant.value).any())]
    return ", ".join(holding)


def _between(exam: Examination, constant: LostConstant, shows: str) -> list[str]:
    """What must stay in float32 for the constant to keep its value: from where it is read to where the result is in range again."""
    flow = exam.flow
    after = set(flow.downstream(constant.op, lambda _: True)) if constant.op in flow.order else constant.readers
    before = {shows}
    for _ in range(_HOPS):
        before |= {producer for link in before for producer in flow.producers.get(link, ())}
    if constant.op not in flow.order:  # what only moves values takes its precision from what it reads: keep what made that
        return sorted(before & {shows, *flow.producers.get(shows, ())}, key=flow.order.__getitem__)
    links = (before & after) | {shows} - {constant.op}
    beyond = flow.downstream(shows, lambda name: exam.seen(name).counts.overflows > 0) if exam.seen(shows).counts.overflows else []
    return sorted({*links, *beyond} - {constant.op}, key=flow.order.__getitem__)
