"""What folding did, as a value and as a page."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.nn.modules.batchnorm import _BatchNorm

from qsim.batch_norm.foldable import Fold
from qsim.loggers.figures import Figures
from qsim.pages.markup import Cell, Column, Fact, Line, name_cell, problems, table, tiles
from qsim.pages.page import Page
from qsim.pages.report import Report
from qsim.pages.subject import about


@dataclass(frozen=True)
class FoldReport(Report):
    """What `fold_batch_norms` did; `print(report)` shows it, `save` writes a page.

    Attributes
    ----------
    folded : dict of str to str
        Path of each BatchNorm that is now an Identity, with the path of the layer that took it over.
    kept : dict of str to str
        Path of each other BatchNorm (or place of a call of `F.batch_norm`), with the reason: one sentence.
    alone : dict of str to str
        Path of each BatchNorm that is a layer of its own now, a depthwise convolution, with the reason why no other took it over. Where a
        simulation's target has integer kernels for these alone.
    warnings : tuple of str
        What deserves a look although it was no obstacle: one sentence each.
    folds : tuple of (Fold, BatchNorm)
        What was done, in order, with the modules that are gone: for states of the model as it was (`fold_state`).
    biases : tuple of str
        Biases that a simulation rounds to int32 from now on, as it does with those of other layers; BatchNorm's shift was float.

    Examples
    --------
    >>> import tempfile
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2)).eval()
    >>> report = qsim.fold_batch_norms(model, torch.zeros(1, 1, 4, 4))
    >>> report.folded
    {'1': '0'}
    >>> report.save(tempfile.mktemp(".html"))
    """

    folded: dict[str, str] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    folds: tuple[tuple[Fold, _BatchNorm], ...] = field(default=(), repr=False)
    alone: dict[str, str] = field(default_factory=dict)
    biases: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [self._headline()]
        lines += [f"  folded '{name}' into '{layer}'" for name, layer in self.folded.items()]
        lines += [f"  made '{name}' a layer of its own: {reason}" for name, reason in self.alone.items()]
        lines += [f"  kept '{name}': {reason}" for name, reason in self.kept.items()]
        if self.biases:
            lines.append(f"  {self._rounded}")
        return "\n".join([*lines, *(f"  warning: {warning}" for warning in self.warnings)])

    def _headline(self) -> str:
        alone = f", {len(self.alone)} made layers of their own" if self.alone else ""
        return f"BatchNorm: {len(self.folded)} folded{alone}, {len(self.kept)} kept"

    @property
    def _rounded(self) -> str:
        steps = "in steps of two scales' product: outputs move, by a step of their grid mostly"
        return f"{len(self.biases)} biases are int32 from now on, {steps}"

    def figures(self) -> Figures:
        """How many were folded, made layers of their own, and kept."""
        counts = {"folded": self.folded, "alone": self.alone, "kept": self.kept}
        return Figures({f"batch_norm/{name}": float(len(paths)) for name, paths in counts.items()})

    def page(self) -> Page:
        """See `Report.page`."""
        facts: list[Fact] = [("folded", str(len(self.folded))), ("kept", str(len(self.kept)))]
        facts += [("layers of their own", str(len(self.alone)))] if self.alone else []
        lines = [Line([name_cell(name), Cell("folded"), Cell(f"into '{layer}'")]) for name, layer in self.folded.items()]
        lines += [Line([name_cell(name), Cell("a layer of its own"), Cell(reason)]) for name, reason in self.alone.items()]
        lines += [Line([name_cell(name), Cell("kept"), Cell(reason)], severity="warning") for name, reason in self.kept.items()]
        columns = [Column("BatchNorm", wide=True), Column("now"), Column("why", wide=True)]
        told = [*([self._rounded] if self.biases else []), *self.warnings]
        body = tiles(facts) + problems(told) + table("BatchNorms", "In the order of the model.", columns, lines)
        return Page("BatchNorm", self._headline().removeprefix("BatchNorm: "), body, about(self.subject))
