"""AWQ checkpoints, in the layout that AutoAWQ calls "gemm": 4 bits, eight output channels to a word.

Source: github.com/casper-hansen/AutoAWQ, awq/utils/packing_utils.py and awq/modules/linear/gemm.py. From the lowest bits on a word holds
the channels 0, 2, 4, 6, 1, 3, 5, 7 of its eight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from qsim.checkpoints.activation import NO_ACTIVATIONS, Activation
from qsim.checkpoints.bit_stream import pack, unpack
from qsim.checkpoints.folder import SCALE_TYPES, Parts, said_once
from qsim.checkpoints.gptq import differing as differing
from qsim.checkpoints.gptq import half_problem, is_head, kind_problem, raise_to_unsigned
from qsim.checkpoints.packed_weight import PackedWeight, Scheme, left_in_float
from qsim.files.file_place import FilePlace
from qsim.warning import warn

FORMAT, _VERSION = "awq", "gemm"
_BITS, _EACH = 4, 8
_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
_BACK = [_ORDER.index(i) for i in range(_EACH)]


def read(
    state: dict[str, Tensor], quantization: Mapping[str, Any], place: FilePlace
) -> tuple[dict[str, PackedWeight], dict[str, Activation]]:
    """The packed weights of `state`, which are taken out of it, and what they are multiplied with: floats."""
    version, bits = said_once(quantization, ("format", "version"), place), said_once(quantization, ("bits", "w_bit"), place)
    if version not in (None, _VERSION):
        raise place.wanted("version of quantization_config", version, "'gemm', the layout of nearly all checkpoints")
    if bits != _BITS:
        raise place.wanted("bits of quantization_config", bits, "4")
    modules = [name.removesuffix(".qweight") for name in state if name.endswith(".qweight")]
    whole_rows = said_once(quantization, ("group_size", "q_group_size"), place) == -1
    return {f"{module}.weight": _weight(Parts(state, module, place), whole_rows) for module in modules}, {}


def _weight(parts: Parts, whole_rows: bool) -> PackedWeight:
    words, zeros = parts.take("qweight", 2, torch.int32), parts.take("qzeros", 2, torch.int32)
    scale = parts.take("scales", 2, *SCALE_TYPES)
    columns, rows, groups = words.shape[0], words.shape[1] * _EACH, scale.shape[0]
    parts.check("the shape of scales", tuple(scale.shape), (groups, rows))
    parts.check("the shape of qzeros", tuple(zeros.shape), (groups, rows // _EACH))
    if whole_rows:
        parts.check("the number of groups", groups, 1)
    parts.check("input channels beyond whole groups", columns % groups, 0)
    zero_point = _reordered(unpack(zeros, _BITS, rows), _BACK).T.to(torch.int32).contiguous()
    integers = _reordered(unpack(words, _BITS, rows), _BACK).T.contiguous()
    return PackedWeight(integers, scale.T.contiguous(), zero_point, _BITS, None if whole_rows else columns // groups)


def _reordered(numbers: Tensor, order: list[int]) -> Tensor:
    return numbers.reshape(len(numbers), -1, _EACH)[..., order].flatten(1)


def packed(weight: PackedWeight, activation: Activation | None, format: str) -> dict[str, Tensor]:
    """The tensors of a weight, by what stands behind the name of its module."""
    integers, zero_point = raise_to_unsigned(weight)
    return {
        "qweight": pack(_reordered(integers.T, _ORDER), _BITS),
        "qzeros": pack(_reordered(zero_point.T, _ORDER), _BITS),
        "scales": weight.scale.half().T.contiguous(),
    }


def quantization(schemes: Mapping[str, Scheme], format: str, linear: Sequence[str] | None = None) -> dict[str, Any]:
    """What ``quantization_config`` says of packed modules, which have one group size. `linear` names all linear layers."""
    found, left_out = next(iter(schemes.values())), left_in_float(linear, schemes)
    size = -1 if found.block_size is None else found.block_size
    return {
        "quant_method": FORMAT,
        "bits": _BITS,
        "group_size": size,
        "zero_point": True,
        "version": _VERSION,
        **({"modules_to_not_convert": left_out} if left_out else {}),
        **({"lm_head": True} if any(map(is_head, schemes)) else {}),
    }


def warn_of_readers(schemes: Mapping[str, Scheme], linear: Sequence[str] | None) -> None:
    """Say what readers make of the files otherwise than they are."""
    heads = [module for module in schemes if is_head(module)]
    if heads:
        warn(
            f"qsim: {heads[0]!r} is written packed. AutoAWQ and transformers leave heads in float, whatever the file says, and would have "
            "random numbers there; vLLM reads it where it runs Marlin. position='last' in float, or another format, all read"
        )
    left_out = left_in_float(linear, schemes)
    mistaken = [(name, module) for name in left_out for module in schemes if name in module]
    if mistaken:
        name, module = mistaken[0]
        warn(
            f"qsim: {name!r} is written in float and {module!r} packed. AutoAWQ and vLLM leave all layers in float whose names have "
            f"{name!r} in them ({len(mistaken)} such pairs); give layers other names, or quantize both"
        )


def problem(weight: PackedWeight, activation: Activation | None, format: str) -> str | None:
    """Why the format cannot hold a weight that is multiplied so; None if it can."""
    if activation is not None:
        return NO_ACTIVATIONS
    if problem := kind_problem(weight):
        return problem
    if weight.bits != _BITS:
        return f"has {weight.bits} bits; expected 4"
    if weight.order is not None:
        return "has groups out of order (desc_act=True): the format has none such"
    if weight.integers.shape[0] % _EACH or weight.integers.shape[-1] % weight.group_size:
        return f"has shape {tuple(weight.integers.shape)} in groups of {weight.group_size}; expected multiples of 8, in whole groups"
    return half_problem(weight)
