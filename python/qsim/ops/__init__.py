"""The operators, documented: shapes, dtypes, gradients, errors, source of each formula.

Each is a thin function over ``torch.ops.qsim``; `qsim.reference` holds the plain-torch twin of each.
"""

from qsim import _library as _library  # registers torch.ops.qsim
from qsim.ops.choose_qparams import choose_qparams
from qsim.ops.fake_quantize import fake_quantize, fake_quantize_

__all__ = ["choose_qparams", "fake_quantize", "fake_quantize_"]
