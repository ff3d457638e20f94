"""Patterns that overflow in half precision sooner than their results tell: reported where the numbers come near the limit."""

from __future__ import annotations

from qsim.clinic.examination import Examination
from qsim.clinic.finding import Finding

_NEAR = 8.0  # within this factor of the limit: squares of values that are within a factor of 2.8


def patterns(exam: Examination) -> list[Finding]:
    """QS018: squares of a written-out norm, exponentials without a shift, running sums, within a factor of the limit."""
    findings = []
    for name, seen in exam.survey.operations.items():
        described = _pattern(exam, name)
        if described is not None and exam.limit / _NEAR < seen.largest <= exam.limit:
            pattern, fix = described
            evidence = {"pattern": pattern, "largest": seen.largest, "limit": exam.limit}
            findings.append(exam.finding("QS018", "warning", name, evidence, fix))
    return findings


def _pattern(exam: Examination, name: str) -> tuple[str, str] | None:
    op, flow = exam.seen(name).op, exam.flow
    if op in ("cumsum", "logcumsumexp", "cumprod"):
        return "running sum", "Compute running sums and integral images in float32, to the difference that makes them small again."
    readers = flow.readers.get(name, ())
    after = {exam.seen(reader).op for reader in readers}
    if op == "exp" and after & {"sum", "div", "truediv"}:
        return "softmax without shift", "Subtract the largest score first, or call torch.softmax."
    if _is_square(exam, name) and after & {"mean", "sum"}:
        return "squares of a norm", "Use F.layer_norm, F.rms_norm or F.normalize: engines compute these in float32."
    return None


def _is_square(exam: Examination, name: str) -> bool:
    op, site = exam.seen(name).op, exam.subject.sites.get(name)
    if op == "square":
        return True
    if op == "pow":
        return site is not None and any(value == 2 for value in site.steps[0].options.values())
    return op == "mul" and site is not None and site.tensors(0) is not None and site.tensors(0) == site.tensors(1)
