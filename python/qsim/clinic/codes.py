"""The codes of findings. A code never changes its meaning, and one that is dropped is not given again."""

from __future__ import annotations

CODES = {
    # float32: the model is broken before any quantization
    "QS001": "makes NaN or Inf of finite numbers in float32",
    "QS002": "the data holds NaN or Inf",
    "QS003": "a parameter or buffer holds NaN or Inf",
    "QS004": "a gradient is NaN or Inf",
    "QS005": "the width of the range overflows float32",
    "QS006": "nothing was observed",
    # half precision
    "QS010": "the result leaves the range of the format",
    "QS011": "a number inside the operation leaves the range of the format",
    "QS012": "a constant leaves the range of the format",
    "QS013": "a constant becomes zero in the format",
    "QS014": "small values become zero",
    "QS015": "weights are subnormal or become zero in the format",
    "QS016": "the result is finite and wrong",
    "QS017": "a sum stops growing: what is added is below half a step of it",
    "QS018": "a pattern that is dangerous in half precision",
    # BatchNorm
    "QS020": "BatchNorm is in training mode",
    "QS021": "BatchNorm's statistics were never updated",
    "QS022": "BatchNorm's variance is nearly zero",
    "QS023": "folding BatchNorm scales channels very differently",
    "QS024": "BatchNorm cannot be folded",
    # integers
    "QS030": "one channel takes the range of the whole weight",
    "QS031": "the bias does not fit into int32",
    "QS032": "the inputs of a concatenation have very different ranges",
    "QS033": "calibration data differs in scale from evaluation data",
    "QS034": "too few batches",
    "QS035": "the range still grows in the last batch",
    "QS036": "few channels of what is read take its range",
    "QS037": "few tokens of what is read take its range",
}
