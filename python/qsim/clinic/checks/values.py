"""What is wrong in float32 already: NaN and Inf in data, parameters, results and gradients; widths; the mode of the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map_only

from qsim.clinic.examination import Examination
from qsim.clinic.finding import Finding, Severity
from qsim.runs.copies import copied
from qsim.runs.snapshot import unchanged
from qsim.training.watch import NonFiniteError, Watch

_FLOAT32 = torch.finfo(torch.float32).max
_SHOWN = 8  # operations of a chain that are named
_AVERAGES = ("running_mean", "running_var")
_RUN_AGAIN = "or call reset_running_stats() and run the model in training mode on clean data: one batch with NaN breaks averages for good"
_SKIP = "and train with qsim.clip_grad_norm_, which skips such steps"


def nonfinite_data(exam: Examination) -> list[Finding]:
    """QS002: NaN or Inf in the batches."""
    found = exam.survey.inputs
    if not found:
        return []
    evidence = {"elements": sum(found.values()), "batches": len(found), "first batch": next(iter(found))}
    return [Finding("QS002", "error", "", "", evidence, "Clean the data first: torch.nan_to_num, or leave these samples out.")]


def nonfinite_parameters(exam: Examination) -> list[Finding]:
    """QS003: NaN or Inf in parameters and buffers. A buffer of -Inf is a mask."""
    findings = []
    parameters = {name for name, _ in exam.model.named_parameters()}
    for name, t in (*exam.model.named_parameters(), *exam.model.named_buffers()):
        if t.is_floating_point() and t.numel():
            nans, infs = int(t.isnan().sum()), int(t.isinf().sum())
            masks = 0 if name in parameters else int(t.isneginf().sum())
            if nans or infs > masks:
                evidence = {"tensor": name, "nans": nans, "infs": infs, "elements": t.numel()}
                fix = f"Restore '{name}' from a checkpoint from before it broke, {_RUN_AGAIN if name.endswith(_AVERAGES) else _SKIP}."
                findings.append(Finding("QS003", "error", name.rpartition(".")[0], "", evidence, fix))
    return findings


def births(exam: Examination) -> list[Finding]:
    """QS001: operations that make NaN or Inf of finite numbers, those alone that no other one led to."""
    survey, flow = exam.survey, exam.flow
    findings: list[Finding] = []
    explained: set[str] = set()
    named: set[str] = set()
    for birth in survey.births:
        harmless = not survey.outputs and not birth.nans  # as log(0) in front of a softmax is
        led_to = birth.batch in survey.inputs and not birth.finite
        if birth.name in explained | named or harmless or led_to:
            continue
        named.add(birth.name)
        chain = flow.downstream(birth.name, lambda name: exam.seen(name).nonfinite > 0) if birth.name in flow.order else []
        explained |= set(chain)
        evidence: dict[str, Any] = {"nans": birth.nans, "infs": birth.infs, "batch": birth.batch, "operands": birth.shown}
        if chain:
            evidence["chain"] = chain
        severity: Severity = "error" if survey.outputs else "warning"
        findings.append(exam.finding("QS001", severity, birth.name, evidence, _cure(exam.seen(birth.name).op)))
    if survey.output_nans and not survey.births and not survey.inputs and not nonfinite_parameters(exam):
        fix = "Look where no operation is seen: scripted modules, extensions, autograd functions of your own."
        findings.append(Finding("QS001", "error", "", "", {"nans": survey.output_nans, "where": "the output"}, fix))
    return findings


def _cure(op: str) -> str:
    """What usually helps, by the function."""
    if op in ("div", "truediv", "reciprocal", "rsqrt", "rdiv", "rtruediv", "true_divide", "divide"):
        return "Keep the divisor away from zero: add an epsilon to it, or clamp it from below."
    if op in ("log", "log2", "log10", "log1p", "sqrt", "pow"):
        return "Clamp the operand into the function's domain first."
    if op in ("exp", "exp2", "expm1", "sinh", "cosh", "softplus", "logsumexp"):
        return "Subtract the largest operand first, as torch.softmax does, or clamp it from above."
    if op in ("softmax", "log_softmax", "scaled_dot_product_attention"):
        return "No row may be masked throughout: leave one entry of it, or fill the mask with a large finite number."
    return "Scale the operands down, or clamp them, so that the result stays finite."


def widths(exam: Examination) -> list[Finding]:
    """QS005: finite tensors whose range is wider than float32: the scale of an integer grid over it would be Inf. Where they become so."""
    operations, insertions = exam.survey.operations, exam.survey.insertions
    wide = {name for name, seen in operations.items() if _is_wide(seen.lowest, seen.highest)}
    put_in = {name for name, seen in insertions.items() if _is_wide(*seen.result)}
    places = [
        (name, seen.lowest, seen.highest, seen.source)
        for name, seen in operations.items()
        if name in wide and wide.isdisjoint(exam.flow.producers.get(name, ())) and put_in.isdisjoint(seen.inserted)
    ]
    for name in (n for n in insertions if n in put_in):
        seen = insertions[name]
        if not any(_is_wide(*operand) for operand in seen.operands.values()):
            places.append((name, *seen.result, seen.source))
    fix = "Bound it, or fill masks with less: a range like this has no float32 scale; under a softmax 30 below the rest is zero."
    return [
        exam.finding("QS005", "warning", name, {"lowest": lowest, "highest": highest, "limit": _FLOAT32}, fix, source)
        for name, lowest, highest, source in places
    ]


def _is_wide(lowest: float, highest: float) -> bool:
    return highest > lowest and highest - lowest > _FLOAT32


def unobserved(exam: Examination) -> list[Finding]:
    """QS006: operations of the recorded model that none of the batches reached, and weights of layers that none of them called."""
    sites = exam.subject.sites
    missing = [
        name
        for name, site in sites.items()
        if not site.training_only and not site.steps[0].transformed and name not in exam.survey.operations
    ]
    weights = [name for name in _unread(exam) if name.rpartition(".")[0] not in {exam.module_of(name) for name in missing}]
    if not missing and not weights:
        return []
    evidence: dict[str, Any] = {"operations": len(missing), "first": ", ".join(missing[:_SHOWN])} if missing else {}
    evidence |= {"parameters": len(weights), "first of these": ", ".join(weights[:_SHOWN])} if weights else {}
    fix = "Give data that takes this branch too, or nothing is known of it."
    if missing:
        return [exam.finding("QS006", "warning", missing[0], evidence, fix)]
    return [Finding("QS006", "warning", weights[0].rpartition(".")[0], "", evidence, f"{fix} Take out what is never called.")]


def _unread(exam: Examination) -> list[str]:
    """Parameters of modules that no batch called and no function got, but for those that training alone reads, or that were folded."""
    subject = exam.subject
    training = {step.leaf or step.path for site in subject.sites.values() if site.training_only for step in site.steps}
    scripted = tuple(f"{path}." if path else "" for path, m in subject.model.named_modules() if isinstance(m, torch.jit.ScriptModule))
    ignored = training | subject.folding.folded.keys()
    names = [name for name, _ in subject.model.named_parameters() if name not in exam.survey.read]
    return [name for name in names if name.rpartition(".")[0] not in ignored and not name.startswith(scripted)]


def gradients(exam: Examination) -> list[Finding]:
    """QS004: operations whose gradient is NaN or Inf while what it is computed from is finite; of the first batch that has any."""
    loss = exam.loss
    if loss is None:
        return []
    model = copied(exam.model)
    for i, batch in enumerate(exam.batches):
        try:
            with unchanged(model), torch.enable_grad(), Watch(model):
                given = tree_map_only(Tensor, torch.clone, batch)
                loss(exam.subject.call(model, given, exam.forward), given).backward()
        except NonFiniteError as error:
            first = error.events[0]
            if first.backward:
                fix = "Keep its operand away from where the derivative is infinite: a root or a norm at 0, a division by 0."
                evidence = {"operation": first.op, "makes": first.what, "batch": i}
                return [Finding("QS004", "error", "" if first.module == "outside the model" else first.module, "", evidence, fix)]
            if first.module == "outside the model":
                evidence = {"operation": first.op, "makes": first.what, "batch": i, "where": "the loss"}
                fix = "Use a loss that takes logits, or clamp what it takes the logarithm of."
                return [Finding("QS001", "error", "", "", evidence, fix)]
    return []


def training_mode(exam: Examination) -> list[Finding]:
    """QS020: BatchNorms that would normalize with the batch's own statistics, and change the running ones. It is examined in eval mode."""
    found = [name for name, m in exam.model.named_modules() if isinstance(m, _BatchNorm) and m.training]
    if not found:
        return []
    evidence = {"modules": len(found), "first": found[0]}
    fix = "Call model.eval() before preparing, folding or exporting: in training mode outputs depend on the other samples of the batch."
    return [Finding("QS020", "warning", found[0], "", evidence, fix)]
