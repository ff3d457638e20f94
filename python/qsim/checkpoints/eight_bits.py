"""compressed-tensors, the formats "int-quantized" and "float-quantized": weights of 8 bits as they are, and activations of 8 bits.

Source: github.com/vllm-project/compressed-tensors, compressors/naive_quantized and quantization/quant_args. ``weight`` is int8 or
float8_e4m3fn with one scale an output channel or one for all, without zero points; what it is multiplied with has a scale from each token,
or one from calibration: ``input_scale``, with an ``input_zero_point`` where the grid is not symmetric.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qsim.checkpoints.folder import SCALE_TYPES, Parts
from qsim.checkpoints.packed_weight import PackedWeight, Scheme
from qsim.config.presets import fp8_dynamic, fp8_static, w8a8_dynamic, w8a8_static
from qsim.files.file_place import FilePlace
from qsim.numbers.encoding import Encoding
from qsim.numbers.spec import TensorSpec

TYPES = {"int-quantized": ("int", torch.int8), "float-quantized": ("float", torch.float8_e4m3fn)}
_ABSENT: dict[str, Any] = {"type": "int", "symmetric": True, "dynamic": False, "strategy": "tensor"}  # what is meant where nothing is said
_CURE = (
    "llm-compressor makes such files with QuantizationModifier(scheme='FP8_DYNAMIC'), scheme='FP8' or, for int8, scheme='W8A8'; qsim with "
    "fp8_dynamic(), fp8_static(), w8a8_dynamic() and w8a8_static()"
)


class Activation(NamedTuple):
    """What a weight is multiplied with: how it is quantized, and with which encoding where that is no question of the tensor itself."""

    spec: TensorSpec
    encoding: Encoding | None


@functools.cache
def _dynamic(layout: str) -> TensorSpec:
    """As vLLM's kernels do it: the largest magnitude of a token is the end of the grid."""
    config = w8a8_dynamic() if layout == "int-quantized" else fp8_dynamic()
    assert config.activation is not None
    return config.activation


@functools.cache
def _static(layout: str, symmetric: bool) -> TensorSpec:
    """With one scale; a file does not say how it was chosen."""
    config = w8a8_static() if layout == "int-quantized" else fp8_static()
    assert config.activation is not None
    return dataclasses.replace(config.activation, symmetric=symmetric, method="minmax")


def layout_of(activation: TensorSpec) -> str | None:
    """The layout whose activations are quantized so; None if there is none."""
    for layout in TYPES:
        static = _static(layout, activation.symmetric)
        same = (activation.encoding_dtype, activation.quant_min, activation.quant_max, activation.layout)
        fits = same == (static.encoding_dtype, static.quant_min, static.quant_max, static.layout) and activation.rounding == static.rounding
        if activation == _dynamic(layout) or (fits and not activation.is_dynamic):
            return layout
    return None


def read(state: dict[str, Tensor], groups: Mapping[str, Any], layout: str, place: FilePlace) -> dict[str, PackedWeight]:
    """The weights of `state`, which are taken out of it."""
    kind, dtype = TYPES[layout]
    for name, group in groups.items():
        if not isinstance(group, dict):
            raise place.wanted(name, group, "an object")
        at = place.at(name)
        _check(group.get("weights"), kind, {"symmetric": [True], "strategy": ["channel", "tensor"], "dynamic": [False]}, at.at("weights"))
        given, at = group.get("input_activations"), at.at("input_activations")
        dynamic = isinstance(given, dict) and given.get("dynamic", False) is not False
        symmetric = [True] if dynamic or kind == "float" else [True, False]
        _check(given, kind, {"dynamic": [True, False], "strategy": ["token" if dynamic else "tensor"], "symmetric": symmetric}, at)
        if group.get("output_activations") is not None:
            raise place.at(name).wanted("output_activations", group["output_activations"], "null: nothing of that kind is read")
    strategies = {_said(group["weights"], "strategy") for group in groups.values()}
    scaled = [name.removesuffix(".weight_scale") for name in state if name.endswith(".weight_scale")]
    stored = [name.removesuffix(".weight") for name, t in state.items() if name.endswith(".weight") and t.dtype == dtype]
    modules = dict.fromkeys([*scaled, *stored])
    return {f"{module}.weight": _weight(Parts(state, module, place), dtype, strategies) for module in modules}


def read_activations(
    state: dict[str, Tensor], weights: Mapping[str, PackedWeight], groups: Mapping[str, Any], layout: str, place: FilePlace
) -> dict[str, Activation]:
    """What each weight is multiplied with; its scales are taken out of `state`."""
    said = [group["input_activations"] for group in groups.values()]
    kinds = {(_said(each, "dynamic"), _said(each, "symmetric")) for each in said}
    return {name: _activation(Parts(state, name.removesuffix(".weight"), place), kinds, layout) for name in weights}


def _said(arguments: Mapping[str, Any], name: str) -> Any:
    return arguments.get(name, _ABSENT.get(name))


def _check(found: Any, kind: str, wanted: Mapping[str, list[Any]], place: FilePlace) -> None:
    if not isinstance(found, dict):
        raise place.wanted("it", found, f"an object. {_CURE}")
    every: dict[str, list[Any]] = {"num_bits": [8], "type": [kind], "group_size": [None], **wanted}
    for name, values in every.items():
        got = _said(found, name)
        if not any(type(got) is type(value) and got == value for value in values):
            raise place.wanted(name, got, f"{' or '.join(map(json.dumps, values))}. {_CURE}")
    for name in ("actorder", "block_structure", "scale_dtype"):
        if found.get(name) not in (None, "weight", "static"):
            raise place.wanted(name, found[name], "null")


