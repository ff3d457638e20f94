"""The pages: what each report shows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from qsim.graph.actions import LeftFloat
from qsim.report import drawing
from qsim.report.deviation import Deviation
from qsim.report.markup import Cell, Column, Fact, Line, name, problems, table, tiles
from qsim.report.page import Page
from qsim.report.summary import CLIPPED, Row, Summary
from qsim.table import decibel, percent

if TYPE_CHECKING:
    from qsim.clinic.diagnosis import Diagnosis
    from qsim.report.comparison import Comparison
    from qsim.report.progressive import Progressive
    from qsim.report.sensitivity import Sensitivity
    from qsim.sim.calibration import CalibrationReport

_HISTOGRAMS = (
    'Histograms: the logarithm of the count over the value, <span class="key in"></span>within the grid and <span class="key out"></span>'
    'clipped; <span class="key shade"></span>the range of the grid. Per channel, the range shown is that of all channels together.'
)


def summary_page(summary: Summary) -> Page:
    """What is quantized, and what is not."""
    found = [f"{row.key}: {row.problem}" for row in summary.rows if row.problem]
    facts = _facts(summary)
    return Page("Quantization", "What is quantized and how, and what stays in float", tiles(facts) + problems(found) + _tensors(summary))


def calibration_page(report: CalibrationReport) -> Page:
    """What a calibration saw, and the ranges it led to."""
    summary = report.summary()
    facts: list[Fact] = [("batches", str(report.batches)), *_facts(summary)]
    stages = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in report.seconds.items())
    facts.append(("seconds", f"{sum(report.seconds.values()):.2f}", stages))
    for device, peak in report.memory.items():
        facts.append((f"peak memory of {device}", f"{peak.peak / 2**20:.0f} MiB", f"raised by {peak.raised / 2**20:.0f} MiB"))
    return Page(
        "Calibration", "What was observed, and the ranges that were chosen", tiles(facts) + problems(report.problems) + _tensors(summary)
    )


def comparison_page(comparison: Comparison) -> Page:
    """Errors of all tensors, in the order of the model."""
    columns = [
        Column("quantizer", wide=True),
        *(Column(head, number=True, ascending=True) for head in ("local dB", "accumulated dB")),
        *(Column(head, number=True) for head in ("local max", "accumulated max", "NaN, Inf")),
    ]
    rows = comparison.rows
    finite = [d.sqnr for row in rows for d in (row.local, row.accumulated) if math.isfinite(d.sqnr)]
    top = max([*finite, 1.0])
    lines = [
        Line(
            [
                Cell(markup=name(row.key, f"{row.role} · {row.op}"), value=row.key),
                *(_ratio_cell(deviation, top) for deviation in (row.local, row.accumulated)),
                *(Cell(f"{d.max_error:.3g}", d.max_error) for d in (row.local, row.accumulated)),
                _count_cell(row.accumulated.nonfinite),
            ],
            f"{row.key} {row.role} {row.op}",
        )
        for row in rows
    ]
    path = [row for row in rows if row.role != "weight"]  # weights have no error of others
    chart = drawing.lines({"local": [r.local.sqnr for r in path], "accumulated": [r.accumulated.sqnr for r in path]}, 1.05 * top)
    keys = '<span class="key in"></span>local <span class="key out"></span>accumulated'
    legend = f"<small>SQNR along the model, 0 to {1.05 * top:.0f} dB: {keys}</small>"
    facts = [("tensors", str(len(rows))), ("SQNR of the output", f"{decibel(comparison.output.sqnr)} dB")]
    facts.append(("largest error of the output", f"{comparison.output.max_error:.3g}"))
    note = "Local: the float tensor beside itself quantized. Accumulated: with everything before it quantized too. Higher dB is closer."
    body = tiles(facts) + problems(comparison.notes) + f"<section>{chart}{legend}</section>" + table("Tensors", note, columns, lines)
    return Page("Comparison with float", "How far each tensor is from what the float model computes", body)


def diagnosis_page(diagnosis: Diagnosis) -> Page:
    """What the doctor found, worst first."""
    columns = [Column("where", wide=True), Column("code"), Column("severity"), *(Column(head, wide=True) for head in ("what", "evidence"))]
    columns += [Column("fix", wide=True)]
    lines = []
    for finding in diagnosis.findings:
        numbers = ", ".join(f"{key} {_short(value)}" for key, value in finding.evidence.items())
        cells = [
            Cell(markup=name(finding.place, finding.source), value=finding.place),
            Cell(finding.code),
            Cell(finding.severity, bad=finding.severity == "error"),
            Cell(finding.title),
            Cell(numbers),
            Cell(finding.fix),
        ]
        lines.append(Line(cells, f"{finding.code} {finding.severity} {finding.place} {finding.title}"))
    facts: list[Fact] = [("target", diagnosis.target), ("batches", str(diagnosis.batches)), ("probes", str(diagnosis.probes))]
    if diagnosis.nonfinite:
        facts.append(("output", f"NaN or Inf in {diagnosis.nonfinite} elements"))
    elif not math.isnan(diagnosis.sqnr):
        facts.append(("SQNR of the output", f"{decibel(diagnosis.sqnr)} dB"))
    stages = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in diagnosis.seconds.items())
    facts.append(("seconds", f"{sum(diagnosis.seconds.values()):.2f}", stages))
    body = table("Findings", "Errors first, then warnings; each in the order of the model.", columns, lines)
    if diagnosis.plan is not None and diagnosis.plan.keep:
        kept = [Line([Cell(markup=name(each, ""), value=each)], each) for each in diagnosis.plan.keep]
        body += table("Plan", escape(str(diagnosis.plan).splitlines()[0]), [Column("keep in float32", wide=True)], kept)
    return Page("Diagnosis", f"What {diagnosis.target} makes of the model", tiles(facts) + problems(diagnosis.notes) + body)


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def sensitivity_page(sensitivity: Sensitivity) -> Page:
    """The metric with each group alone, the most sensitive first."""
    ranked = sensitivity.ranked()
    best = sensitivity.baseline
    beside = "float"
    if math.isinf(best):  # dB
        beside = "the best group"
        best = (max if sensitivity.higher_is_better else min)(map(_finite, (score.value for score in ranked)), default=0.0)
    loss = [abs(best - score.value) for score in ranked]
    most = max([*map(_finite, loss), 1e-30])
    columns = [Column("quantized alone", wide=True), Column("metric", number=True, ascending=sensitivity.higher_is_better)]
    columns.append(Column("lost", number=True))
    lines = [
        Line(
            [
                Cell(markup=name(score.name, ", ".join(score.keys) if len(score.keys) > 1 else ""), value=score.name),
                Cell(f"{score.value:.6g}", score.value),
                Cell(markup=f"{lost:.3g}" + drawing.bar(_finite(lost) / most, bad=True), value=lost),
            ],
            score.name,
        )
        for score, lost in zip(ranked, loss, strict=True)
    ]
    facts = [("float", f"{sensitivity.baseline:.6g}"), ("quantized", f"{sensitivity.quantized:.6g}"), ("groups", str(len(ranked)))]
    better = "higher" if sensitivity.higher_is_better else "lower"
    note = f"The metric, {better} is better, with one group quantized and everything else in float; lost beside {beside}."
    return Page("Sensitivity", "What each quantizer costs by itself", tiles(facts) + table("Groups", note, columns, lines))


def progressive_page(progressive: Progressive) -> Page:
    """The metric while operations join, in their order."""
    worst, steps = progressive.breaks, progressive.steps
    columns = [Column("step", number=True, ascending=True), Column("joined", wide=True)]
    columns += [
        Column("metric", number=True, ascending=progressive.higher_is_better),
        Column("drop", number=True),
        Column("lost", number=True),
    ]
    most = max([*(_finite(abs(step.drop)) for step in steps), 1e-30])
    lines = [
        Line(
            [
                Cell(str(i), i),
                Cell(markup=name(step.operation, ", ".join(step.keys)), value=step.operation),
                Cell(f"{step.value:.6g}", step.value),
                Cell(markup=f"{step.drop:.3g}" + drawing.bar(_finite(step.drop) / most, bad=True), value=step.drop),
                Cell(f"{step.lost:.3g}", step.lost),
            ],
            step.operation,
        )
        for i, step in enumerate(steps, 1)
    ]
    values = [progressive.baseline, *(step.value for step in steps)]
    known = [value for value in values if math.isfinite(value)]
    low, high = min(known, default=0.0), max(known, default=1.0)
    width = 1.1 * (high - low) or 1.0
    chart = drawing.lines({"accumulated": [(value - low) / width + 0.04 for value in values]}, 1.0)
    legend = f"<small>The metric from float (left) to the last operation, {low:.6g} to {high:.6g}</small>"
    facts: list[Fact] = [
        ("float", f"{progressive.baseline:.6g}"),
        ("joined", str(len(steps))),
        ("left in float", str(len(progressive.left))),
    ]
    if worst is not None:
        facts.append(("largest drop", f"{worst.drop:.3g}", worst.operation))
    better = "higher" if progressive.higher_is_better else "lower"
    note = f"The metric, {better} is better, with one operation more quantized in each line; lost beside float."
    body = tiles(facts) + problems([progressive.note] if progressive.note else []) + f"<section>{chart}{legend}</section>"
    return Page("Progressive quantization", "Where accuracy breaks", body + table("Operations", note, columns, lines))


def _facts(summary: Summary) -> list[Fact]:
    quantizers = [row for row in summary.rows if row.role != "bias"]
    return [
        ("quantizers", str(len(quantizers))),
        ("switched off", str(sum(not row.enabled for row in quantizers))),
        ("left in float", str(len(summary.left))),
        ("that met NaN or Inf", str(sum(row.nonfinite > 0 for row in quantizers))),
    ]


def _tensors(summary: Summary) -> str:
    columns = [
        Column("quantizer", wide=True),
        Column("distribution", wide=True, number=True, left=True),
        Column("grid"),
        *(Column(head, number=True) for head in ("scale", "range", "clipped", "NaN, Inf")),
    ]
    body = table("Quantizers", _HISTOGRAMS, columns, [_quantizer(row) for row in summary.rows])
    if summary.left:
        body += _left(summary.left)
    return body + problems(summary.notes)


def _quantizer(row: Row) -> Line:
    width = None if row.low is None or row.high is None else row.high - row.low
    observed = row.observed
    seen = "" if observed is None else f"observed [{observed[0]:.4g}, {observed[1]:.4g}]"
    cells = [
        Cell(markup=name(row.key, f"{row.role} · {row.op}"), value=row.key),
        Cell(markup=drawing.histogram(row), value=math.nan if observed is None else observed[1] - observed[0]),
        Cell(row.grid, below=f"computed in {row.fallback}" if row.fallback else ""),
        Cell(row.scale_text, math.nan if row.scale is None else row.scale[1]),
        Cell(row.range, math.nan if width is None else width, below=seen, bad=not row.calibrated and not row.fallback),
        Cell(percent(row.clipped), math.nan if row.clipped is None else row.clipped, bad=(row.clipped or 0) >= CLIPPED),
        _count_cell(row.nonfinite),
    ]
    return Line(cells, f"{row.key} {row.role} {row.op} {row.grid} {row.problem}", off=not row.enabled)


def _left(left: Sequence[LeftFloat]) -> str:
    columns = [Column("name", wide=True), Column("operation"), Column("reason", wide=True)]
    lines = [Line([Cell(markup=name(e.name, "")), Cell(e.op), Cell(e.reason)], " ".join(e)) for e in left]
    return table("Left in float", "Operations and operands that are not quantized, and why.", columns, lines)


def _ratio_cell(deviation: Deviation, top: float) -> Cell:
    text = decibel(deviation.sqnr)
    return Cell(markup=text + drawing.bar(deviation.sqnr / top), value=deviation.sqnr) if text else Cell(value=math.nan)


def _count_cell(count: int) -> Cell:
    return Cell(str(count or ""), count, bad=count > 0)


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0
