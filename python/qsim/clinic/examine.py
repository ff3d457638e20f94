"""`qsim.doctor`: examine a model on data, for a target."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from itertools import chain
from os import PathLike
from typing import Any

from torch import nn

from qsim.call_fit import tells_arguments
from qsim.clinic.batch_ranges import Ranges, ranges_of
from qsim.clinic.checks import BATCH_NORM_CHECKS, FLOAT_CHECKS, HALF_CHECKS, INTEGER_CHECKS
from qsim.clinic.cure import cure
from qsim.clinic.diagnosis import Diagnosis, ordered
from qsim.clinic.examination import Examination, Loss
from qsim.clinic.examined_model import ExaminedModel
from qsim.clinic.example import example_of
from qsim.clinic.finding import Finding
from qsim.clinic.flow import Flow
from qsim.clinic.reproduction import save, smallest
from qsim.clinic.shadow import Shadow
from qsim.clinic.survey import survey
from qsim.clinic.targets import Target, target_named
from qsim.graph.execute.simulated import refuse_simulated
from qsim.options import check_function, check_number, check_whole
from qsim.runs.batches import Forward, iterate
from qsim.runs.offloaded import with_values
from qsim.runs.report_subject import subject_of
from qsim.runs.runnable import check_module
from qsim.runs.snapshot import unchanged
from qsim.stages import Stages

_KEPT = 8  # batches at most that are run again and again in half precision; the others are surveyed in float32


@tells_arguments("qsim.doctor")
def doctor(
    model: nn.Module,
    data: Iterable[Any],
    target: str | Target = "float32",
    *,
    evaluation: Iterable[Any] | None = None,
    forward: Forward | None = None,
    loss: Loss | None = None,
    max_batches: int | None = None,
    seconds: float | None = None,
    probes: int | None = None,
    sqnr: float | None = None,
    save_input: str | PathLike[str] | None = None,
    progress: bool = True,
) -> Diagnosis:
    """Find where NaN and Inf come from, and where accuracy is lost, when a model runs on a target; without that target.

    Parameters
    ----------
    model : nn.Module
        Left as it is: a copy in eval mode is examined.
    data : iterable of batches
        As `QuantSim.calibrate` takes it: tensors, tuples, lists or dicts, such as a DataLoader gives. The first batch is the example
        that the model is recorded with: a batch fills as many arguments as its forward takes, what is left (targets) is ignored.
    target : str
        "float32", "bf16", "tensorrt-fp16", "onnxruntime-fp16", "coreml-fp16" (which is taken to add up in float16 too), or, in int8, a
        target of `qsim.Config`: "tensorrt", "onnxruntime", "openvino", "coreml", "executorch", also written "tensorrt-int8".
    evaluation : iterable of batches, optional
        Data as the model will meet it, for integer targets: calibration data of another scale is reported.
    forward : callable, optional
        ``forward(model, batch)``, for models that need more than the batch as arguments.
    loss : callable, optional
        ``loss(output, batch)``, a scalar: gradients are examined too.
    max_batches : int, optional
        By default all of the data.
    seconds : float, optional
        What may be spent. What did not fit is told in `Diagnosis.notes`.
    probes : int, optional
        Executions in half precision that may be spent.
    sqnr : float, optional
        dB to which the output must agree with float32; by default 30 for float16, 20 for bfloat16.
    save_input : path-like, optional
        Where the smallest input that makes the first NaN or Inf in float32 is written: ``torch.load(path, weights_only=True)`` gives
        it in the form of a batch. Nothing is written if there is none.
    progress : bool
        Whether to show a progress bar, where tqdm is installed.

    Returns
    -------
    Diagnosis

    Raises
    ------
    TypeError, ValueError
        The model is no module, the data no iterable of batches, or the target unknown.

    Examples
    --------
    >>> class Norm(nn.Module):
    ...     def forward(self, x):
    ...         return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    >>> diagnosis = doctor(Norm(), [400 * torch.ones(4, 64)], target="tensorrt-fp16", progress=False)
    >>> [(finding.code, finding.op) for finding in diagnosis.findings]
    [('QS010', 'pow')]
    >>> diagnosis.plan.keep
    ('pow', 'mean', 'add', 'sqrt')
    """
    check_module(model, "qsim.doctor")
    refuse_simulated(model, "qsim.doctor", "; examine the float model that it was made of. What quantization costs: sim.compare(batch)")
    model = with_values(model)
    _check(seconds, probes, sqnr, forward, loss)
    ends = math.inf if seconds is None else time.perf_counter() + seconds
    chosen = target_named(target)
    stages = Stages("record", "survey", "checks", "plan")
    batches = _limited(iterate(data, max_batches, progress, "qsim.doctor"), ends)
    first = next(batches, None)
    if first is None:
        evidence = {"batches": 0}
        fix = "Give at least one batch: the data is empty, or an iterator that was used up."
        nothing = Finding("QS006", "error", "", "", evidence, fix)
        return Diagnosis((nothing,), chosen.name, subject=subject_of(model))
    with unchanged(model):
        with stages.stage("record"):
            subject = ExaminedModel(model, example_of(model, first, forward), fold=chosen.folds)
        with stages.stage("survey"):
            ranges = Ranges() if chosen.integers else None
            given = chain([first], batches)
            if ranges is None:
                found = survey(subject, chosen, given, forward, keep=_KEPT)
            else:
                found = survey(subject, chosen, ranges.batches(subject, given), forward, keep=_KEPT, within=ranges.within)
        exam = Examination(subject, chosen, list(found.kept.values()), forward, loss, found, Flow(subject), ends=ends, probes=probes)
        exam.ranges = ranges
        if chosen.format is not None and len(found.kept) < found.batches:
            exam.notes.append(
                f"ran in half precision on {len(found.kept)} of {found.batches} batches, the first ones and those in which something "
                "broke, or made numbers twice as large: what is said of the output is of these"
            )
        if chosen.integers and evaluation is not None:
            with stages.stage("evaluation"):
                exam.evaluation = ranges_of(subject, iterate(evaluation, max_batches, progress, "qsim.doctor"), forward)
        elif evaluation is not None:
            exam.notes.append(f"evaluation= was not looked at: it is for integer targets, and {chosen.name!r} has no ranges of data")
        with stages.stage("checks"):
            findings = _run_checks(exam, sqnr)
        with stages.stage("plan"):
            plan = cure(exam, findings)
        if save_input is not None and found.births:
            with stages.stage("reproduction"):
                _save_reproduction(exam, save_input)
    shadow, outcome = exam.shadow, exam.traces[0].outcome if exam.traces else None
    return Diagnosis(
        ordered(findings, exam.flow.order),
        chosen.name,
        math.nan if outcome is None else outcome.sqnr,
        found.batches,
        shadow.probes if shadow is not None else 0,
        dict(stages),
        (*subject.notes, *exam.notes),
        plan,
        0 if outcome is None else outcome.nonfinite,
        subject=subject_of(model),
    )


def _check(seconds: float | None, probes: int | None, sqnr: float | None, forward: Any, loss: Any) -> None:
    if seconds is not None:
        check_number("qsim.doctor", "seconds", seconds, least=0, otherwise="None for no limit")
    if probes is not None:
        check_whole("qsim.doctor", "probes", probes, least=1, otherwise="None for no limit")
    if sqnr is not None:
        check_number("qsim.doctor", "sqnr", sqnr, least=-math.inf, otherwise="None for the target's")
    if forward is not None:
        check_function("qsim.doctor", "forward", forward, "forward(model, batch)")
    if loss is not None:
        check_function("qsim.doctor", "loss", loss, "loss(output, batch) -> Tensor")


def _limited(batches: Iterator[Any], ends: float) -> Iterator[Any]:
    """At least one batch, and no more once the time is over."""
    for batch in batches:
        yield batch
        if time.perf_counter() > ends:
            return


def _run_checks(exam: Examination, sqnr: float | None) -> list[Finding]:
    findings = [finding for check in (*FLOAT_CHECKS, *BATCH_NORM_CHECKS, *INTEGER_CHECKS) for finding in check(exam)]
    if exam.target.format is not None:
        if exam.survey.outputs:
            exam.notes.append("the output is not finite in float32: half precision is compared where it is")
        exam.shadow = Shadow(exam.subject, exam.target, exam.batches, exam.forward, sqnr=sqnr)
        for check in HALF_CHECKS:
            findings += _not_explained(exam, check(exam), findings)
    return findings


def _not_explained(exam: Examination, new: list[Finding], known: list[Finding]) -> list[Finding]:
    """Without what is a consequence of an error that is known, or leads to it, or says the same of the same operation."""
    errors = [finding for finding in known if finding.severity == "error"]
    explained = {link for finding in errors for link in (finding.op, *finding.evidence.get("chain", ()))}
    explained |= {producer for finding in errors for producer in exam.flow.producers.get(finding.op, ())}
    return [finding for finding in new if finding.severity == "error" or finding.op not in explained]


def _save_reproduction(exam: Examination, path: str | PathLike[str]) -> None:
    """Write the smallest input for the first operation that makes NaN or Inf, if its batch was kept."""
    birth = exam.survey.births[0]
    if birth.batch not in exam.survey.kept:
        exam.notes.append(f"the input that breaks '{birth.name}' was not saved: it is in batch {birth.batch}, which is not kept")
        return

    def fails(batch: Any) -> bool:
        return any(found.name == birth.name for found in survey(exam.subject, exam.target, [batch], exam.forward).births)

    save(smallest(exam.survey.kept[birth.batch], fails), path)
