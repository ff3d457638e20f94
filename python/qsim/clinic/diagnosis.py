"""What the doctor says: findings, what to keep in float32, and how long it took to know."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from os import PathLike
from typing import Any

from qsim.clinic.finding import SEVERITIES, Finding
from qsim.deploy.engine_plan import Plan
from qsim.loggers.figures import Figures
from qsim.pages.chart import Axis, Chart, Series
from qsim.pages.markup import Cell, Column, Fact, Line, name_cell, problems, table, tiles
from qsim.pages.page import Page
from qsim.pages.report import Report
from qsim.pages.subject import about
from qsim.stages import seconds_text
from qsim.table import decibel, text_table
from qsim.warning import warn


@dataclass(frozen=True)
class Diagnosis(Report):
    """The result of `qsim.doctor`. ``print(diagnosis)`` shows it.

    Attributes
    ----------
    findings : tuple of Finding
        Errors first, then warnings; each in the order of the model.
    target : str
    sqnr : float
        dB of the output on the target beside float32, with nothing kept, where it is finite; NaN for targets without a float format. Of
        the batches that ran in half precision: where those are not all, a note says so.
    batches : int
        Batches that the model was examined on, in float32.
    probes : int
        Executions in half precision.
    seconds : mapping of str to float
        By stage.
    notes : tuple of str
        What could not be seen, or was left out.
    plan : Plan or None
        What to keep in float32, for `Config.with_plan` and deployment files; None where nothing was run.
    nonfinite : int
        Elements of the output that are NaN or Inf on the target and finite in float32, in the first batch that has any.

    Examples
    --------
    >>> import json, tempfile
    >>> class Squares(torch.nn.Module):
    ...     def forward(self, x):
    ...         return (x * x).mean(-1).sqrt()
    >>> diagnosis = qsim.doctor(Squares(), [torch.full((2, 4), 300.0)], target="tensorrt-fp16")
    >>> diagnosis.healthy, diagnosis.plan.keep
    (False, ('mul', 'mean', 'sqrt'))
    >>> json.loads(diagnosis.to_json())["target"]
    'tensorrt-fp16'
    >>> diagnosis.save(tempfile.mktemp(".html"))
    """

    findings: tuple[Finding, ...]
    target: str
    sqnr: float = math.nan
    batches: int = 0
    probes: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict, compare=False)
    notes: tuple[str, ...] = ()
    plan: Plan | None = None
    nonfinite: int = 0

    @property
    def healthy(self) -> bool:
        """Whether nothing was found but what is worth knowing.

        Examples
        --------
        >>> qsim.doctor(torch.nn.Linear(4, 2), [torch.randn(8, 4)], target="tensorrt-fp16").healthy
        True
        """
        return all(finding.severity == "info" for finding in self.findings)

    def __str__(self) -> str:
        lines = [self._head()]
        if self.findings:
            rows = [[f.code, f.severity, f.place, f.title, _numbers(f)] for f in self.findings]
            lines.append(text_table(("code", "severity", "where", "what", "evidence"), rows))
            lines += [line for f in self.findings for line in _cure(f)]
        if self.plan is not None and (self.plan.keep or (self.plan.note and not self.healthy)):
            lines.append(f"plan: {self.plan}")
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)

    def _head(self) -> str:
        counts = {severity: sum(f.severity == severity for f in self.findings) for severity in SEVERITIES}
        found = (
            ", ".join(f"{n} {severity}{'s' * (n != 1 and severity != 'info')}" for severity, n in counts.items() if n) or "nothing found"
        )
        if self.nonfinite:  # an SQNR of the rest would read as if the output were usable
            output = f", output NaN or Inf in {self.nonfinite} elements"
        else:
            away = "equal to float32's" if self.sqnr == math.inf else f"{decibel(self.sqnr)} dB from float32"
            output = "" if math.isnan(self.sqnr) else f", output {away}"
        return f"{self.target}: {found}{output} ({self.batches} batches, {self.probes} probes; {seconds_text(self.seconds)})"

    def to_json(self) -> str:
        """Everything as JSON text. Numbers that JSON has not are the strings "inf", "-inf" and "nan"."""
        findings = [
            {
                "code": f.code,
                "title": f.title,
                "severity": f.severity,
                "module": f.module,
                "op": f.op,
                "source": f.source,
                "evidence": dict(f.evidence),
                "fix": f.fix,
            }
            for f in self.findings
        ]
        whole = {
            "target": self.target,
            "sqnr": self.sqnr,
            "nonfinite": self.nonfinite,
            "batches": self.batches,
            "probes": self.probes,
            "seconds": dict(self.seconds),
            "notes": list(self.notes),
            "findings": findings,
            "plan": None if self.plan is None else json.loads(self.plan.to_json()),
        }
        return json.dumps(_plain(whole), indent=2, allow_nan=False)

    def figures(self) -> Figures:
        """How many findings there are of each severity, and how the output differs."""
        counts = {f"findings/{severity}": float(sum(f.severity == severity for f in self.findings)) for severity in SEVERITIES}
        return Figures({**counts, "output/sqnr": self.sqnr, "output/nonfinite": float(self.nonfinite)})

    def page(self) -> Page:
        """See `Report.page`."""
        return diagnosis_page(self)

    def to_html(self, path: str | PathLike[str]) -> None:
        """The old name of `save`, which goes with the next release."""
        warn("Diagnosis.to_html is now Diagnosis.save", DeprecationWarning)
        self.save(path)


def ordered(findings: Sequence[Finding], order: Mapping[str, int]) -> tuple[Finding, ...]:
    """Worst first, then in the order of the model; what is about no operation before that."""
    return tuple(sorted(findings, key=lambda f: (SEVERITIES.index(f.severity), order.get(f.op, len(order) if f.op else -1))))


def _numbers(finding: Finding) -> str:
    shown = {name: value for name, value in finding.evidence.items() if name != "chain"}
    return ", ".join(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in shown.items())


def _cure(finding: Finding) -> list[str]:
    chain = finding.evidence.get("chain")
    lines = [f"{finding.code} {finding.place}"]
    lines += [f"  at {finding.source}"] if finding.source else []
    lines += [f"  chain: {', '.join(chain)}"] if chain else []
    return [*lines, f"  fix: {finding.fix}"]


def _plain(value: Any) -> Any:
    """`value` in what JSON has."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(entry) for entry in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def diagnosis_page(diagnosis: Diagnosis) -> Page:
    """What the doctor found, worst first."""
    columns = [
        Column("where", wide=True),
        Column("code"),
        Column("severity", number=True, ascending=True, left=True),
        *(Column(head, wide=True) for head in ("what", "evidence")),
    ]
    columns += [Column("fix", wide=True)]
    lines = []
    for finding in diagnosis.findings:
        numbers = ", ".join(f"{key} {_short(value)}" for key, value in finding.evidence.items())
        cells = [
            name_cell(finding.place, finding.source),
            Cell(finding.code),
            Cell(markup=f'<span class="severity">{escape(finding.severity)}</span>', value=SEVERITIES.index(finding.severity)),
            Cell(finding.title),
            Cell(numbers),
            Cell(finding.fix),
        ]
        lines.append(Line(cells, severity=finding.severity))
    facts: list[Fact] = [("target", diagnosis.target), ("batches", str(diagnosis.batches)), ("probes", str(diagnosis.probes))]
    if diagnosis.nonfinite:
        facts.append(("output", f"NaN or Inf in {diagnosis.nonfinite} elements"))
    elif not math.isnan(diagnosis.sqnr):
        facts.append(("SQNR of the output", "equal to float32" if diagnosis.sqnr == math.inf else f"{decibel(diagnosis.sqnr)} dB"))
    stages = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in diagnosis.seconds.items())
    facts.append(("seconds", f"{sum(diagnosis.seconds.values()):.2f}", stages))
    chart = _magnitudes(diagnosis.findings)
    body = table("Findings", "Errors first, then warnings; each in the order of the model.", columns, lines, chart)
    if diagnosis.plan is not None and diagnosis.plan.keep:
        kept = [Line([name_cell(each)]) for each in diagnosis.plan.keep]
        body += table("Plan", escape(str(diagnosis.plan).splitlines()[0]), [Column("keep in float32", wide=True)], kept)
    subtitle = f"What {diagnosis.target} makes of the model"
    return Page("Diagnosis", subtitle, tiles(facts) + problems(diagnosis.notes) + body, about(diagnosis.subject), chart)


def _magnitudes(findings: Sequence[Finding]) -> Chart | None:
    """The largest value of each finding that has one, beside what the target holds."""
    numbers = ("largest", "limit")
    found = [(i, f.evidence) for i, f in enumerate(findings) if all(isinstance(f.evidence.get(name), float) for name in numbers)]
    if not found:
        return None
    series = [
        Series(name, color, [evidence[key] for _, evidence in found])
        for key, name, color in (("largest", "largest value", "inside"), ("limit", "what the target holds", "edge"))
    ]
    axes = Axis("finding, worst first"), Axis("magnitude", logarithmic=True)
    return Chart("Largest values of findings, beside what the target holds", *axes, series, [i for i, _ in found], points=True)


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
