"""compressed-tensors: what vLLM, llm-compressor and transformers read and write. Here the format "pack-quantized"; those of 8 bits with
quantized activations are in `eight_bits`.

Source: github.com/vllm-project/compressed-tensors, compressors/pack_quantized. At 4 and 8 bits, the ones known here, every version of it
packs alike: along the input channels, the first number in the lowest bits, each raised by half of the grid.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from qsim.checkpoints import eight_bits
from qsim.checkpoints.bit_stream import pack, unpack
from qsim.checkpoints.eight_bits import Activation
from qsim.checkpoints.folder import SCALE_TYPES, Parts
from qsim.checkpoints.packed_weight import PackedWeight, Scheme
from qsim.files.file_place import FilePlace
from qsim.warning import warn

FORMAT = "compressed-tensors"
_BITS = (4, 8)
_LAYOUT = "pack-quantized"


def read(state: dict[str, Tensor], quantization: Mapping[str, Any], place: FilePlace) -> dict[str, PackedWeight]:
    """The packed weights of `state`, which are taken out of it."""
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise place.wanted("config_groups", groups, "an object that is not empty")
    layout = _layouts(quantization)
    if len(layout) == 1 and (one := next(iter(layout))) in eight_bits.TYPES:
        return eight_bits.read(state, groups, one, place)
    schemes = [group.get("weights") if isinstance(group, dict) else None for group in groups.values()]
    for scheme in schemes:
        if not isinstance(scheme, dict) or scheme.get("num_bits") not in _BITS or scheme.get("type", "int") != "int":
            raise place.wanted("weights of config_groups", scheme, f"integers of {' or '.join(map(str, _BITS))} bits, packed")
    if layout != {_LAYOUT}:
        raise place.wanted("format", sorted(map(str, layout)), " or ".join(map(repr, (_LAYOUT, *eight_bits.TYPES))))
    for name, group in groups.items():
        if (given := group.get("input_activations")) is not None:
            raise place.at(name).wanted(
                "input_activations", given, f"null: activations are read beside {', '.join(eight_bits.TYPES)} alone"
            )
    modules = [name.removesuffix(".weight_packed") for name in state if name.endswith(".weight_packed")]
    return {f"{module}.weight": _weight(Parts(state, module, place), schemes) for module in modules}


def _layouts(quantization: Mapping[str, Any]) -> set[Any]:
    """The formats that a config names, for all or for a group."""
    groups = [group for group in quantization["config_groups"].values() if isinstance(group, dict)]
    every = [quantization.get("format") or _LAYOUT, *(group.get("format") for group in groups)]
    return {str(layout) for layout in every if layout is not None}


def read_activations(
    state: dict[str, Tensor], weights: Mapping[str, PackedWeight], quantization: Mapping[str, Any], place: FilePlace
) -> dict[str, Activation]:
    """What the weights that were read are multiplied with, where that is quantized; its scales are taken out of `state`."""
    (layout,) = _layouts(quantization)
    if layout not in eight_bits.TYPES:
        return {}
    return eight_bits.read_activations(state, weights, quantization["config_groups"], layout, place)


def layout_of(activation: Activation | None) -> str:
    """The format for weights that are multiplied with such activations."""
    return _LAYOUT if activation is None else eight_bits.layout_of(activation.spec) or _LAYOUT


def _weight(parts: Parts, schemes: list[Any]) -> PackedWeight:
    words = parts.take("weight_packed", 2, torch.int32)
    scale = parts.take("weight_scale", 2, *SCALE_TYPES)
    shape = parts.take("weight_shape", 1, torch.int64, torch.int32).tolist()
    parts.check("the length of weight_shape", len(shape), 2)
    rows, columns = shape
    parts.check("the number of rows", rows, words.shape[0])
    if columns < 1:
        raise parts.place.error(f"weight_shape is {shape}; expected positive numbers")
    groups = scale.shape[1]
    parts.check("the shape of weight_scale", tuple(scale.shape), (rows, groups))
    fitting = {
        (scheme["num_bits"], size)
        for scheme in schemes
        for size in [_group_size(scheme)]
        if -(-columns * scheme["num_bits"] // 32) == words.shape[1] and -(-columns // (size or columns)) == groups
    }
    if len(fitting) != 1:
        raise parts.place.error(
            f"weight_packed has shape {tuple(words.shape)} and weight_scale {tuple(scale.shape)} for {rows} x {columns} weights; expected "
            f"what one of config_groups says, but {len(fitting)} fit"
        )
    ((bits, size),) = fitting
    half = 2 ** (bits - 1)
    integers = (unpack(words, bits, columns).to(torch.int16) - half).to(torch.int8)
    order = parts.optional("weight_g_idx", 1, torch.int32, torch.int64)
    if order is not None and bool((order == -1).all()):
        order = None  # as older versions write it where there is none
    if order is not None:
        in_order = torch.arange(columns) // (size or columns)
        if not torch.equal(order.sort().values.long(), in_order):
            raise parts.place.error(f"weight_g_idx does not put {size or columns} of {columns} input channels into each of {groups} groups")
        order = None if torch.equal(order.long(), in_order) else order.int()
    return PackedWeight(integers, scale, _zero_point(parts, rows, groups, bits), bits, size, order)


def _group_size(scheme: Mapping[str, Any]) -> int | None:
    size = scheme.get("group_size")
    return size if isinstance(size, int) and not isinstance(size, bool) and size > 0 else None


def _zero_point(parts: Parts, rows: int, groups: int, bits: int) -> Tensor:
    stored = parts.optional("weight_zero_point", 2, torch.int32, torch.int8)
    if stored is None:
        return torch.zeros(rows, groups, dtype=torch.int32)
    if stored.dtype == torch.int8:  # before 0.10: not packed
        parts.check("the shape of weight_zero_point", tuple(stored.shape), (rows, groups))
        if not -(2 ** (bits - 1)) <= int(stored.min()) <= int(stored.max()) < 2 ** (bits - 1):
            raise parts.place.error(f"weight_zero_point leaves the grid of {bits} bits")
        return stored.to(torch.int32)
    parts.check("the shape of weight_zero_point", tuple(stored.shape), (-(-rows * bits // 32), groups))
    centred: Tensor = unpack(stored.T.contiguous(), bits, rows).T.to(torch.int32) - 2 ** (bits - 1)
    return centred.contiguous()


def quantization(schemes: Mapping[str, Scheme], layout: str, linear: Sequence[str] | None = None) -> dict[str, Any]:
    """What ``quantization_config`` says of packed modules. `linear` names all linear layers, if known."""
    groups: dict[Scheme, list[str]] = defaultdict(list)
    for module, scheme in schemes.items():
        groups[scheme].append(module)
    by_type = len(groups) == 1 and linear is not None
    return {
        "quant_method": FORMAT,
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{i}": {
                "targets": ["Linear"] if by_type else modules,
                **(eight_bits.described(scheme, layout) if layout in eight_bits.TYPES else _described(scheme)),
            }
            for i, (scheme, modules) in enumerate(groups.items())
        },
        "ignore": [path for path in linear or () if path not in schemes],
        "kv_cache_scheme": None,
    }


def warn_of_zero_points(schemes: Mapping[str, Scheme]) -> None:
    """Zero points are packed, as the format has it and vLLM reads them; one reader has no room for that while it loads."""
    shifted = [module for module, scheme in schemes.items() if not scheme.symmetric]
    if not shifted:
        return
    more = f" and {len(shifted) - 1} more" if len(shifted) > 1 else ""
    cure = "unless told from_pretrained(folder, quantization_config=CompressedTensorsConfig(dequantize=True))"
    if len(set(schemes.values())) > 1:  # of several it would take the first for all
        cure = "and has no way round it beside weights of other widths, groups or symmetry"
    warn(
        f"qsim: {shifted[0]!r}{more} written with zero points, packed as vLLM reads them. transformers with "
        f"compressed-tensors 0.18 to 0.20 refuses those (a size mismatch of weight_zero_point) {cure}; symmetric=True has none"
    )


def _described(scheme: Scheme) -> dict[str, Any]:
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


def packed(weight: PackedWeight, layout: str) -> dict[str, Tensor]:
    """The tensors of a weight, by what stands behind the name of its module."""
    if layout in eight_bits.TYPES:
        return eight_bits.packed(weight)
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


def problem(weight: PackedWeight, layout: str) -> str | None:
    """Why the format cannot hold a weight; None if it can."""
    if layout in eight_bits.TYPES:
        return eight_bits.problem(weight, layout)
    if weight.is_float:
        return "is float8; expected activations that are too, as qsim.fp8_dynamic() and fp8_static() have them"
    if weight.integers.dim() != 2 or weight.minimum is not None or weight.is_per_tensor:
        return "is no matrix of integers with zero points and a scale a row or group"
    if weight.bits not in _BITS:
        return f"has {weight.bits} bits; expected 4 or 8"
    if weight.integers.shape[1] % weight.group_size:
        return f"has {weight.integers.shape[1]} input channels, which groups of {weight.group_size} do not divide"
    return None
