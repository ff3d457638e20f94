"""What restoring did, operation by operation, and what it left alone."""

from __future__ import annotations

from dataclasses import dataclass, field

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
class RestoreReport:
    """What `QuantSim.restore` and its parts return; ``print`` shows every weight.

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
        table = text_table(("weight", "dB before", "dB after", "how"), rows, ("dB before", "dB after"))
        gained = f"results: {decibel(self.before)} -> {decibel(self.after)} dB to float"
        fate = gained if self.kept else f"{gained}: nothing gained, so everything is as it was"
        used = f"{self.batches} batches, {self.held_back} held back to measure on ({seconds_text(self.seconds)})"
        skipped = [f"left alone: '{key}': {why}" for key, why in self.skipped.items()]
        left_out = [f"batch {batch} left out: {why}" for batch, why in self.left_out.items()]
        further = [] if self.distilled is None else [str(self.distilled)]
        return "\n".join([table, fate, *further, used, *skipped, *left_out, *self.notes])
