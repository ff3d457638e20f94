"""The numeric contract in plain torch, one twin per operator: slow, readable, the oracle of the tests."""

from qsim.reference.choose_qparams import choose_qparams
from qsim.reference.clip_grad import clip_grad_
from qsim.reference.fake_quantize import fake_quantize, fake_quantize_backward
from qsim.reference.int4 import pack_int4, unpack_int4
from qsim.reference.observe import observe_, observe_range_
from qsim.reference.quantize import dequantize, quantize
from qsim.reference.search_range import search_range
from qsim.reference.search_range_data import search_range_data

__all__ = [
    "choose_qparams",
    "clip_grad_",
    "dequantize",
    "fake_quantize",
    "fake_quantize_backward",
    "observe_",
    "observe_range_",
    "pack_int4",
    "quantize",
    "search_range",
    "search_range_data",
    "unpack_int4",
]
