"""Half precision: culprits of NaN, Inf and lost accuracy; constants and weights that the format loses; patterns that overflow early."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from qsim.clinic.checks.sums import kept_in, stagnates, stagnating_sum
from qsim.clinic.examination import Examination
from qsim.clinic.finding import Finding, Severity
from qsim.clinic.shadow import Trace
from qsim.clinic.trace import LostConstant, TraceRow
from qsim.numbers.sqnr import sqnr
from qsim.ops.round_to_format import count_format_

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
    """Whether what was lost is what the model was given, not a constant: by its size, and an epsilon by where it came from."""
    if not constant.raw or constant.parameter:
        return False
    if constant.becomes == 0:
        site = exam.subject.sites.get(constant.op)
        return site is not None and any(o.kind == "input" for step in site.steps for found in step.operands.values() for o in found)
    return abs(constant.value) <= min(exam.survey.largest_input, _MASKS)


def _guards_small_values(exam: Examination, constant: LostConstant) -> bool:
    """Whether an epsilon that becomes zero is added to, or bounds, values that come near it."""
    seen = exam.survey.operations.get(constant.op)
    return seen is not None and 0 <= seen.lowest < exam.numbers.smallest_normal and seen.highest > 0


def lost_nearby(exam: Examination, trace: Trace, name: str, *, broken: bool) -> list[LostConstant]:
    """Lost constants that explain why a result is broken (NaN or Inf) or wrong: it reads them, or what was computed with them."""
    near = _leading_to(exam, name)
    found = [c for c in trace.constants if c.op == name or not near.isdisjoint({c.op, *c.readers})]
    harmful = [c for c in found if not is_data(exam, c) and (broken or math.isinf(c.becomes) or c.op == name)]
    return sorted(harmful, key=lambda c: (math.isfinite(c.becomes), c.op != name))


def _leading_to(exam: Examination, name: str) -> set[str]:
    """An operation, and those from which it can be reached in a few hops."""
    near = {name}
    for _ in range(_HOPS):
        near |= {producer for link in near for producer in exam.flow.producers.get(link, ())}
    return near


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
    before = _leading_to(exam, shows)
    if constant.op not in flow.order:  # what only moves values takes its precision from what it reads: keep what made that
        return sorted(before & {shows, *flow.producers.get(shows, ())}, key=flow.order.__getitem__)
    links = (before & after) | {shows} - {constant.op}
    beyond = flow.downstream(shows, lambda name: exam.seen(name).counts.overflows > 0) if exam.seen(shows).counts.overflows else []
    return sorted({*links, *beyond} - {constant.op}, key=flow.order.__getitem__)


def tiny_weights(exam: Examination) -> list[Finding]:
    """QS015: a weight most of whose energy is in numbers that become zero or subnormal. Small values beside large ones do no harm."""
    findings = []
    for name, weight in exam.subject.model.named_parameters():
        if weight.dim() < 2 or not weight.is_floating_point() or not weight.numel():
            continue
        flat = weight.detach().double()
        energy = flat.square().sum().item()
        lost = flat[flat.abs() < exam.numbers.smallest_normal].square().sum().item()
        if not math.isfinite(energy) or sqnr(energy, lost) >= exam.half.sqnr:
            continue
        counts = torch.zeros(6, dtype=torch.int64, device=weight.device)
        count_format_(weight.detach(), exam.half.format, counts)
        *_, zeros, subnormals = counts.tolist()
        evidence = {"zero": zeros, "subnormal": subnormals, "elements": weight.numel(), "largest": flat.abs().max().item()}
        readers = [site for site, s in exam.subject.sites.items() if name in s.steps[0].constants.values()]
        fix = f"Scale '{name}' up by a power of two and its result down again, or keep the operation in float32."
        findings.append(exam.finding("QS015", "warning", readers[0] if readers else name, {"weight": name, **evidence}, fix))
    return findings


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
        return "squares of a norm", "Use F.layer_norm or F.normalize: one operation of files, which engines compute in float32."
    return None


def _is_square(exam: Examination, name: str) -> bool:
    op, site = exam.seen(name).op, exam.subject.sites.get(name)
    if op == "square":
        return True
    if op == "pow":
        return site is not None and any(value == 2 for value in site.steps[0].options.values())
    return op == "mul" and site is not None and site.tensors(0) is not None and site.tensors(0) == site.tensors(1)


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


def _begins(exam: Examination, row: TraceRow, name: str, bad: set[str], suspects: set[str]) -> bool:
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
        if constant.op == name and constant.becomes and is_data(exam, constant):
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
        evidence |= {"largest sum": seen.largest_sum, **kept_in(exam)}
        return exam.finding("QS011", "error", name, _with(evidence, chain), keep_fix(name, chain))
    if row.excess <= 0 and stagnates(exam, seen):
        return stagnating_sum(exam, name, "error", chain)
    if row.excess > 0 or seen.counts.overflows:  # going by float32 it overflows, once what it reads is right
        if row.counts.overflows == seen.counts.overflows == 0 and (vanished := _vanished(exam, name)):
            return _underflow(exam, vanished, [name, *chain])
        most = max(row.counts, seen.counts, key=lambda counts: counts.overflows)  # of the batches that ran in the format, or of all
        evidence |= {"overflowed": most.overflows, "elements": most.elements}
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
