"""qsim: what int8, int4, fp16 and fp8 will do to a PyTorch model, seen before it is deployed."""

from qsim import ops, reference
from qsim._library import cpu_capability
from qsim.clip_grad import clip_grad_norm_

__version__ = "0.1.0"

__all__ = ["clip_grad_norm_", "cpu_capability", "ops", "reference"]
