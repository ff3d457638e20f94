"""GPTQ checkpoints, as auto-gptq and GPTQModel write them.

Source: github.com/ModelCloud/GPTQModel, nn_modules/qlinear and utils/model.py; github.com/AutoGPTQ/AutoGPTQ. Integers lie in bit streams
along the input channels (``qweight``), zero points along the output channels (``qzeros``). The layout "gptq" stores zero points
minus one, "gptq_v2" as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from qsim.checkpoints.activation import NO_ACTIVATIONS, Activation
from qsim.checkpoints.bit_stream import pack, unpack
from qsim.checkpoints.folder import SCALE_TYPES, Parts, is_size, said_once
from qsim.checkpoints.packed_weight import PackedWeight, Scheme, left_in_float
from qsim.files.file_place import FilePlace
from qsim.warning import warn

FORMAT, SECOND = "gptq", "gptq_v2"
_BITS = (2, 3, 4, 8)
_NOT = "-:"  # before a pattern of "dynamic": names that it begins are left in float


def read(
    state: dict[str, Tensor], quantization: Mapping[str, Any], place: FilePlace
) -> tuple[dict[str, PackedWeight], dict[str, Activation]]:
    """The packed weights of `state`, which are taken out of it, and what they are multiplied with: floats."""
    layout, dynamic = layout_of(quantization, place), quantization.get("dynamic")
    if dynamic is not None and not isinstance(dynamic, dict):
        raise place.wanted("dynamic of quantization_config", dynamic, "an object, of patterns of names")
    modules = [name.removesuffix(".qweight") for name in state if name.endswith(".qweight")]
    found, wrapped = {}, []
    for module in modules:
        weight, wraps = _weight(Parts(state, module, place), quantization, 1 if layout == FORMAT else 0)
        found[f"{module}.weight"] = weight
        wrapped += [module] if wraps else []
    if wrapped:
        warn(
            f"qsim: {place.file!r}: {len(wrapped)} layers ({wrapped[0]!r}, ...) store a zero point of 0 as if it were -1. auto-gptq reads "
            "0, as here; GPTQModel's addition runs over into the next zero point. Write it again, as gptq_v2"
        )
    return found, {}


def layout_of(quantization: Mapping[str, Any], place: FilePlace) -> str:
    """Which of the two layouts a ``quantization_config`` says; "checkpoint_format" is the older name of the key."""
    layout = said_once(quantization, ("format", "checkpoint_format"), place) or FORMAT
    if layout not in (FORMAT, SECOND):
        raise place.wanted("format of quantization_config", layout, "'gptq' or 'gptq_v2'; convert it with GPTQModel")
    return str(layout)


def _weight(parts: Parts, quantization: Mapping[str, Any], less: int) -> tuple[PackedWeight, bool]:
    """A weight, and whether a zero point of 0 was stored as -1."""
    words, zeros = parts.take("qweight", 2, torch.int32), parts.take("qzeros", 2, torch.int32)
    scale = parts.take("scales", 2, *SCALE_TYPES)
    order = (parts.take if quantization.get("desc_act") else parts.optional)("g_idx", 1, torch.int32, torch.int64)
    bits = _bits(parts, quantization, words.shape[0], None if order is None else order.shape[0])
    columns, rows, groups = words.shape[0] * 32 // bits, words.shape[1], scale.shape[0]
    parts.check("the shape of scales", tuple(scale.shape), (groups, rows))
    parts.check("the shape of qzeros", tuple(zeros.shape), (groups, -(-rows * bits // 32)))
    given = _group_size(parts, quantization)
    size = _largest_group(order) if order is not None else given or columns
    in_order = torch.arange(columns, dtype=torch.int32) // size
    parts.check("the number of groups", groups, -(-columns // size))
    if order is not None and not torch.equal(order.sort().values.int(), in_order):
        raise parts.place.error(f"g_idx does not put {size} of {columns} input channels into each of {groups} groups")
    stored = unpack(zeros, bits, rows).T.to(torch.int32)
    zero_point = (stored + less) & (2**bits - 1)
    shuffled = order is not None and not torch.equal(order.int(), in_order)
    order = order.int() if order is not None and shuffled else None
    one = groups == 1  # in a group that is longer than a row, or in none
    block_size = size if not one else given if given is not None and given >= columns else None
    integers = unpack(words.T.contiguous(), bits, columns)
    return PackedWeight(integers, scale.T.contiguous(), zero_point.contiguous(), bits, block_size, order), bool((zero_point < less).any())


def _bits(parts: Parts, quantization: Mapping[str, Any], words: int, columns: int | None) -> int:
    given = quantization.get("bits")
    if columns is None:
        if given not in _BITS:
            raise parts.place.wanted("bits of quantization_config", given, f"one of {_BITS}")
        bits = int(given)
    else:
        bits = words * 32 // columns
        parts.check("rows of qweight times 32", words * 32, bits * columns)
    if bits not in _BITS or words * 32 % bits:
        raise parts.place.error(f"qweight has {words} rows for {columns} input channels, {bits} bits each; expected one of {_BITS}")
    varies = any(not pattern.startswith(_NOT) for pattern in quantization.get("dynamic") or ())
    if given != bits and not varies:
        raise parts.place.error(f"has {bits} bits by its tensors; expected {given!r}, as quantization_config says")
    return bits


def _group_size(parts: Parts, quantization: Mapping[str, Any]) -> int | None:
    given = quantization.get("group_size", -1)
    if not is_size(given) and (type(given) is not int or given != -1):
        raise parts.place.wanted("group_size of quantization_config", given, "-1 or a positive integer")
    return None if given == -1 else given


def _largest_group(order: Tensor) -> int:
    return int(torch.unique(order, return_counts=True)[1].max())


def packed(weight: PackedWeight, activation: Activation | None, format: str) -> dict[str, Tensor]:
    """The tensors of a weight, by what stands behind the name of its module."""
    integers, zero_point = raise_to_unsigned(weight)
    order = torch.arange(integers.shape[1], dtype=torch.int32) // weight.group_size
    return {
        "qweight": pack(integers, weight.bits).T.contiguous(),
        "qzeros": pack((zero_point - int(format == FORMAT)).T, weight.bits),
        "scales": weight.scale.half().T.contiguous(),
        "g_idx": order if weight.order is None else weight.order,
    }


def quantization(schemes: Mapping[str, Scheme], format: str, linear: Sequence[str] | None = None) -> dict[str, Any]:
    """What ``quantization_config`` says of packed modules, which have one width and one group size. `linear` names all linear layers."""
    found, left_out = next(iter(schemes.values())), left_in_float(linear, schemes)
    return {
        "bits": found.bits,
        "group_size": _group(found),
        "sym": all(scheme.symmetric for scheme in schemes.values()),
        "lm_head": any(map(is_head, schemes)),
        "quant_method": FORMAT,
        "desc_act": not all(scheme.in_order for scheme in schemes.values()),
        "checkpoint_format": format,
        **({"dynamic": {f"{_NOT}^{re.escape(module)}$": {} for module in left_out}} if left_out else {}),
    }


def is_head(module: str) -> bool:
    """Whether readers take a module for the output of a language model, which they leave in float unless told."""
    return module.rpartition(".")[2] == "lm_head"


def problem(weight: PackedWeight, activation: Activation | None, format: str) -> str | None:
    """Why the format cannot hold a weight that is multiplied so; None if it can."""
    if activation is not None:
        return NO_ACTIVATIONS
    if problem := kind_problem(weight):
        return problem
    if weight.bits not in _BITS:
        return f"has {weight.bits} bits; expected one of {_BITS}"
    if weight.integers.shape[-1] * weight.bits % 32:
        return f"has {weight.integers.shape[-1]} input channels, which do not fill words of 32 bits"
    if weight.integers.shape[0] * weight.bits % 32:
        return f"has {weight.integers.shape[0]} output channels, whose zero points do not fill words of 32 bits"
    if format == FORMAT and bool((raise_to_unsigned(weight)[1] < 1).any()):
        return f"has zero points of 0, which readers of {FORMAT!r} disagree on: format={SECOND!r}"
    return half_problem(weight)


def kind_problem(weight: PackedWeight) -> str | None:
    """Why a format with a scale and a zero point for each group of integers cannot hold a weight; None if it can."""
    if weight.is_float:
        return "is float8; expected integers"
    if weight.is_per_tensor or weight.is_tiled:
        return f"has one scale for {'each tile' if weight.is_tiled else 'all of it'}; expected one a row or group"
    if weight.integers.dim() != 2 or weight.minimum is not None:
        return "is no matrix of integers with zero points"
    return None


def half_problem(weight: PackedWeight) -> str | None:
    """Why a format with scales of float16 cannot hold a weight; None if it can."""
    if not torch.equal(weight.scale.half().float(), weight.scale.float()):
        return "has scales that are no numbers of float16: call sim.round_scales(torch.float16) first"
    return None


def differing(schemes: Mapping[str, Scheme], format: str) -> dict[str, str]:
    """The weights that are packed otherwise than the first: such a format says the width and the group size once for all."""
    if not schemes:
        return {}
    first = next(iter(schemes.values()))
    return {
        name: f"has {scheme.bits} bits in groups of {_group(scheme)}, others {first.bits} in groups of {_group(first)} (-1: a whole row); "
        "expected one width and one group size for all"
        for name, scheme in schemes.items()
        if (scheme.bits, scheme.block_size) != (first.bits, first.block_size)
    }


def _group(scheme: Scheme) -> int | tuple[int, int]:
    return -1 if scheme.block_size is None else scheme.block_size


def raise_to_unsigned(weight: PackedWeight) -> tuple[Tensor, Tensor]:
    """Integers and zero points on ``0 .. 2**bits - 1``, both int32."""
    up = 2 ** (weight.bits - 1) if weight.integers.dtype == torch.int8 else 0
    return weight.integers.to(torch.int32) + up, weight.zero_point + up
