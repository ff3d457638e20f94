"""qsim: what int8, int4, fp16 and fp8 will do to a PyTorch model, seen before it is deployed."""

from qsim import ops, reference
from qsim._library import cpu_capability
from qsim.batch_norm import FoldReport, fold_batch_norms

__version__ = "0.1.0"

__all__ = ["FoldReport", "cpu_capability", "fold_batch_norms", "ops", "reference"]
