"""Half precision: the operations with which the output goes wrong, found by curing one after another in shadow executions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from qsim.clinic.checks.constants import is_data, lost_here, lost_nearby
from qsim.clinic.examination import Examination
from qsim.clinic.finding import Finding
from qsim.clinic.shadow import Trace
from qsim.clinic.trace import Row

_ROUNDS = 12  # each one finds all culprits that no other one stands before, and what the survey knows of those behind


def culprits(exam: Examination) -> list[Finding]:
    """QS010 to QS014 and QS016: what makes the output non-finite or far from float32, each cause once and where it begins.

    A culprit is an operation whose result is broken (it holds NaN or Inf that float32 does not have, or is further from float32 than
    the output may be) although nothing that it reads is. Its chain is what must stay in float32 with it: everything that hands its
    values on until they are back in range. The chain is then kept, and the next culprit looked for.
    """
    keep: set[str] = set()
    found: dict[str, Finding] = {}
    for _ in range(_ROUNDS):
        trace = exam.half.trace(frozenset(keep))
        exam.traces.append(trace)
        if trace.outcome.ok:
            return list(found.values())
        kept = len(keep)
        for name in _culprits(exam, trace):
            if name in keep:  # it stays broken because of what it reads: take in one operation more on each way to it
                more = _one_more(exam, name, keep)
                keep |= more
                if name in found:
                    found[name] = _with_more(exam, found[name], more)
            elif name not in found:
                finding = _finding(exam, trace, name)
                found[name] = finding
                keep |= {name, finding.op, *finding.evidence.get("chain", ())}
        if len(keep) == kept:  # nothing more to keep, and it is still wrong
            return [*found.values(), _unexplained(exam, trace)]
        if not exam.may_probe():
            break
    return list(found.values())


def _with_more(exam: Examination, finding: Finding, more: set[str]) -> Finding:
    """The finding with more operations in its chain."""
    chain = sorted({*finding.evidence.get("chain", ()), *more}, key=exam.flow.order.__getitem__)
    return replace(finding, evidence={**finding.evidence, "chain": chain})


def _one_more(exam: Examination, name: str, keep: set[str]) -> set[str]:
    """What is read by an operation, and by those that lead to it and are kept, and is not kept itself."""
    found: set[str] = set()
    left, met = [name], {name}
    while left:
        for producer in exam.flow.producers[left.pop()]:
            if producer not in keep:
                found.add(producer)
            elif producer not in met:
                met.add(producer)
                left.append(producer)
    return found


def _culprits(exam: Examination, trace: Trace) -> list[str]:
    """Broken operations that read nothing broken, and those behind them that overflow by their float32 values, whatever they read here."""
    flow, rows = exam.flow, trace.rows
    bound = exam.half.sqnr
    bad = {name for name, row in rows.items() if row.excess > 0 or row.sqnr < bound}
    suspects = bad | {name for name, row in rows.items() if row.flushed}
    led = _leading_out(exam, suspects) & bad
    begin: list[str] = []
    for among in (led, bad):  # all that is broken, if what leads out begins with something that was given NaN
        begin = begin or [name for name in flow.order if name in among and _begins(exam, rows[name], name, bad, suspects)]
    if not begin:
        begin = [name for name in flow.order if name in led and bad.isdisjoint(flow.producers[name])]
    behind = [name for name in flow.order if name in led and name not in begin and _overflows_first(exam, name)]
    return begin + [name for name in behind if not is_mask(exam, name)]


def _begins(exam: Examination, row: Row, name: str, bad: set[str], suspects: set[str]) -> bool:
    """Whether a result is broken although what it is computed from is not: not even in a few elements, unless they overflow just here."""
    if row.fed and not row.counts.overflows:
        return False
    return (bad if row.counts.overflows else suspects).isdisjoint(exam.flow.producers[name])


def _leading_out(exam: Examination, bad: set[str]) -> set[str]:
    """The broken operations that break what the model returns, by way of others; all of them where no such way is known."""
    results = {origin.source for origin in exam.subject.tape.results}
    found = {name for name in bad if any(step in results for step in exam.subject.sites[name].steps)}
    left = list(found)
    while left:
        new = [name for name in exam.flow.producers[left.pop()] if name in bad and name not in found]
        found.update(new)
        left += new
    return found or bad


def _overflows_first(exam: Examination, name: str) -> bool:
    """Whether a result overflows that is computed from results which do not, going by the float32 values."""
    return exam.seen(name).counts.overflows > 0 and not any(exam.seen(p).counts.overflows for p in exam.flow.producers[name])


def is_mask(exam: Examination, name: str) -> bool:
    """Whether a result overflows to -Inf alone, and in front of a softmax: exp makes 0 of it, as it makes of the number it was."""
    seen = exam.seen(name)
    if seen.highest > exam.limit or seen.lowest >= -exam.limit:
        return False
    readers = exam.flow.readers.get(name, ())
    softmaxes = ("softmax", "log_softmax", "logsumexp", "scaled_dot_product_attention")
    return bool(readers) and all(exam.seen(reader).op in softmaxes or is_mask(exam, reader) for reader in readers)


def chain_of(exam: Examination, name: str) -> list[str]:
    """What must stay in float32 with an operation: its readers until the values are back in the format, the first of those too."""

    def hands_on(reader: str) -> bool:
        seen = exam.seen(reader)
        return seen.counts.overflows > 0 or seen.sqnr < exam.half.sqnr

    return exam.flow.downstream(name, hands_on)


def _finding(exam: Examination, trace: Trace, name: str) -> Finding:
    row, seen = trace.rows[name], exam.seen(name)
    for constant in trace.constants:
        if constant.op == name and is_data(exam, constant):
            evidence: dict[str, Any] = {"input": constant.value, "limit": exam.limit}
            return exam.finding("QS010", "error", name, evidence, "Scale the data into the format's range before it reaches the model.")
    sums = seen.largest_sum > exam.limit and seen.counts.overflows == 0
    if row.counts.overflows == 0 or seen.counts.overflows == 0:  # else the numbers themselves are too large
        for constant in lost_nearby(exam, trace, name, broken=row.excess > 0):
            if constant.becomes or not sums:  # no epsilon matters beside a sum that overflows
                return lost_here(exam, constant, "error", name)
    chain = chain_of(exam, name)
    evidence = {"largest": seen.largest, "limit": exam.limit}
    if sums:
        evidence |= {"largest sum": seen.largest_sum, "accumulator": exam.target.accumulator}
        return exam.finding("QS011", "error", name, _with(evidence, chain), keep_fix(name, chain))
    if row.excess > 0 or seen.counts.overflows:  # going by float32 it overflows, once what it reads is right
        if row.counts.overflows == seen.counts.overflows == 0 and (vanished := _vanished(exam, name)):
            return _underflow(exam, vanished, [name, *chain])
        evidence |= {"overflowed": max(row.counts.overflows, seen.counts.overflows), "elements": row.counts.elements}
        return exam.finding("QS010", "error", name, _with(evidence, chain), keep_fix(name, chain))
    if seen.counts.underflows and seen.sqnr < exam.half.sqnr:
        return _underflow(exam, name, chain)
    if vanished := _vanished(exam, name):
        return _underflow(exam, vanished, [name, *chain])
    evidence |= {"sqnr": row.sqnr, "bound": exam.half.sqnr}
    fix = f"{keep_fix(name, chain)} Few bits are left of a small difference between large numbers: subtract what they share first."
    return exam.finding("QS016", "error", name, _with(evidence, chain), fix)


def _vanished(exam: Examination, name: str) -> str | None:
    """What an operation reads of which small values have become zero."""
    return next((p for p in exam.flow.producers[name] if exam.seen(p).counts.underflows), None)


def _underflow(exam: Examination, name: str, chain: list[str]) -> Finding:
    seen = exam.seen(name)
    counts = {"underflowed": seen.counts.underflows, "subnormal": seen.counts.subnormals, "elements": seen.counts.elements}
    evidence = {**counts, "largest": seen.largest, "smallest normal": exam.numbers.smallest_normal}
    fix = f"{keep_fix(name, chain)} Or scale the values up where they are made."
    return exam.finding("QS014", "error", name, _with(evidence, chain), fix)


def _unexplained(exam: Examination, trace: Trace) -> Finding:
    outcome = trace.outcome
    evidence: dict[str, Any] = {"sqnr": outcome.sqnr, "bound": exam.half.sqnr, "nonfinite": outcome.nonfinite}
    if outcome.error:
        evidence["error"] = outcome.error
    fix = "The output is not what float32 gives, and no single operation accounts for it: keep the operations of the plan in float32."
    return exam.finding("QS016", "error", outcome.first or "", evidence, fix)


def keep_fix(name: str, chain: Iterable[str]) -> str:
    """The advice to keep a chain in float32."""
    others = [link for link in chain if link != name]
    if not others:
        return f"Keep '{name}' in float32."
    shown = ", ".join(f"'{link}'" for link in others[:4]) + (f" and {len(others) - 4} more" if len(others) > 4 else "")
    return f"Keep '{name}' in float32 with its chain, {shown}: casting a result back in between is what overflows."


def _with(evidence: dict[str, Any], chain: list[str]) -> dict[str, Any]:
    return {**evidence, "chain": chain} if chain else evidence


def harmless_overflows(exam: Examination) -> list[Finding]:
    """QS010 as a warning: results that overflow with this data, and that the output does not show."""
    first = exam.traces[0]
    findings = []
    for name in exam.flow.order:
        row = first.rows.get(name)
        overflowed = row.counts.overflows if row is not None else 0
        if overflowed and _overflows_first(exam, name) and not is_mask(exam, name):
            chain = chain_of(exam, name)
            evidence = {"largest": exam.seen(name).largest, "limit": exam.limit, "overflowed": overflowed}
            findings.append(exam.finding("QS010", "warning", name, _with(evidence, chain), keep_fix(name, chain)))
    return findings
