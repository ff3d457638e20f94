"""The operators, documented: shapes, dtypes, gradients, errors, source of each formula.

Each is a thin function over ``torch.ops.qsim``; `qsim.reference` holds the plain-torch twin of each.
"""

from qsim import _library as _library  # registers torch.ops.qsim
from qsim.ops.choose_qparams import choose_qparams
from qsim.ops.clip_grad import clip_grad_, grad_power_sum, scale_grad_
from qsim.ops.dynamic import choose_block_scale, fake_quantize_dynamic, round_to_format_dynamic
from qsim.ops.fake_quantize import fake_quantize, fake_quantize_
from qsim.ops.fake_quantize_bias import fake_quantize_bias
from qsim.ops.int4 import pack_int4, unpack_int4
from qsim.ops.observe import observe_, observe_range_
from qsim.ops.observe_fake_quantize import observe_fake_quantize
from qsim.ops.quantize import dequantize, quantize
from qsim.ops.round_to_format import count_format_, round_to_format, round_to_format_, round_to_format_counted
from qsim.ops.search_range import search_range, search_range_data, search_range_weights

__all__ = [
    "choose_block_scale",
    "choose_qparams",
    "clip_grad_",
    "count_format_",
    "dequantize",
    "fake_quantize",
    "fake_quantize_",
    "fake_quantize_bias",
    "fake_quantize_dynamic",
    "grad_power_sum",
    "observe_",
    "observe_fake_quantize",
    "observe_range_",
    "pack_int4",
    "quantize",
    "round_to_format",
    "round_to_format_",
    "round_to_format_counted",
    "round_to_format_dynamic",
    "scale_grad_",
    "search_range",
    "search_range_data",
    "search_range_weights",
    "unpack_int4",
]
