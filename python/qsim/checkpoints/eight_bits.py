"""compressed-tensors, the formats "int-quantized" and "float-quantized": weights of 8 bits as they are, and activations of 8 bits.

Source: github.com/vllm-project/compressed-tensors, compressors/naive_quantized and quantization/quant_args. ``weight`` is int8 or
float8_e4m3fn with one scale an output channel, without zero points; what it is multiplied with has a scale from each token.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from qsim.checkpoints.folder import Parts
from qsim.checkpoints.packed_weight import PackedWeight
from qsim.config.presets import fp8_dynamic, w8a8_dynamic
from qsim.files.file_place import FilePlace
from qsim.numbers.spec import TensorSpec

TYPES = {"int-quantized": ("int", torch.int8), "float-quantized": ("float", torch.float8_e4m3fn)}
_WEIGHTS: dict[str, Any] = {"num_bits": 8, "symmetric": True, "strategy": "channel", "dynamic": False, "group_size": None}
_ACTIVATIONS: dict[str, Any] = {"num_bits": 8, "symmetric": True, "strategy": "token", "dynamic": True, "group_size": None}
_ABSENT: dict[str, Any] = {"symmetric": True, "dynamic": False, "group_size": None}  # what compressed-tensors takes where nothing is said
_CURE = (
    "llm-compressor makes such files with QuantizationModifier(scheme='FP8_DYNAMIC') or, for int8, scheme='W8A8', which has scales from "
    "each token; qsim with w8a8_dynamic() and fp8_dynamic()"
)


@functools.cache
def activation_of(layout: str) -> TensorSpec:
    """How activations are quantized, as vLLM's kernels do it: the largest magnitude of a token is the end of the grid."""
    config = w8a8_dynamic() if layout == "int-quantized" else fp8_dynamic()
    assert config.activation is not None
    return config.activation


def layout_of(activation: TensorSpec) -> str | None:
    """The layout whose activations are quantized so; None if there is none."""
    return next((layout for layout in TYPES if activation_of(layout) == activation), None)


def read(state: dict[str, Tensor], groups: Mapping[str, Any], layout: str, place: FilePlace) -> dict[str, PackedWeight]:
    """The weights of `state`, which are taken out of it."""
    kind, dtype = TYPES[layout]
    for name, group in groups.items():
        for part, wanted in (("weights", _WEIGHTS), ("input_activations", _ACTIVATIONS)):
            _check(group.get(part), {"type": kind, **wanted}, place.at(name).at(part))
        if group.get("output_activations") is not None:
            raise place.at(name).wanted("output_activations", group["output_activations"], "null: nothing of that kind is read")
    modules = [name.removesuffix(".weight_scale") for name in state if name.endswith(".weight_scale")]
    return {f"{module}.weight": _weight(Parts(state, module, place), dtype) for module in modules}


def _check(found: Any, wanted: Mapping[str, Any], place: FilePlace) -> None:
    if not isinstance(found, dict):
        raise place.wanted("it", found, f"an object. {_CURE}")
    for name, value in wanted.items():
        got = found.get(name, _ABSENT.get(name, "int" if name == "type" else None))
        if type(got) is not type(value) or got != value:
            raise place.wanted(name, got, f"{json.dumps(value)}. {_CURE}")
    for name in ("actorder", "block_structure", "scale_dtype"):
        if found.get(name) not in (None, "weight", "static"):
            raise place.wanted(name, found[name], "null")


def _weight(parts: Parts, dtype: torch.dtype) -> PackedWeight:
    values = parts.take("weight", 2, dtype)
    scale = parts.take("weight_scale", 2, torch.float16, torch.bfloat16, torch.float32)
    rows = values.shape[0]
    parts.check("the shape of weight_scale", tuple(scale.shape), (rows, 1))
    if not bool((scale.isfinite() & (scale > 0)).all()):
        raise parts.place.error("weight_scale has numbers that are not positive and finite")
    if not bool(values.float().isfinite().all()):
        raise parts.place.error("weight has NaN in it; expected finite numbers")
    zero_point = parts.optional("weight_zero_point", 2, torch.int8, dtype)
    if zero_point is not None and bool(zero_point.float().any()):
        raise parts.place.error("weight_zero_point is not 0 everywhere, though config_groups says symmetric")
    return PackedWeight(values, scale, torch.zeros(rows, 1, dtype=torch.int32), 8, None)


def packed(weight: PackedWeight) -> dict[str, Tensor]:
    """The tensors of a weight, by what stands behind the name of its module."""
    return {"weight": weight.integers, "weight_scale": weight.scale.contiguous()}


def described(layout: str) -> dict[str, Any]:
    """What a group of config_groups says, besides its targets."""
    kind = TYPES[layout][0]
    return {
        "weights": {"type": kind, **_WEIGHTS},
        "input_activations": {"type": kind, **_ACTIVATIONS},
        "output_activations": None,
    }


def problem(weight: PackedWeight, layout: str) -> str | None:
    """Why the layout cannot hold a weight; None if it can."""
    kind = str(TYPES[layout][1]).removeprefix("torch.")
    if weight.integers.dim() != 2 or weight.minimum is not None or weight.order is not None:
        return "is no matrix with a scale a row"
    if weight.integers.dtype != TYPES[layout][1] or weight.bits != 8:
        got = f"{weight.bits} bits of {str(weight.integers.dtype).removeprefix('torch.')}"
        return f"has {got}; expected {kind} beside activations of that kind, or activation=None"
    if weight.block_size is not None or bool(weight.zero_point.any()):
        return "has groups or zero points; expected symmetric=True, axis=0 beside quantized activations"
    return None
