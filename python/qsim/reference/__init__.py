"""The numeric contract in plain torch, one twin per operator: slow, readable, the oracle of the tests."""

from qsim.reference.choose_qparams import choose_qparams

__all__ = ["choose_qparams"]
