"""Accumulators as narrow as the format: sums inside operations that overflow on the way, or stop growing."""

from __future__ import annotations

from typing import Any

from qsim.clinic.examination import Examination
from qsim.clinic.finding import Finding

_FIX = "Keep it in float32, or add up less at a time: pool in two steps, or divide before adding."


def overflowing_sums(exam: Examination) -> list[Finding]:
    """QS011: a sum that is larger than the format, in an operation whose result fits into it."""
    findings = []
    for name, seen in exam.survey.operations.items():
        largest = max(seen.largest_sum, seen.largest_partial)
        if largest > exam.limit >= seen.largest:
            evidence: dict[str, Any] = {"largest sum": largest, "limit": exam.limit, "largest result": seen.largest}
            findings.append(exam.finding("QS011", "warning", name, {**evidence, "accumulator": exam.target.accumulator}, _FIX))
    return findings


def stagnating_sums(exam: Examination) -> list[Finding]:
    """QS017: a sum that becomes so large that the numbers added to it are below half a step of it, and are lost.

    In float16 that is from 2048 times the number added: eps, the step at 1, is 2^-10, and half a step is lost. The mean magnitude stands
    for the numbers added.
    """
    most = 2 / exam.numbers.eps
    findings = []
    for name, seen in exam.survey.operations.items():
        if seen.largest_terms > most and seen.largest_sum <= exam.limit:
            evidence = {"sum over mean": seen.largest_terms, "limit": most, "accumulator": exam.target.accumulator}
            findings.append(exam.finding("QS017", "warning", name, evidence, _FIX))
    return findings
