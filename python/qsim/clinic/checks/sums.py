"""Inside operations: what files store there, and sums where accumulators are as narrow as the format, that overflow or stop growing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qsim.clinic.examination import Examination
from qsim.clinic.finding import Finding, Severity
from qsim.clinic.survey import Seen
from qsim.operations.half import stops_at

_FIX = "Keep it in float32, or add up less at a time: pool in two steps, or divide before adding."
_FIX_STORED = "Keep it in float32, or scale down what it reads."


def is_narrow(exam: Examination) -> bool:
    """Whether sums inside an operation are kept in the format."""
    return exam.target.accumulator == exam.target.format


def kept_in(exam: Examination) -> dict[str, Any]:
    """In what the numbers inside an operation are kept, as evidence."""
    return {"accumulator": exam.target.accumulator} if is_narrow(exam) else {"stored in": exam.target.format}


def overflowing_sums(exam: Examination) -> list[Finding]:
    """QS011: a number inside that is larger than the format, in an operation whose result fits into it."""
    findings = []
    for name, seen in exam.survey.operations.items():
        largest = max(seen.largest_sum, seen.largest_partial)
        if largest > exam.limit >= seen.largest:
            evidence: dict[str, Any] = {"largest sum": largest, "limit": exam.limit, "largest result": seen.largest}
            findings.append(exam.finding("QS011", "warning", name, evidence | kept_in(exam), _FIX if is_narrow(exam) else _FIX_STORED))
    return findings


def stagnating_sums(exam: Examination) -> list[Finding]:
    """QS017 as a warning: sums that stop growing, where the output does not show it."""
    return [stagnating_sum(exam, name, "warning") for name, seen in exam.survey.operations.items() if stagnates(exam, seen)]


def stagnates(exam: Examination, seen: Seen) -> bool:
    """Whether a sum inside an operation is so large that the numbers added to it are below half a step of it, and are lost.

    The mean magnitude of the numbers added stands for each of them. A sum that leaves the format before is another finding.
    """
    return is_narrow(exam) and seen.largest_terms > stops_at(exam.half.format) and seen.largest_sum <= exam.limit


def stagnating_sum(exam: Examination, name: str, severity: Severity, chain: Sequence[str] = ()) -> Finding:
    """QS017."""
    evidence: dict[str, Any] = {"sum over mean": exam.seen(name).largest_terms, "limit": stops_at(exam.half.format)}
    evidence["accumulator"] = exam.target.accumulator
    return exam.finding("QS017", severity, name, {**evidence, "chain": list(chain)} if chain else evidence, _FIX)
