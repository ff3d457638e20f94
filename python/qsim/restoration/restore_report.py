"""What restoring did, operation by operation, and what it left alone."""

from __future__ import annotations

from dataclasses import dataclass, field

from qsim.loggers.figures import Figures
from qsim.pages.markup import Cell, Column, Fact, Line, name, problems, table, tiles
from qsim.pages.page import Page
from qsim.pages.report import Report
from qsim.pages.subject import about
from qsim.restoration.distill import Distilled
from qsim.runs.memory import PeakMemory
from qsim.stages import seconds_text
from qsim.table import decibel, text_table


@dataclass(frozen=True)
class Restored:
    """What became of one weight.

    Attributes
    ----------
    key : str
        Of its quantizer.
    before, after : float
        SQNR in dB of the operation's result to the float model's, on data that was held back, with everything before it restored:
        with the weight as it was, and as it is now.
    how : str
        What was done: "ranges + gptq + bias", or "kept" where nothing gained.
    """

    key: str
    before: float
    after: float
    how: str


@dataclass(frozen=True)
class RestoreReport(Report):
    """What `QuantSim.restore` and its parts return; ``print`` shows every weight, `save` writes a page.

    Attributes
    ----------
    weights : list of Restored
        In the order in which they were solved.
    skipped : dict of str to str
        The weights that were left alone, by key, with why.
    before, after : float
        SQNR in dB of what the model returns to what it returns in float, on data that was held back.
    kept : bool
        Whether the simulation was changed: False where nothing was gained at the model's results, which undoes everything.
    left_out : dict of int to str
        Batches that were not used, with why.
    batches, held_back : int
        How many batches were solved with, and how many the gains were measured on. 0: a single batch of one sample; what is told was
        measured on the data that it was solved with.
    notes : list of str
    distilled : Distilled or None
        What followed with ``steps=``.
    seconds : dict of str to float
        Time by stage.
    memory : dict of str to PeakMemory
        As in `CalibrationReport`.

    Examples
    --------
    >>> x = torch.randn(256, 16)
    >>> sim = qsim.QuantSim(torch.nn.Linear(16, 8), x[:1], qsim.w4a8())
    >>> calibration = sim.calibrate(x.split(32), progress=False)
    >>> report = sim.restore(x.split(32), progress=False)
    >>> report.batches + report.held_back, [weight.key for weight in report.weights]
    (8, ['weight'])
    >>> import tempfile
    >>> report.save(tempfile.mktemp(".html"))
    """

    weights: list[Restored]
    skipped: dict[str, str]
    before: float
    after: float
    kept: bool
    left_out: dict[int, str]
    batches: int
    held_back: int
    notes: list[str]
    distilled: Distilled | None
    seconds: dict[str, float]
    memory: dict[str, PeakMemory] = field(compare=False)

    def __str__(self) -> str:
        rows = [(row.key, decibel(row.before), decibel(row.after), row.how) for row in self.weights]
        weights = text_table(("weight", "dB before", "dB after", "how"), rows, ("dB before", "dB after"))
        further = [] if self.distilled is None else [str(self.distilled)]
        return "\n".join([weights, self._fate, *further, self._used, *self._left, *self.notes])

    @property
    def _fate(self) -> str:
        gained = f"results: {decibel(self.before)} -> {decibel(self.after)} dB to float"
        return gained if self.kept else f"{gained}: nothing gained, so everything is as it was"

    @property
    def _used(self) -> str:
        return f"{self.batches} batches, {self.held_back} held back to measure on ({seconds_text(self.seconds)})"

    @property
    def _left(self) -> list[str]:
        """What was left alone or out, as sentences."""
        skipped = [f"left alone: '{key}': {why}" for key, why in self.skipped.items()]
        return skipped + [f"batch {batch} left out: {why}" for batch, why in self.left_out.items()]

    def figures(self) -> Figures:
        """SQNR before and after, of what the model returns and of each weight's operation."""
        found = {"sqnr/before": self.before, "sqnr/after": self.after, "batches": float(self.batches)}
        found |= {f"sqnr_{when}/{row.key}": getattr(row, when) for row in self.weights for when in ("before", "after")}
        return Figures(found | {f"seconds/{stage}": seconds for stage, seconds in self.seconds.items()})

    def page(self) -> Page:
        """See `Report.page`."""
        facts: list[Fact] = [("dB to float before", decibel(self.before)), ("dB to float after", decibel(self.after))]
        facts.append(("weights changed", str(sum(row.how != "kept" for row in self.weights)), f"of {len(self.weights)}"))
        if self.distilled is not None:
            facts.append(("steps of distillation kept", str(self.distilled.kept), f"of {self.distilled.steps}"))
        columns = [
            Column("weight", wide=True),
            *(Column(head, number=True, ascending=True) for head in ("dB before", "dB after")),
            Column("how"),
        ]
        lines = [
            Line(
                [Cell(markup=name(row.key, ""), value=row.key), *(Cell(decibel(v), v) for v in (row.before, row.after)), Cell(row.how)],
                row.key,
            )
            for row in self.weights
        ]
        note = "SQNR of each operation's result to the float model's, on data that was held back, with all before it restored."
        body = tiles(facts) + problems([*self._left, *self.notes]) + table("Weights", note, columns, lines)
        return Page("Restoration", f"{self._fate}; {self._used}", body, about(self.subject))
