"""The checks: each takes what is known of a model and returns what it finds, nothing for a healthy one."""

from __future__ import annotations

from collections.abc import Callable

from qsim.clinic.checks.batch_norm import fold_gains, never_updated, not_folded, tiny_variances
from qsim.clinic.checks.half_precision import constants, culprits, harmless_overflows, patterns, tiny_weights
from qsim.clinic.checks.integers import other_scale, overflowing_biases, still_growing, too_few, uneven_joins, wide_channels
from qsim.clinic.checks.outliers import outlier_channels, outlier_tokens
from qsim.clinic.checks.sums import overflowing_sums, stagnating_sums
from qsim.clinic.checks.values import births, gradients, nonfinite_data, nonfinite_parameters, training_mode, unobserved, widths
from qsim.clinic.examination import Examination
from qsim.clinic.finding import Finding

Check = Callable[[Examination], list[Finding]]

FLOAT_CHECKS: tuple[Check, ...] = (nonfinite_data, nonfinite_parameters, births, widths, unobserved, gradients, training_mode)
# For targets with a float format. The first one runs the shadow; the others add what it has not found.
HALF_CHECKS: tuple[Check, ...] = (culprits, constants, harmless_overflows, tiny_weights, patterns, overflowing_sums, stagnating_sums)
BATCH_NORM_CHECKS: tuple[Check, ...] = (never_updated, tiny_variances, fold_gains, not_folded)
INTEGER_CHECKS: tuple[Check, ...] = (
    wide_channels,
    overflowing_biases,
    uneven_joins,
    other_scale,
    too_few,
    still_growing,
    outlier_channels,
    outlier_tokens,
)
