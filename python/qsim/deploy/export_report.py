"""What an export did, as a value that prints."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from qsim.deploy.verification_page import float_table, verification_figures, verification_table
from qsim.loggers.figures import Figures
from qsim.pages.markup import Cell, Column, Fact, Line, problems, table, tiles
from qsim.pages.page import Page
from qsim.pages.report import Report
from qsim.pages.subject import about
from qsim.stages import seconds_text
from qsim.table import counted

if TYPE_CHECKING:
    from qsim.deploy.verification import Verification


@dataclass(frozen=True)
class ExportReport(Report):
    """What `QuantSim.export` wrote. ``print(report)`` tells all of it.

    Attributes
    ----------
    path : Path
        The model.
    target : str
    opset : int
        0 for what is no ONNX model.
    files : dict of Path to int
        Every file that was written, and its bytes.
    seconds : dict of str to float
        Time by stage: "trace", "translate", "quantize", "write", and "verify" where that was asked for, or else "run", on
        the example inputs; for ExecuTorch "lower" and, in any case, "run".
    names : dict of str to str
        For each quantizer the tensor of the model that holds its integers (or its numbers of a float format). Also in the model's
        metadata, as ``qsim.names``.
    notes : list of str
        What is not as the simulation has it, or was decided on the way.
    lint : dict of str to str
        The operations that will run in float though the runtime has an integer kernel for them, by the names of their nodes, which begin
        with the path of the module: why.
    verification : Verification or None
        What ONNX Runtime computes, beside the simulation.
    fallback : dict of str to str
        The nodes that compute in a float format because of `QuantSim.fallback`, and which. Also in the model's metadata, as
        ``qsim.fallback``.
    session_options : dict of str to str
        Entries for `onnxruntime.SessionOptions.add_session_config_entry`, so that a CPU like this one computes the integers of the file.

    Examples
    --------
    >>> import tempfile
    >>> sim = qsim.QuantSim(torch.nn.Linear(3, 2), torch.zeros(1, 3), qsim.int8(target="onnxruntime"))
    >>> report = sim.calibrate([torch.randn(64, 3)], progress=False)
    >>> exported = sim.export(tempfile.mktemp(".onnx"), target="onnxruntime", verify=[torch.randn(8, 3)])
    >>> exported.target, exported.path in exported.files, exported.verification is None
    ('onnxruntime', True, False)
    >>> exported.save(tempfile.mktemp(".html"))
    """

    path: Path
    target: str
    opset: int
    files: dict[Path, int]
    seconds: dict[str, float]
    names: dict[str, str] = field(repr=False)
    notes: list[str]
    lint: dict[str, str]
    verification: Verification | None = None
    fallback: dict[str, str] = field(default_factory=dict)
    session_options: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        opset = f", opset {self.opset}" if self.opset else ""
        lines = [f"exported {len(self.names)} quantizers for {self.target}{opset} ({seconds_text(self.seconds)})"]
        lines += [f"  {file}  {size:,} bytes" for file, size in self.files.items()]
        lines += [f'  open with options.add_session_config_entry("{name}", "{value}")' for name, value in self.session_options.items()]
        for title, entries in (
            ("notes", counted(self.notes)),
            ("in float", counted(f"'{name}': {why}" for name, why in self.lint.items())),
        ):
            lines += [f"{title}:", *(f"  {entry}" for entry in entries)] if entries else []
        return "\n".join([*lines, *([str(self.verification)] if self.verification is not None else [])])

    def figures(self) -> Figures:
        """Bytes, seconds, and what the verification found."""
        found = {f"bytes/{file.name}": float(size) for file, size in self.files.items()}
        found |= {f"seconds/{stage}": seconds for stage, seconds in self.seconds.items()}
        found["in_float"] = float(len(self.lint))
        return Figures(found | (verification_figures(self.verification) if self.verification is not None else {}))

    def page(self) -> Page:
        """Files and times, what the runtime computes beside the simulation, and what runs in float."""
        facts: list[Fact] = [("target", self.target), ("quantizers", str(len(self.names)))]
        facts += [("opset", str(self.opset))] if self.opset else []
        facts += [(file.name, f"{size / 2**20:.2f} MiB") for file, size in self.files.items()]
        facts.append(("seconds", f"{sum(self.seconds.values()):.2f}", seconds_text(self.seconds)))
        if self.verification is not None and (times := self.verification.times) is not None:
            beside = f"{times.quantized_ms:.3g} ms a batch, in float {times.float_ms:.3g}"
            facts.append(("time, of the float model's", f"{times.ratio:.2f}", beside))
        body = tiles(facts) + problems(counted(self.notes))
        if self.verification is not None:
            body += verification_table(self.verification)
        body += float_table({**self.lint, **(self.verification.in_float if self.verification is not None else {})})
        columns = [Column("quantizer", wide=True), Column("tensor of the model", wide=True)]
        lines = [Line([Cell(key), Cell(tensor)]) for key, tensor in self.names.items()]
        body += table("Names", "The tensors that hold what the quantizers of the simulation make.", columns, lines)
        return Page("Export", f"{self.path.name} for {self.target}", body, about(self.subject))