def _weight(parts: Parts, dtype: torch.dtype, strategies: set[str]) -> PackedWeight:
    values = parts.take("weight", 2, dtype)
    rows = values.shape[0]
    scale = _positive(parts.take("weight_scale", (0, 1, 2), *SCALE_TYPES), "weight_scale", parts)
    strategy = "channel" if scale.dim() == 2 else "tensor"
    parts.check("the shape of weight_scale", tuple(scale.shape), (rows, 1) if strategy == "channel" else (1,) * scale.dim())
    if strategy not in strategies:
        raise parts.place.error(f"weight_scale has shape {tuple(scale.shape)}, and no group of config_groups has the strategy {strategy!r}")
    if not bool(values.float().isfinite().all()):
        raise parts.place.error("weight has NaN in it; expected finite numbers")
    zero_point = parts.optional("weight_zero_point", (0, 1, 2), torch.int8, dtype)
    if zero_point is not None and bool(zero_point.float().any()):
        raise parts.place.error("weight_zero_point is not 0 everywhere, though config_groups says symmetric")
    scale = scale.reshape(-1, 1)
    return PackedWeight(values, scale, torch.zeros(scale.shape, dtype=torch.int32), 8)


def _positive(scale: Tensor, name: str, parts: Parts) -> Tensor:
    if not bool((scale.isfinite() & (scale > 0)).all()):
        raise parts.place.error(f"{name} has numbers that are not positive and finite")
    return scale


def _activation(parts: Parts, kinds: set[tuple[bool, bool]], layout: str) -> Activation:
    scale = parts.optional("input_scale", (0, 1), *SCALE_TYPES)
    stored = parts.optional("input_zero_point", (0, 1), torch.int8, TYPES[layout][1])
    symmetric = stored is None or not bool(stored.float().any())
    if scale is None:
        if (True, True) not in kinds:
            raise parts.place.error("has no input_scale, and config_groups says that activations are static: is the checkpoint complete?")
        return Activation(_dynamic(layout), None)
    parts.check("the number of input scales", scale.numel(), 1)
    parts.check("the number of input zero points", 1 if stored is None else stored.numel(), 1)
    fitting = sorted(known for dynamic, known in kinds if not dynamic and (symmetric or not known))
    if not fitting:
        what = "is there" if (False, True) not in kinds else "is not 0, though activations are symmetric"
        raise parts.place.error(f"{'input_scale' if symmetric else 'input_zero_point'} {what}; expected what config_groups says")
    spec = _static(layout, fitting[-1] if stored is None else fitting[0])
    zero_point = torch.zeros((), dtype=torch.int32) if stored is None else stored.reshape(()).to(torch.int32)
    scale = _positive(scale.reshape(()).float(), "input_scale", parts)
    return Activation(spec, Encoding(scale, zero_point, spec.quant_min, spec.quant_max, **spec.layout))


def packed(weight: PackedWeight) -> dict[str, Tensor]:
    """The tensors of a weight, by what stands behind the name of its module."""
    scale = weight.scale.reshape(-1) if weight.is_per_tensor else weight.scale
    return {"weight": weight.integers, "weight_scale": scale.contiguous()}


def packed_activation(activation: Activation, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of what a weight is multiplied with, beside those of the weight, whose scales are of `dtype`."""
    if activation.encoding is None:
        return {}
    own = activation.encoding.scale.reshape(1)
    narrow = own.to(dtype)  # as it was read, where it was
    found = {"input_scale": narrow if torch.equal(narrow.to(own.dtype), own) else own}
    if not activation.spec.symmetric:
        found["input_zero_point"] = activation.encoding.zero_point.reshape(1).to(torch.int8)
    return found


def with_activation(scheme: Scheme, activation: Activation) -> Scheme:
    """The scheme, with what a file says of activations: not how their ranges were chosen."""
    spec = activation.spec if activation.encoding is None else dataclasses.replace(activation.spec, method="minmax")
    return dataclasses.replace(scheme, activation=spec)


def described(scheme: Scheme, layout: str) -> dict[str, Any]:
    """What a group of config_groups says, besides its targets."""
    activation = scheme.activation
    assert activation is not None
    both = {"num_bits": 8, "type": TYPES[layout][0], "group_size": None}
    weights = {"symmetric": True, "strategy": "tensor" if scheme.per_tensor else "channel", "dynamic": False}
    strategy = "token" if activation.is_dynamic else "tensor"
    activations = {"symmetric": activation.symmetric, "strategy": strategy, "dynamic": activation.is_dynamic}
    return {"weights": {**both, **weights}, "input_activations": {**both, **activations}, "output_activations": None}


def problem(weight: PackedWeight, layout: str) -> str | None:
    """Why the layout cannot hold a weight; None if it can."""
    kind = str(TYPES[layout][1]).removeprefix("torch.")
    if weight.integers.dim() != 2 or weight.minimum is not None or weight.order is not None:
        return "is no matrix with a scale a row, or one for all"
    if weight.integers.dtype != TYPES[layout][1] or weight.bits != 8:
        got = f"{weight.bits} bits of {str(weight.integers.dtype).removeprefix('torch.')}"
        return f"has {got}; expected {kind} beside activations of that kind, or activation=None"
    if weight.block_size is not None or bool(weight.zero_point.any()):
        return "has groups or zero points; expected symmetric=True, axis=0 beside quantized activations"
    return None
