"""What the checks look at."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from qsim.clinic.batch_ranges import Ranges
from qsim.clinic.examined_model import ExaminedModel
from qsim.clinic.finding import Finding, Severity
from qsim.clinic.flow import Flow
from qsim.clinic.shadow import Shadow, Trace
from qsim.clinic.survey import Seen, Survey
from qsim.clinic.targets import Target
from qsim.numbers.float_format import FLOAT_FORMATS, FloatFormat
from qsim.runs.batches import Forward

Loss = Callable[[Any, Any], Any]


@dataclass
class Examination:
    """A model with what has been found out about it so far.

    Attributes
    ----------
    subject : ExaminedModel
    target : Target
    batches : sequence
        Those of the data that were kept and can be run again.
    forward, loss : callable or None
    survey : Survey
    flow : Flow
    shadow : Shadow or None
        None for targets without a float format.
    traces : list of Trace
        Those of the shadow, with more and more operations kept; the first one with none.
    ends : float
        When the time is over, by `time.perf_counter`.
    probes : int or None
        How many executions in half precision may be spent.
    notes : list of str
        What could not be done.
    ranges, evaluation : Ranges or None
        Of the data, and of the evaluation data if there is any; None for targets without integers.
    """

    subject: ExaminedModel
    target: Target
    batches: Sequence[Any]
    forward: Forward | None
    loss: Loss | None
    survey: Survey
    flow: Flow
    shadow: Shadow | None = None
    traces: list[Trace] = field(default_factory=list)
    ends: float = math.inf
    probes: int | None = None
    notes: list[str] = field(default_factory=list)
    ranges: Ranges | None = None
    evaluation: Ranges | None = None

    def may_probe(self) -> bool:
        """Whether another execution in half precision fits into the budget; notes it, if not."""
        spent = self.shadow is not None and self.probes is not None and self.shadow.probes >= self.probes
        if not spent and time.perf_counter() < self.ends:
            return True
        self.notes.append("the budget ended before every cause was found: what stands behind those named is not known")
        return False

    @property
    def model(self) -> nn.Module:
        """The model as it was given."""
        return self.subject.original

    @property
    def limit(self) -> float:
        """The format's largest number."""
        return math.inf if self.target.numbers is None else self.target.numbers.largest

    @property
    def half(self) -> Shadow:
        """The shadow, for checks of half precision."""
        if self.shadow is None:
            raise ValueError(f"target {self.target.name!r} has no float format: there is nothing to check in half precision")
        return self.shadow

    @property
    def numbers(self) -> FloatFormat:
        """The numbers of the format, for checks of half precision."""
        return FLOAT_FORMATS[self.half.format]

    def seen(self, name: str) -> Seen:
        """What the survey saw of an operation; nothing, if it has not run there."""
        return self.survey.operations.get(name) or Seen(name.rpartition(".")[2], None)

    def module_of(self, name: str) -> str:
        """Path of the module that an operation belongs to: of the torch.nn leaf, or of the container whose forward called it."""
        site = self.subject.sites.get(name)
        if site is None:
            return name.rpartition(".")[0]
        step = site.steps[0]
        return step.leaf or step.path

    def finding(self, code: str, severity: Severity, name: str, evidence: dict[str, Any], fix: str, source: object = None) -> Finding:
        """A finding on an operation."""
        place = source if source is not None else self.seen(name).source
        return Finding(code, severity, self.module_of(name), name, evidence, fix, "" if place is None else str(place))
