"""What `equalize` did."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from torch import Tensor

from qsim.batch_norm.fold import FoldReport
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
        The largest factor, or the inverse of the smallest; 1 for a rotation.
    before, after : float
        The largest channel over the median channel: of the producer's weights (cross_layer), of what the readers read (all others).
    """

    method: str
    producer: str
    readers: tuple[str, ...]
    largest: float
    before: float
    after: float


@dataclass(frozen=True)
class EqualizeReport:
    """What `equalize` did; `print(report)` shows it.

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

    Examples
    --------
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
    >>> report = qsim.equalize(model, torch.randn(1, 3, 8, 8))
    >>> len(report.changes), report.error < 1e-5, report.put_back
    (1, True, '')
    """

    changes: tuple[Change, ...] = ()
    refused: dict[str, str] = field(default_factory=dict)
    error: float = 0.0
    put_back: str = ""
    folded: FoldReport = field(default_factory=FoldReport)
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        done = "put back" if self.put_back else "done"
        lines = [f"Equalization: {len(self.changes)} {done}, {len(self.refused)} refused, outputs differ by {self.error:.2g}"]
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
        return "\n".join([*lines, *(f"  warning: {warning}" for warning in self.warnings)])


def _names(paths: tuple[str, ...]) -> str:
    return ", ".join(paths) if len(paths) < 4 else f"{paths[0]} and {len(paths) - 1} more"
