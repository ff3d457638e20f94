"""From an examination to a plan: the fewest operations in float32 with which the shadow agrees with the model."""

from __future__ import annotations

import time
from collections.abc import Iterable

from qsim.clinic.evidence import Evidence
from qsim.clinic.examination import Examination
from qsim.clinic.plan import Plan
from qsim.clinic.search import Budget, search


def cure(exam: Examination, named: Iterable[str] = ()) -> Plan | None:
    """Search for a plan, within what is left of the examination's budget.

    Parameters
    ----------
    exam : Examination
    named : iterable of str
        Operations that findings name, as culprits or in the chain of one.

    Returns
    -------
    Plan or None
        None for a target without a float format, or where nothing is left of the budget.
    """
    shadow, format = exam.shadow, exam.target.format
    if shadow is None or format is None or not exam.may_probe():
        return None
    probes = None if exam.probes is None else exam.probes - shadow.probes
    seconds = exam.ends - time.perf_counter()
    found = search(evidence_of(exam, named), shadow.probe, Budget(probes, None if seconds == float("inf") else seconds))
    return Plan.of(found, exam.subject, format=format, target=exam.target.name)


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
