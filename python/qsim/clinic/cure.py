"""From an examination to a plan: the fewest operations in float32 with which the shadow agrees with the model."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Any

from qsim.analysis.evidence import Evidence
from qsim.analysis.search import Effort, Found, search
from qsim.clinic.examination import Examination
from qsim.clinic.examined_model import ExaminedModel
from qsim.clinic.finding import Finding
from qsim.config.float_plan import Ordinal
from qsim.deploy.engine_plan import Plan
from qsim.operations.onnx_types import onnx_type


def cure(exam: Examination, findings: Iterable[Finding] = ()) -> Plan:
    """The plan for an examined model; searched for within what is left of the examination's budget.

    Parameters
    ----------
    exam : Examination
    findings : iterable of Finding
        What they name as errors, or as part of a chain, is suspected.
    """
    shadow, target = exam.shadow, exam.target
    if target.integers:
        return Plan((), "int8", target.name, note="which layers integers ruin is asked of a calibrated simulation: QuantSim.float_plan")
    if shadow is None:
        return Plan((), "float32", target.name, irreducible=True)
    if exam.traces and exam.traces[0].outcome.ok:
        return Plan((), shadow.format, target.name, irreducible=True, sqnr=exam.traces[0].outcome.sqnr)
    if not exam.may_probe():
        return Plan((), shadow.format, target.name, note="the budget was spent before the search")
    errors = [finding for finding in findings if finding.severity == "error"]
    named = [name for finding in errors for name in (finding.op, *finding.evidence.get("chain", ()))]
    probes = None if exam.probes is None else exam.probes - shadow.probes
    seconds = None if math.isinf(exam.ends) else exam.ends - time.perf_counter()
    found = search(evidence_of(exam, named), shadow.probe, Effort(probes, seconds, "qsim.doctor"))
    return plan_of(found, exam.subject, format=shadow.format, target=target.name)


def evidence_of(exam: Examination, named: Iterable[str] = ()) -> Evidence:
    """What a survey in float32 says of the operations: whose results overflow, and how much rounding its result costs each."""
    sites = exam.subject.sites
    leaving = [name for name in sites if exam.seen(name).counts.overflows]
    return Evidence(
        list(sites),
        exam.flow.readers,
        leaving,
        [name for name in named if name in sites],
        {name: -exam.seen(name).sqnr for name in sites},
    )


def plan_of(found: Found[Any], subject: ExaminedModel, *, format: str, target: str) -> Plan:
    """What a search found, with what deployment files need to know of the model."""
    return Plan(
        found.keep,
        format,
        target,
        found.irreducible,
        found.probes,
        found.outcome.sqnr,
        found.note,
        {name: ordinal for name, ordinal in _ordinals(subject).items() if name in found.keep},
        {norm: layer for norm, layer in subject.folding.folded.items() if layer in found.keep},
    )


def _ordinals(subject: ExaminedModel) -> dict[str, Ordinal]:
    alike: dict[tuple[str, str], list[str]] = {}
    for name, site in subject.sites.items():
        if not site.steps[0].leaf:
            alike.setdefault((site.steps[0].path, onnx_type(site.op)), []).append(name)
    return {name: Ordinal(index, len(names)) for names in alike.values() for index, name in enumerate(names)}
