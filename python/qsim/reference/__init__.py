"""The numeric contract in plain torch, one twin per operator: slow, readable, the oracle of the tests."""

from qsim.reference.choose_qparams import choose_qparams
from qsim.reference.fake_quantize import fake_quantize, fake_quantize_backward

__all__ = ["choose_qparams", "fake_quantize", "fake_quantize_backward"]
