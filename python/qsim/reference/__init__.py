"""The numeric contract in plain torch, one twin per operator: slow, readable, the oracle of the tests."""

from qsim.reference.choose_qparams import choose_qparams
from qsim.reference.search_range import search_range
from qsim.reference.search_range_data import search_range_data

__all__ = ["choose_qparams", "search_range", "search_range_data"]
