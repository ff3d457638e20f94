"""The check before every export: each tensor at the border of a region in integers has a scale.

A runtime that meets one without fails, or leaves integers without a word. TensorRT's ``_Map_base::at`` at a concatenation is the look-up
of such a tensor in its table of scales.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from qsim.errors import NoEncodingError
from qsim.graph.plan.actions import Operation
from qsim.loggers.figures import Figures
from qsim.operations.onnx_types import onnx_type
from qsim.pages.markup import Cell, Column, Fact, Line, name_cell, problems, table, tiles
from qsim.pages.page import Page
from qsim.pages.report import Report
from qsim.pages.subject import about
from qsim.quantizers.quantizer import Quantizer
from qsim.runs.report_subject import subject_of

if TYPE_CHECKING:
    from qsim.simulation.simulation import Simulation

_SHOWN = 20  # more tensors without a scale than these are counted


@dataclass(frozen=True)
class OpenTensor:
    """A tensor at the border of a region in integers that has no scale.

    Attributes
    ----------
    tensor : str
        Its quantizer's key; where it has none, the name of the operand or of the operation that makes it.
    operations : tuple of str
        Names of the operations in integers that need its scale: the fallback of all of them ends that.
    reason, cure : str
        Why there is none, and what to do.
    """

    tensor: str
    operations: tuple[str, ...]
    reason: str
    cure: str


@dataclass(frozen=True)
class Borders(Report):
    """What `QuantSim.borders` found; ``print`` shows it, `save` writes a page.

    Attributes
    ----------
    checked : int
        Tensors that have to have a scale.
    missing : list of OpenTensor
        Those of them without: nothing can be exported.
    floats : list of OpenTensor
        Tensors that stay in float on purpose, or unseen, where an operation in integers reads them: a runtime computes it in float.
    calibrated : bool
        Whether any batch was calibrated, or encodings were loaded.
    unread : list of OpenTensor
        Weights that no batch of the calibrations read: they have scales, of their values, and what is computed with them was not seen.

    Examples
    --------
    >>> import tempfile
    >>> from torch import nn
    >>> sim = qsim.QuantSim(nn.Sequential(nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 2)), torch.zeros(1, 4))
    >>> report = sim.calibrate([torch.randn(8, 4)], progress=False)
    >>> borders = sim.borders()
    >>> borders.checked, borders.missing, borders.cure
    (5, [], [])
    >>> borders.check()  # raises where something is missing
    >>> borders.save(tempfile.mktemp(".html"))
    """

    checked: int
    missing: list[OpenTensor]
    floats: list[OpenTensor]
    calibrated: bool
    unread: list[OpenTensor] = field(default_factory=list)

    @property
    def cure(self) -> list[str]:
        """Operations whose fallback leaves no tensor without a scale: for `QuantSim.fallback`."""
        return list(dict.fromkeys(name for found in self.missing for name in found.operations))

    def check(self) -> None:
        """Raise NoEncodingError, with all that is missing, unless every tensor has a scale."""
        if self.missing:
            raise NoEncodingError(f"QuantSim: {self._what_is_missing()}")

    def _what_is_missing(self) -> str:
        if not self.calibrated:
            return (
                f"no batch was calibrated, and {len(self.missing)} of {self.checked} tensors need it for a scale. Call sim.calibrate(data)."
            )
        lines = [f"\n  {_line(found)}" for found in self.missing[:_SHOWN]]
        more = f"\n  and {len(self.missing) - _SHOWN} more: see sim.borders().missing" if len(self.missing) > _SHOWN else ""
        head = f"no scale for {len(self.missing)} of {self.checked} tensors that operations in integers make or read."
        return f"{head}{''.join(lines)}{more}\n  All that needs them falls back with sim.fallback(sim.borders().cure)."

    def __str__(self) -> str:
        parts = [self._what_is_missing() if self.missing else f"all {self.checked} tensors that need a scale have one"]
        if self.floats:
            parts += [f"{len(self.floats)} operands in float", *(f"  {_line(found)}" for found in self.floats)]
        if self.unread:
            weights = "1 weight that no batch reached" if len(self.unread) == 1 else f"{len(self.unread)} weights that no batch reached"
            parts += [weights, *(f"  {_line(found)}" for found in self.unread)]
        return "\n".join(parts)

    def figures(self) -> Figures:
        """How many tensors were looked at, and how many are of which kind."""
        found = {"checked": self.checked, "missing": len(self.missing), "in_float": len(self.floats), "unread": len(self.unread)}
        return Figures({f"borders/{name}": float(count) for name, count in found.items()})

    def page(self) -> Page:
        """See `Report.page`."""
        kinds = {"no scale": self.missing, "in float": self.floats, "read by no batch": self.unread}
        facts: list[Fact] = [("checked", str(self.checked)), *((kind, str(len(found))) for kind, found in kinds.items())]
        columns = [
            Column("tensor", wide=True),
            Column("what"),
            Column("needed by", wide=True),
            Column("why", wide=True),
            Column("cure", wide=True),
        ]
        lines = [
            Line(
                [
                    name_cell(tensor.tensor),
                    Cell(kind, bad=kind == "no scale"),
                    Cell(", ".join(tensor.operations)),
                    Cell(tensor.reason),
                    Cell(tensor.cure),
                ],
                severity="error" if kind == "no scale" else "warning",
            )
            for kind, found in kinds.items()
            for tensor in found
        ]
        told = [self._what_is_missing()] if self.missing and not self.calibrated else []
        note = "Tensors between operations in integers and what makes or reads them."
        head = f"{len(self.missing)} of {self.checked} tensors that need a scale have none"
        return Page("Borders", head, tiles(facts) + problems(told) + table("To look at", note, columns, lines), about(self.subject))


def _line(found: OpenTensor) -> str:
    return f"'{found.tensor}': {found.reason}. {found.cure}."


def borders(sim: Simulation) -> Borders:
    """Look at every tensor at the border of a region in integers.

    Parameters
    ----------
    sim : Simulation
        Whatever its state: not calibrated, partly disabled, with operations that fall back.
    """
    formats, quantizers = sim.quantization.formats, sim.quantizers()
    needing: dict[str, list[str]] = {}  # operations in integers, by the quantizer that they need
    for post in sim.decisions.posts:
        if post.is_integer(formats):
            needing.setdefault(post.key, []).extend(name for name in post.deciders if name not in formats)
    chosen = [quantizers[key] for key in needing if quantizers[key].spec.has_scale and sim.decisions.quantizers[key].range is None]
    calibrated = any(quantizer.encoding is not None or quantizer.counts.elements for quantizer in chosen)
    missing, floats = [], []
    for key, names in needing.items():
        quantizer, operations = quantizers[key], tuple(dict.fromkeys(names))
        who = " and ".join(_described(sim.decisions.operations[name]) for name in operations)
        if not quantizer.enabled:
            reason = f"its quantizer is disabled, and {who} would run in integers with it"
            floats.append(OpenTensor(key, operations, reason, f"sim.enable({key!r}) quantizes it"))
        elif quantizer.lacks_encoding:
            reason = (
                f"{_why(quantizer, sim.decisions.quantizers[key].parameter)}; {who} {'need' if len(operations) > 1 else 'needs'} its scale"
            )
            missing.append(OpenTensor(key, operations, reason, _cure(quantizer, operations)))
    floats += _unplanned(sim, formats)
    reason, cure = "read by no batch in calibration, and what is computed with it was not seen", "Calibrate with data that reach it"
    unread = [OpenTensor(key, tuple(dict.fromkeys(needing.get(key, ()))), reason, cure) for key in sim.unread()]
    return Borders(len(needing), missing, floats, calibrated, unread, subject=subject_of(sim.model, sim.config))


def _described(operation: Operation) -> str:
    return f"'{operation.name}' ({' + '.join(map(onnx_type, operation.op.split(' + ')))})"


def _why(quantizer: Quantizer, parameter: str | None) -> str:
    counts = quantizer.counts
    if parameter is not None and counts.elements == 0:
        return "no range was chosen for this weight"
    if counts.elements == 0:
        return "no value reached it in calibration"
    if counts.nonfinite == counts.elements:
        return f"all {counts.elements} values that reached it are NaN or Inf"
    if parameter is not None:
        return "a channel or block of this weight has no finite value"
    return f"{counts.elements} values were observed, and no range was chosen from them"


def _cure(quantizer: Quantizer, operations: tuple[str, ...]) -> str:
    counts = quantizer.counts
    first = "Calibrate with data that reach it"
    if counts.nonfinite:
        first = "Find where they come from with sim.watch()"
    elif counts.elements:
        first = "Call sim.set_method('minmax')"
    return f"{first}, or let what needs it fall back: sim.fallback({list(operations)!r})"


def _unplanned(sim: Simulation, formats: dict[str, str]) -> list[OpenTensor]:
    """Operands in float of operations in integers, where the plan has a reason for it, and what ran without having been recorded."""
    reasons = {entry.name: entry.reason for entry in sim.decisions.left}
    found = []
    for operation, names in sim.decisions.unplanned:
        name = next((name for name in names if name in reasons), None)
        if name is None or operation in formats:
            continue
        reason = f"never planned: {reasons[name]}; {_described(sim.decisions.operations[operation])} reads it"
        cure = f"Quantize it in the config, or let its reader fall back: sim.fallback([{operation!r}])"
        found.append(OpenTensor(name, (operation,), reason, cure))
    for path, functions in sim.unrecorded().items():
        reason = f"{', '.join(functions)} ran there, which the example inputs did not show: in float, with what follows in that call"
        found.append(OpenTensor(path or "the model", (), reason, "Give example inputs that take this way through the model"))
    return found
