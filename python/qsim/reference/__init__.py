"""The numeric contract in plain torch, one twin per operator: slow, readable, the oracle of the tests."""

from qsim.reference.choose_qparams import choose_qparams
from qsim.reference.clip_grad import clip_grad_
from qsim.reference.dynamic import choose_block_scale, fake_quantize_dynamic, round_to_format_dynamic
from qsim.reference.fake_quantize import fake_quantize, fake_quantize_backward
from qsim.reference.fake_quantize_bias import fake_quantize_bias
from qsim.reference.int4 import pack_int4, unpack_int4
from qsim.reference.observe import observe_, observe_range_
from qsim.reference.observe_fake_quantize import observe_fake_quantize
from qsim.reference.quantize import dequantize, quantize
from qsim.reference.round_to_format import count_format_, round_to_format, round_to_format_backward
from qsim.reference.search_range import search_range
from qsim.reference.search_range_data import search_range_data, search_range_weights

__all__ = [
    "choose_block_scale",
    "choose_qparams",
    "clip_grad_",
    "count_format_",
    "dequantize",
    "fake_quantize",
    "fake_quantize_backward",
    "fake_quantize_bias",
    "fake_quantize_dynamic",
    "observe_",
    "observe_fake_quantize",
    "observe_range_",
    "pack_int4",
    "quantize",
    "round_to_format",
    "round_to_format_backward",
    "round_to_format_dynamic",
    "search_range",
    "search_range_data",
    "search_range_weights",
    "unpack_int4",
]
