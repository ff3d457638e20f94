"""What `equalize` did."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from torch import Tensor

from qsim.batch_norm.fold_report import FoldReport
from qsim.loggers.figures import Figures
from qsim.pages.markup import Cell, Column, Line, problems, table, tiles
from qsim.pages.page import Page
from qsim.pages.report import Report
from qsim.pages.subject import about
from qsim.table import text_table


def spread(ranges: Tensor) -> float:
    """The largest channel over the median channel, of those that are not zero."""
    ranges = ranges[ranges > 0]
    return float(ranges.max() / ranges.median()) if len(ranges) else 1.0


@dataclass(frozen=True)
class Change:
    """One transformation of the weights.

    Attributes
    ----------
    method : str
    producer : str
        Path of the layer or norm whose channels changed; of a rotation of the residual stream, what writes it first.
    readers : tuple of str
        Paths of the layers that undo it.
    largest : float
        The largest factor, or the inverse of the smallest; 1 for a rotation and absorbed biases.
    before, after : float
        The largest channel over the median channel: of the producer's weights (cross_layer), of what the producer returns
        (bias_absorption), of what the readers read (all others).
    """

    method: str
    producer: str
    readers: tuple[str, ...]
    largest: float
    before: float
    after: float


@dataclass(frozen=True)
class EqualizeReport(Report):
    """What `equalize` did; `print(report)` shows it, `save` writes a page.

    Attributes
    ----------
    changes : tuple of Change
        In order.
    refused : dict of str to str
        Path of each layer and norm that stays as it is, with the reason: one sentence.
    error : float
        The largest difference between what the model returned before and returns now, over the largest magnitude of the former.
    put_back : str
        Why everything was put back; empty if it was not.
    folded : FoldReport
        BatchNorms that were folded first.
    warnings : tuple of str
        What could not be seen while the model was recorded.
    notes : tuple of str
        Which biases were absorbed, which is exact on the data alone, and which were not though the layer was scaled.

    Examples
    --------
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
    >>> report = qsim.equalize(model, torch.randn(1, 3, 8, 8))
    >>> len(report.changes), report.error < 1e-5, report.put_back
    (1, True, '')
    >>> import tempfile
    >>> report.save(tempfile.mktemp(".html"))
    """

    changes: tuple[Change, ...] = ()
    refused: dict[str, str] = field(default_factory=dict)
    error: float = 0.0
    put_back: str = ""
    folded: FoldReport = field(default_factory=FoldReport)
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"Equalization: {self._done}"]
        lines += [f"  everything was put back: {self.put_back}"] if self.put_back else []
        lines += [f"  BatchNorm: {len(self.folded.folded)} folded first"] if self.folded.folded else []
        if self.changes:
            head = ("method", "scaled", "and back", "largest scale", "channel ranges before", "after")
            cells = [
                (c.method, c.producer, _names(c.readers), f"{c.largest:.3g}", f"{c.before:.3g}", f"{c.after:.3g}") for c in self.changes
            ]
            lines.append(text_table(head, cells, numeric=head[3:]))
        reasons = defaultdict(list)
        for name, reason in self.refused.items():
            reasons[reason].append(f"'{name}'")
        lines += [f"  refused {', '.join(names)}: {reason}" for reason, names in reasons.items()]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join([*lines, *(f"  warning: {warning}" for warning in self.warnings)])

    @property
    def _done(self) -> str:
        done = "put back" if self.put_back else "done"
        return f"{len(self.changes)} {done}, {len(self.refused)} refused, outputs differ by {self.error:.2g}"

    def figures(self) -> Figures:
        """Counts, how far outputs differ, and the largest channel over the median one before and after."""
        found = {"changes": float(len(self.changes)), "refused": float(len(self.refused)), "error": self.error}
        for change in self.changes:
            found |= {f"spread_before/{change.producer}": change.before, f"spread_after/{change.producer}": change.after}
        return Figures(found)

    def page(self) -> Page:
        """See `Report.page`."""
        facts = [("changes", str(len(self.changes))), ("refused", str(len(self.refused))), ("outputs differ by", f"{self.error:.2g}")]
        numbers = ("largest scale", "channel ranges before", "after")
        heads = [Column("method"), Column("scaled", wide=True), Column("and back"), *(Column(head, number=True) for head in numbers)]
        lines = [
            Line(
                [*map(Cell, (c.method, c.producer, _names(c.readers))), *(Cell(f"{v:.3g}", v) for v in (c.largest, c.before, c.after))],
                " ".join((c.method, c.producer, *c.readers)),
            )
            for c in self.changes
        ]
        changed = table("Changes", "Ranges are the largest channel over the median one.", heads, lines)
        reasons = [Line([Cell(name), Cell(reason)], f"{name} {reason}") for name, reason in self.refused.items()]
        refused = table("Refused", "What stays as it is.", [Column("layer"), Column("reason", wide=True)], reasons)
        told = [f"everything was put back: {self.put_back}"] if self.put_back else []
        said = problems([*told, *self.notes, *self.warnings])
        return Page("Equalization", self._done, tiles(facts) + said + changed + refused, about(self.subject))


def _names(paths: tuple[str, ...]) -> str:
    return ", ".join(paths) if len(paths) < 4 else f"{paths[0]} and {len(paths) - 1} more"
