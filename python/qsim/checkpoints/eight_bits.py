"""compressed-tensors, the layouts "int-quantized", "float-quantized" and "naive-quantized": weights of 8 bits as they are.

Source: github.com/vllm-project/compressed-tensors, compressors/naive_quantized and quantization/quant_args. ``weight`` is int8 or
float8_e4m3fn with one scale an output channel or one for all, of float8 also one a tile, without zero points. What it is multiplied with is
in float, or has a scale from each token (beside tiles from each block of a token), or one from calibration: ``input_scale``, with an
``input_zero_point`` where the grid is not symmetric.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from qsim.checkpoints.activation import (
    POWERS,
    Activation,
    blocks_problem,
    by_block,
    by_token,
    calibrated,
    finite,
    kind_of,
    one_scale,
    packed_activation,
    weight_scale,
)
from qsim.checkpoints.config_groups import Group
from qsim.checkpoints.folder import SCALE_TYPES, Parts, is_size
from qsim.checkpoints.packed_weight import PackedWeight, Scheme
from qsim.files.file_place import FilePlace
from qsim.numbers.blocks import ranges_shape

_KINDS = {"int-quantized": "int", "float-quantized": "float"}
_ONLY_WEIGHTS = "naive-quantized"
LAYOUTS = (*_KINDS, _ONLY_WEIGHTS)
_DTYPES = {"int": torch.int8, "float": torch.float8_e4m3fn}
_ABSENT: dict[str, Any] = {"type": "int", "symmetric": True, "dynamic": False, "strategy": "tensor"}  # what is meant where nothing is said
_CURE = (
    "llm-compressor makes such files with QuantizationModifier(scheme='FP8_DYNAMIC'), scheme='FP8', scheme='FP8_BLOCK' or, for int8, "
    "scheme='W8A8'; qsim with fp8_dynamic(), fp8_static(), fp8_block(), w8a8_dynamic() and w8a8_static()"
)


def dtype_of(group: Group) -> torch.dtype:
    """What the weights of a group are stored as."""
    return _DTYPES[_kind(group)]


def _kind(group: Group) -> str:
    return _KINDS.get(group.layout) or str(_said(group.weights, "type"))


def check(group: Group) -> None:
    """Raise unless a group of config_groups is one of these layouts."""
    at, kind = group.place, _KINDS.get(group.layout) or _said(group.weights, "type")
    strategies = ["channel", "tensor", *(["block"] if kind == "float" else [])]
    types = [kind] if group.layout in _KINDS else list(_DTYPES)
    _check(group.weights, types, {"symmetric": [True], "strategy": strategies, "dynamic": [False]}, at.at("weights"))
    tile = _tile(group)
    given, at = group.activations, at.at("input_activations")
    if given is None:
        return
    dynamic = given.get("dynamic", False) is not False
    symmetric = [True] if dynamic or kind == "float" else [True, False]
    strategy = "tensor" if not dynamic else "token" if tile is None else "group"
    wanted: dict[str, list[Any]] = {"dynamic": [True, False] if tile is None else [True], "strategy": [strategy], "symmetric": symmetric}
    _check(given, types, {**wanted, "group_size": [None if tile is None else tile[1]]}, at)


def _tile(group: Group) -> tuple[int, int] | None:
    """Rows and columns that share a scale, where tiles do."""
    found, tiled = group.weights.get("block_structure"), _said(group.weights, "strategy") == "block"
    if not tiled and found is None:
        return None
    written = re.fullmatch(r"([1-9]\d{,8})x([1-9]\d{,8})", found) if isinstance(found, str) else None  # by older versions
    sizes = list(map(int, written.groups())) if written else found
    if tiled and isinstance(sizes, list) and len(sizes) == 2 and all(map(is_size, sizes)):
        return int(sizes[0]), int(sizes[1])
    place = group.place.at("weights")
    raise place.wanted("block_structure", found, 'two positive integers beside the strategy "block"' if tiled else "null")


def _said(arguments: Mapping[str, Any], name: str) -> Any:
    return arguments.get(name, _ABSENT.get(name))


def _check(found: Mapping[str, Any], types: list[str], wanted: Mapping[str, list[Any]], place: FilePlace) -> None:
    every: dict[str, list[Any]] = {"num_bits": [8], "type": types, "group_size": [None], **wanted}
    for name, values in every.items():
        place.require(name, _said(found, name), values, f". {_CURE}")
    for name in ("actorder", "scale_dtype"):
        if found.get(name) not in (None, "weight", "static"):
            raise place.wanted(name, found[name], "null")


def read(parts: Parts, groups: Sequence[Group]) -> tuple[PackedWeight, Activation | None]:
    """A weight, which one of the groups describes, and what it is multiplied with where that is quantized."""
    dtypes = {dtype_of(group): group for group in groups}
    values = finite(parts.take("weight", 2, *dtypes), parts)
    scale = weight_scale(parts, "weight_scale", (0, 1, 2))
    fitting = [group for group in groups if dtype_of(group) == values.dtype and _fits(group, values, scale)]
    if not fitting:
        said = " or ".join(sorted({_expected(group, values) for group in groups}))
        raise parts.place.error(f"weight_scale has shape {tuple(scale.shape)} for {tuple(values.shape)} weights; expected {said}")
    tiles = {_tile(group) for group in fitting}
    zero_point = parts.optional("weight_zero_point", (0, 1, 2), torch.int8, values.dtype)
    if zero_point is not None and bool(zero_point.float().any()):
        raise parts.place.error("weight_zero_point is not 0 everywhere, though config_groups says symmetric")
    if len(tiles) > 1:
        raise parts.place.error(f"config_groups has blocks of {' and '.join(map(str, tiles))} that it may be of; expected one")
    (tile,) = tiles
    scale = scale if tile is not None else scale.reshape(-1, 1)
    weight = PackedWeight(values, scale, torch.zeros(scale.shape, dtype=torch.int32), 8, tile)
    return weight, _activation(parts, fitting)


def _strategy(group: Group) -> str:
    return str(_said(group.weights, "strategy"))


def _fits(group: Group, values: Tensor, scale: Tensor) -> bool:
    if (tile := _tile(group)) is not None:
        return tuple(scale.shape) == ranges_shape(values.shape, dict(enumerate(tile)))
    if _strategy(group) == "channel":
        return tuple(scale.shape) == (len(values), 1)
    return scale.numel() == 1


def _expected(group: Group, values: Tensor) -> str:
    if (tile := _tile(group)) is not None:
        return f"{ranges_shape(values.shape, dict(enumerate(tile)))} for the strategy 'block' of {tile[0]} x {tile[1]}"
    return f"{(len(values), 1)} for the strategy 'channel'" if _strategy(group) == "channel" else "one for the strategy 'tensor'"


def _activation(parts: Parts, groups: Sequence[Group]) -> Activation | None:
    """What the groups say of activations, and the scale that is in the file decide."""
    kind, given = _kind(groups[0]), [group.activations for group in groups]
    scale = parts.optional("input_scale", (0, 1), *SCALE_TYPES)
    stored = parts.optional("input_zero_point", (0, 1), torch.int8, _DTYPES[kind])
    static = [said for said in given if said is not None and not _said(said, "dynamic")]
    if scale is None:
        others = {_dynamic(group) for group in groups if group.activations is None or _said(group.activations, "dynamic")}
        if not others:
            raise parts.place.error("has no input_scale, and config_groups says that activations are static: is the checkpoint complete?")
        if len(others) > 1:
            raise parts.place.error("config_groups has several ways to quantize its activations; expected one, by its targets")
        (spec,) = others
        return None if spec is None else Activation(spec, None)
    symmetric = stored is None or not bool(stored.float().any())
    parts.check("the number of input zero points", 1 if stored is None else stored.numel(), 1)
    fitting = sorted({bool(_said(said, "symmetric")) for said in static if symmetric or not _said(said, "symmetric")})
    if fitting == [False] and stored is None:
        raise parts.place.error("has no input_zero_point, and config_groups says symmetric false: is the checkpoint complete?")
    if not fitting:
        what = "is there" if not static else "is not 0, though activations are symmetric"
        raise parts.place.error(f"{'input_scale' if symmetric else 'input_zero_point'} {what}; expected what config_groups says")
    return calibrated(one_scale(kind, fitting[-1] if stored is None else fitting[0]), scale, stored, parts)


def _dynamic(group: Group) -> Any:
    """The spec of a group whose activations have no scale in the file; None where they are in float."""
    if group.activations is None:
        return None
    tile = _tile(group)
    return by_token(_kind(group)) if tile is None else by_block(tile[1])


def packed(weight: PackedWeight, activation: Activation | None) -> dict[str, Tensor]:
    """The tensors of a weight and of what it is multiplied with, by what stands behind the name of its module."""
    scale = weight.scale.reshape(-1) if weight.is_per_tensor else weight.scale
    return {"weight": weight.integers, "weight_scale": scale.contiguous(), **packed_activation(activation, weight.scale.dtype)}


def layout_of(scheme: Scheme) -> str:
    """The layout of weights that are packed so."""
    kind = "float" if scheme.is_float else "int"
    return _ONLY_WEIGHTS if scheme.activation is None else next(layout for layout, own in _KINDS.items() if own == kind)


def described(scheme: Scheme) -> dict[str, Any]:
    """What a group of config_groups says, besides its targets."""
    activation, tile = scheme.activation, scheme.block_size
    both = {"num_bits": 8, "type": "float" if scheme.is_float else "int", "group_size": None}
    weights: dict[str, Any] = {"symmetric": True, "strategy": "tensor" if scheme.per_tensor else "channel", "dynamic": False}
    if isinstance(tile, tuple):
        weights |= {"strategy": "block", "block_structure": list(tile)}
    found: dict[str, Any] = {"weights": {**both, **weights}, "input_activations": None, "output_activations": None}
    if activation is not None:
        strategy = "tensor" if not activation.is_dynamic else "token" if activation.block_size is None else "group"
        said = {"symmetric": activation.symmetric, "strategy": strategy, "dynamic": activation.is_dynamic}
        found["input_activations"] = {**both, **said, "group_size": activation.block_size}
    return found


def problem(weight: PackedWeight, activation: Activation | None) -> str | None:
    """Why no layout here can hold a weight that is multiplied so; None if one can."""
    kind = "float" if activation is None else kind_of(activation.spec)
    if kind is None or (activation is not None and activation.spec.scale_format == POWERS):
        return "is multiplied with activations that are quantized in another way than the format has; see Checkpoint.activations"
    if weight.integers.dim() != 2 or weight.minimum is not None or weight.order is not None:
        return "is no matrix with a scale a row or a tile, or one for all"
    if weight.integers.dtype != _DTYPES[kind] or weight.bits != 8:
        got = f"{weight.bits} bits of {str(weight.integers.dtype).removeprefix('torch.')}"
        wanted = str(_DTYPES[kind]).removeprefix("torch.")
        return f"has {got}; expected {wanted} beside activations of that kind, or activation=None"
    if isinstance(weight.block_size, int) or bool(weight.zero_point.any()) or (weight.is_tiled and kind == "int"):
        return "has groups or zero points; expected symmetric=True, axis=0 beside quantized activations"
    return blocks_problem(weight, activation)
