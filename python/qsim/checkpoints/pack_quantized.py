"""compressed-tensors, the layout "pack-quantized": integers of 4 and 8 bits in words, activations in float.

Source: github.com/vllm-project/compressed-tensors, compressors/pack_quantized. At 4 and 8 bits, the ones known here, every version of it
packs alike: along the input channels, the first number in the lowest bits, each raised by half of the grid.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from qsim.checkpoints.bit_stream import pack, unpack
from qsim.checkpoints.config_groups import Group
from qsim.checkpoints.folder import SCALE_TYPES, Parts, is_size
from qsim.checkpoints.packed_weight import PackedWeight, Scheme

_BITS = (4, 8)
LAYOUT = "pack-quantized"
_SHUFFLED = ("group", "dynamic", True)  # what "actorder" says where groups do not follow the columns


def check(group: Group) -> None:
    """Raise unless a group of config_groups is one of packed integers."""
    scheme = group.weights
    if scheme.get("num_bits") not in _BITS or scheme.get("type", "int") != "int":
        raise group.place.wanted("weights of config_groups", scheme, f"integers of {' or '.join(map(str, _BITS))} bits, packed")
    if group.activations is not None:
        raise group.place.wanted(
            "input_activations", group.activations, f"null beside {LAYOUT!r}: activations of packed weights are not read"
        )


def read(parts: Parts, groups: Sequence[Group]) -> PackedWeight:
    """A weight, which one of the groups describes."""
    schemes = [group.weights for group in groups]
    words = parts.take("weight_packed", 2, torch.int32)
    scale = parts.take("weight_scale", 2, *SCALE_TYPES)
    shape = parts.take("weight_shape", 1, torch.int64, torch.int32).tolist()
    parts.check("the length of weight_shape", len(shape), 2)
    rows, columns = shape
    parts.check("the number of rows", rows, words.shape[0])
    if columns < 1:
        raise parts.place.error(f"weight_shape is {shape}; expected positive numbers")
    count = scale.shape[1]
    parts.check("the shape of weight_scale", tuple(scale.shape), (rows, count))
    described = [
        scheme
        for scheme in schemes
        if -(-columns * scheme["num_bits"] // 32) == words.shape[1] and -(-columns // (_group_size(scheme) or columns)) == count
    ]
    fitting = {(scheme["num_bits"], _group_size(scheme)) for scheme in described}
    if len(fitting) != 1:
        raise parts.place.error(
            f"weight_packed has shape {tuple(words.shape)} and weight_scale {tuple(scale.shape)} for {rows} x {columns} weights; expected "
            f"what one of config_groups says, but {len(fitting)} fit"
        )
    ((bits, size),) = fitting
    half = 2 ** (bits - 1)
    integers = (unpack(words, bits, columns).to(torch.int16) - half).to(torch.int8)
    shuffled = all(scheme.get("actorder") in _SHUFFLED for scheme in described)
    order = (parts.take if shuffled else parts.optional)("weight_g_idx", 1, torch.int32, torch.int64)
    if order is not None and bool((order == -1).all()):
        order = None  # as older versions write it where there is none
    if order is not None:
        in_order = torch.arange(columns) // (size or columns)
        if not torch.equal(order.sort().values.long(), in_order):
            raise parts.place.error(f"weight_g_idx does not put {size or columns} of {columns} input channels into each of {count} groups")
        order = None if torch.equal(order.long(), in_order) else order.int()
    symmetric = {scheme.get("symmetric") is not False for scheme in described}
    return PackedWeight(integers, scale, _zero_point(parts, rows, count, bits, symmetric), bits, size, order)


def _group_size(scheme: Mapping[str, Any]) -> int | None:
    size = scheme.get("group_size")
    return size if is_size(size) else None


def _zero_point(parts: Parts, rows: int, groups: int, bits: int, symmetric: Collection[bool]) -> Tensor:
    """`symmetric`: what the groups that describe the weight say."""
    stored = (parts.optional if True in symmetric else parts.take)("weight_zero_point", 2, torch.int32, torch.int8)
    if stored is None:
        return torch.zeros(rows, groups, dtype=torch.int32)
    zero_point = _unpacked(parts, stored, rows, groups, bits)
    if False not in symmetric and bool(zero_point.any()):
        raise parts.place.error("weight_zero_point is not 0 everywhere, though config_groups says symmetric")
    return zero_point


def _unpacked(parts: Parts, stored: Tensor, rows: int, groups: int, bits: int) -> Tensor:
    if stored.dtype == torch.int8:  # before 0.10: not packed
        parts.check("the shape of weight_zero_point", tuple(stored.shape), (rows, groups))
        if not -(2 ** (bits - 1)) <= int(stored.min()) <= int(stored.max()) < 2 ** (bits - 1):
            raise parts.place.error(f"weight_zero_point leaves the grid of {bits} bits")
        return stored.to(torch.int32)
    parts.check("the shape of weight_zero_point", tuple(stored.shape), (-(-rows * bits // 32), groups))
    centred: Tensor = unpack(stored.T.contiguous(), bits, rows).T.to(torch.int32) - 2 ** (bits - 1)
    return centred.contiguous()


def described(scheme: Scheme) -> dict[str, Any]:
    """What a group of config_groups says, besides its targets."""
    weights = {
        "num_bits": scheme.bits,
        "type": "int",
        "symmetric": scheme.symmetric,
        "strategy": "channel" if scheme.block_size is None else "group",
        "dynamic": False,
        "group_size": scheme.block_size,
        **({} if scheme.in_order else {"actorder": "group"}),
    }
    return {"weights": weights, "input_activations": None, "output_activations": None}


def _centred(weight: PackedWeight) -> tuple[Tensor, Tensor]:
    """Integers and zero points around 0, both int32."""
    return weight.integers.to(torch.int32) - weight.middle, weight.zero_point - weight.middle


def packed(weight: PackedWeight) -> dict[str, Tensor]:
    """The tensors of a weight, by what stands behind the name of its module."""
    half = 2 ** (weight.bits - 1)
    integers, zero_point = _centred(weight)
    tensors = {
        "weight_packed": pack(integers + half, weight.bits),
        "weight_scale": weight.scale.contiguous(),
        "weight_shape": torch.tensor(integers.shape),
    }
    if bool(zero_point.any()):
        tensors["weight_zero_point"] = pack(zero_point.T + half, weight.bits).T.contiguous()
    if weight.order is not None:
        tensors["weight_g_idx"] = weight.order
    return tensors


def problem(weight: PackedWeight) -> str | None:
    """Why the layout cannot hold a weight; None if it can."""
    if weight.integers.dim() != 2 or weight.minimum is not None or weight.is_per_tensor or weight.is_tiled:
        return "is no matrix of integers with zero points and a scale a row or group"
    if weight.bits not in _BITS:
        return f"has {weight.bits} bits; expected 4 or 8"
    if weight.integers.shape[1] % weight.group_size:
        return f"has {weight.integers.shape[1]} input channels, which groups of {weight.group_size} do not divide"
    return None
