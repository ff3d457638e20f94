"""The checks: each takes what is known of a model and returns what it finds, nothing for a healthy one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from qsim.clinic.checks.constants import constants
from qsim.clinic.checks.gradients import gradients
from qsim.clinic.checks.half import culprits, harmless_overflows
from qsim.clinic.checks.half_weights import tiny_weights
from qsim.clinic.checks.modes import training_mode
from qsim.clinic.checks.patterns import patterns
from qsim.clinic.checks.sums import overflowing_sums, stagnating_sums
from qsim.clinic.checks.values import births, nonfinite_data, nonfinite_parameters, unobserved, widths
from qsim.clinic.examination import Examination
from qsim.clinic.finding import Finding
from qsim.clinic.subject import Subject
from qsim.clinic.targets import Target

Check = Callable[[Examination], list[Finding]]

FLOAT: tuple[Check, ...] = (nonfinite_data, nonfinite_parameters, births, widths, unobserved, gradients, training_mode)
# For targets with a float format. The first one runs the shadow; the others add what it has not found.
HALF: tuple[Check, ...] = (culprits, constants, harmless_overflows, tiny_weights, patterns)
NARROW: tuple[Check, ...] = (overflowing_sums, stagnating_sums)  # for accumulators of that format
# For every target that folds BatchNorms or has integers: `check(subject, data, target)`, on the data as the user gave it.
DEPLOYMENT: tuple[Callable[[Subject, Iterable[Any], Target], list[Finding]], ...] = ()
