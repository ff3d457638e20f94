"""Checkpoints of "quant_method": "fp8": float8_e4m3fn weights beside their scales, as DeepSeek, Qwen3, AutoFP8 and transformers have them.

With ``weight_block_size`` a weight has a scale a tile, ``weight_scale_inv`` (elements are multiplied with it, whatever its name says), and
what it is multiplied with a scale for each block of a token that is as wide as a tile. Without, a weight has one scale, and what it is
multiplied with one from calibration or one from each token; AutoFP8 and vLLM call these ``weight_scale`` and ``input_scale``,
transformers ``weight_scale_inv`` and ``activation_scale``.

Source: huggingface.co/deepseek-ai/DeepSeek-V3, README_WEIGHTS.md and inference/kernel.py; github.com/neuralmagic/AutoFP8;
github.com/huggingface/transformers, integrations/finegrained_fp8; github.com/vllm-project/vllm, layers/quantization/fp8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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
    missing_scale,
    one_scale,
    packed_activation,
    weight_scale,
)
from qsim.checkpoints.folder import SCALE_TYPES, Parts, config_names, is_size
from qsim.checkpoints.packed_weight import PackedWeight, Scheme, left_in_float
from qsim.files.file_place import FilePlace
from qsim.numbers.blocks import ranges_shape
from qsim.numbers.float_format import are_powers_of_two

FORMAT = "fp8"
_DTYPE, _POWERS = torch.float8_e4m3fn, torch.float8_e8m0fnu
_WEIGHT_SCALES, _INPUT_SCALES = ("weight_scale_inv", "weight_scale"), ("input_scale", "activation_scale")
_LEFT_OUT = ("modules_to_not_convert", "ignored_layers")


class _Said(NamedTuple):
    """What ``quantization_config`` says of all layers."""

    tile: tuple[int, int] | None
    static: bool
    powers: bool


def read(
    state: dict[str, Tensor], quantization: Mapping[str, Any], place: FilePlace
) -> tuple[dict[str, PackedWeight], dict[str, Activation]]:
    """The weights of `state`, which are taken out of it, and what they are multiplied with."""
    said = _read_config(quantization, place)
    left_out = {name for key in _LEFT_OUT for name in config_names(quantization, key, place)}
    scaled = [name.rpartition(".")[0] for name in state if name.endswith(tuple(f".{scale}" for scale in _WEIGHT_SCALES))]
    stored = [name.removesuffix(".weight") for name, t in state.items() if name.endswith(".weight") and t.dtype == _DTYPE]
    weights: dict[str, PackedWeight] = {}
    activations: dict[str, Activation] = {}
    for module in dict.fromkeys([*stored, *scaled]):
        parts = Parts(state, module, place)
        if outside := [name for name in left_out if module == name or module.startswith(f"{name}.")]:
            raise parts.place.error(f"is quantized, and quantization_config lists {outside[0]!r} as left in float; expected one of both")
        weights[f"{module}.weight"] = _weight(parts, said)
        activations[f"{module}.weight"] = _activation(parts, said)
    return weights, activations


def _read_config(quantization: Mapping[str, Any], place: FilePlace) -> _Said:
    for key, known in (("fmt", ("e4m3", "float8_e4m3fn")), ("activation_scheme", ("dynamic", "static")), ("scale_fmt", ("float", "ue8m0"))):
        if (got := quantization.get(key) or known[0]) not in known:
            raise place.wanted(f"{key} of quantization_config", got, " or ".join(map(repr, known)))
    static, powers = quantization.get("activation_scheme") == "static", quantization.get("scale_fmt") == "ue8m0"
    sizes = quantization.get("weight_block_size")
    if sizes is None:
        if powers:
            raise place.wanted("weight_block_size", sizes, "two positive integers beside scale_fmt 'ue8m0'")
        return _Said(None, static, False)
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(map(is_size, sizes)):
        raise place.wanted("weight_block_size", sizes, "two positive integers, or null for one scale a weight")
    if static:
        raise place.wanted("activation_scheme", "static", "'dynamic' beside weight_block_size: activations have a scale for each block")
    return _Said((sizes[0], sizes[1]), static, powers)


def _weight(parts: Parts, said: _Said) -> PackedWeight:
    values = finite(parts.take("weight", 2, _DTYPE), parts)
    name = parts.only(*_WEIGHT_SCALES)
    if said.tile is None:
        scale = weight_scale(parts, name, (0, 1, 2))
        parts.check(f"the number of scales in {name}", scale.numel(), 1)
        return PackedWeight(values, scale.reshape(1, 1), torch.zeros(1, 1, dtype=torch.int32), 8)
    scale = weight_scale(parts, name, 2, *([_POWERS] if said.powers else []))
    parts.check(f"the shape of {name}", tuple(scale.shape), ranges_shape(values.shape, dict(enumerate(said.tile))))
    if said.powers and not are_powers_of_two(scale):
        raise parts.place.error(f"{name} has numbers that are no powers of two, though scale_fmt is 'ue8m0'")
    return PackedWeight(values, scale, torch.zeros(scale.shape, dtype=torch.int32), 8, said.tile)


def _activation(parts: Parts, said: _Said) -> Activation:
    name = parts.only(*_INPUT_SCALES)
    scale = parts.optional(name, (0, 1), *SCALE_TYPES)
    if (scale is not None) != said.static:
        what = f"has no {name}" if scale is None else f"has {name}"
        raise parts.place.error(f"{what}, and activation_scheme is {'static' if said.static else 'dynamic'!r}: is the checkpoint complete?")
    if scale is not None:
        return calibrated(one_scale("float"), scale, None, parts)
    return Activation(by_token("float") if said.tile is None else by_block(said.tile[1], said.powers), None)


def problem(weight: PackedWeight, activation: Activation | None, format: str) -> str | None:
    """Why the format cannot hold a weight that is multiplied so; None if it can."""
    if activation is None:
        return "is multiplied with floats, and the format quantizes all activations: qsim.fp8_block(), or one scale a weight"
    if weight.integers.dtype != _DTYPE or weight.integers.dim() != 2:
        return f"is {str(weight.integers.dtype).removeprefix('torch.')}; expected a matrix of float8_e4m3fn, as of qsim.fp8_block()"
    if not (weight.is_tiled or weight.is_per_tensor or len(weight.integers) == 1 == weight.scale.numel()):
        return (
            "has a scale a row or group; expected one a tile, qsim.fp8_block(), or one for all, axis=None ('compressed-tensors' has rows)"
        )
    if kind_of(activation.spec) != "float":
        return "is multiplied with activations that are quantized in another way than the format has; see Checkpoint.activations"
    if activation.spec.scale_format == POWERS and not are_powers_of_two(weight.scale):
        return "has scales that are no powers of two beside activations that have such; expected both"
    return missing_scale(activation) or blocks_problem(weight, activation)


def packed(weight: PackedWeight, activation: Activation | None, format: str) -> dict[str, Tensor]:
    """The tensors of a weight and of what it is multiplied with, by what stands behind the name of its module."""
    if weight.is_tiled:
        return {"weight": weight.integers, "weight_scale_inv": weight.scale.contiguous()}
    return {"weight": weight.integers, "weight_scale": weight.scale.reshape(1), **packed_activation(activation, weight.scale.dtype)}


def differing(schemes: Mapping[str, Scheme], format: str) -> dict[str, str]:
    """The weights that are quantized otherwise than the first: the format says it once for all."""
    first = next(iter(schemes.values()), None)
    cure = "expected one way for all; 'compressed-tensors' has several"
    return {
        module: f"has {_described(scheme)}, others {_described(first)}; {cure}"
        for module, scheme in schemes.items()
        if first is not None and (scheme.block_size, scheme.activation) != (first.block_size, first.activation)
    }


def _described(scheme: Scheme) -> str:
    spec = scheme.activation
    assert spec is not None
    each = "one scale" if not spec.is_dynamic else f"a scale for each {'token' if spec.block_size is None else f'{spec.block_size} values'}"
    return f"{'one scale' if scheme.block_size is None else f'tiles of {scheme.block_size}'} beside activations with {each}"


def quantization(schemes: Mapping[str, Scheme], format: str, linear: Sequence[str] | None = None) -> dict[str, Any]:
    """What ``quantization_config`` says of the modules. `linear` names those that may be in float, and are where `schemes` lacks them."""
    scheme = next(iter(schemes.values()))
    assert scheme.activation is not None
    said: dict[str, Any] = {"quant_method": FORMAT, "activation_scheme": "dynamic" if scheme.activation.is_dynamic else "static"}
    left_out = left_in_float(linear, schemes)
    if not isinstance(scheme.block_size, tuple):
        return {**said, "ignored_layers": left_out}
    said |= {"fmt": "e4m3", "weight_block_size": list(scheme.block_size), "modules_to_not_convert": left_out}
    return {**said, "scale_fmt": "ue8m0"} if scheme.activation.scale_format == POWERS else said
