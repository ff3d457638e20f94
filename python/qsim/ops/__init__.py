"""The operators, documented: shapes, dtypes, gradients, errors, source of each formula.

Each is a thin function over ``torch.ops.qsim``; `qsim.reference` holds the plain-torch twin of each.
"""

from qsim import _library as _library  # registers torch.ops.qsim
from qsim.ops.choose_qparams import choose_qparams
from qsim.ops.search_range import search_range, search_range_data

__all__ = ["choose_qparams", "search_range", "search_range_data"]
