"""Scales of keys and values that a server caches in 8 bits: one for all keys of an attention, and one for all its values.

Source: github.com/vllm-project/compressed-tensors, quantization/quant_config (``kv_cache_scheme``) and modeling/kvcache: ``k_scale`` and
``v_scale`` lie in the attention's module. AutoFP8 and older llm-compressor have them as what the projections give,
``k_proj.output_scale``; vLLM reads both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from qsim.checkpoints.activation import as_read, kind_of, one_scale, positive
from qsim.checkpoints.folder import SCALE_TYPES, Parts
from qsim.config.kv_cache import KVCache
from qsim.files.file_place import FilePlace
from qsim.numbers.encoding import Encoding
from qsim.numbers.spec import TensorSpec

NAMES = {"k_scale": "keys", "v_scale": "values"}  # what a file calls the scale of what
_OLDER = {"k_proj.output_scale": "k_scale", "v_proj.output_scale": "v_scale"}
_WANTED: dict[str, tuple[Any, ...]] = {
    "num_bits": (8,),
    "type": ("int", "float"),
    "strategy": ("tensor",),
    "dynamic": (False,),
    "symmetric": (True,),
}
_ABSENT = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False, "symmetric": True}
_CURE = "no other cache is read: take kv_cache_scheme out, and simulate one with Config.kv_cache"


def read(state: dict[str, Tensor], scheme: Any, place: FilePlace) -> tuple[KVCache | None, dict[str, Encoding]]:
    """How a ``kv_cache_scheme`` quantizes keys and values, and their encodings by ``<attention>.k_scale``; taken out of `state`."""
    if scheme is None:
        return None, {}
    spec = _spec(scheme, place)
    for older, name in _OLDER.items():
        for found in [key for key in state if key.endswith(f".{older}")]:
            renamed = f"{found.removesuffix(older)}{name}"
            if renamed in state:
                raise place.error(f"has {found} and {renamed}; expected one of them")
            state[renamed] = state.pop(found)
    modules = dict.fromkeys(key.rpartition(".")[0] for key in list(state) if key.rpartition(".")[2] in NAMES)
    if not modules:
        raise place.error("kv_cache_scheme says that caches are quantized, and no attention has k_scale and v_scale: is it complete?")
    encodings = {}
    for module in modules:
        parts = Parts(state, module, place)
        for name in NAMES:
            scale = positive(parts.take(name, (0, 1), *SCALE_TYPES), name, parts)
            parts.check(f"the number of scales in {name}", scale.numel(), 1)
            shift = name.replace("scale", "zero_point")
            stored = parts.optional(shift, (0, 1), torch.int8, torch.float8_e4m3fn)
            if stored is not None and bool(stored.float().any()):
                raise parts.place.error(f"{shift} is not 0, though kv_cache_scheme says symmetric")
            zero_point = torch.zeros((), dtype=torch.int32)
            grid = spec.quant_min, spec.quant_max
            encodings[f"{module}.{name}"] = Encoding(scale.reshape(()).float(), zero_point, *grid, **spec.layout)
    return KVCache(spec, spec), encodings


def _spec(scheme: Any, place: FilePlace) -> TensorSpec:
    if scheme == "static":  # AutoFP8
        return one_scale("float")
    if not isinstance(scheme, dict):
        raise place.wanted("kv_cache_scheme", scheme, f"null or an object; {_CURE}")
    for name, values in _WANTED.items():
        place.at("kv_cache_scheme").require(name, scheme.get(name, _ABSENT[name]), values, f", and {_CURE}")
    return one_scale(scheme.get("type", _ABSENT["type"]))


def scale_names(model: nn.Module) -> list[str]:
    """What scales in the modules of a model would be called, whichever of them are attentions."""
    parents = [path for path, module in model.named_modules() if path and any(True for _ in module.children())]
    return [f"{path}.{name}" for path in parents for name in NAMES]


def kind(spec: TensorSpec | None) -> str | None:
    """Whether a file has keys or values of "int" or "float" that are quantized so; None if no file has."""
    return None if spec is None or spec.is_dynamic or not spec.symmetric else kind_of(spec)


def problem(cache: KVCache) -> str | None:
    """Why no file has such a cache; None if one has."""
    if kind(cache.keys) is not None and kind(cache.keys) == kind(cache.values):
        return None
    return "has keys and values in another form than one scale each in 8 bits, as of kv_cache=TensorSpec(dtype='float8_e4m3fn')"


def packed(scales: Mapping[str, Encoding], dtype: torch.dtype) -> dict[str, Tensor]:
    """The scales as tensors, beside those of weights in `dtype`."""
    return {name: as_read(encoding.scale, dtype) for name, encoding in scales.items()}


def described(cache: KVCache | None) -> dict[str, Any] | None:
    """The ``kv_cache_scheme`` of a cache."""
    if cache is None or cache.keys is None:
        return None
    kind = "float" if cache.keys.is_float else "int"
    return {**_ABSENT, "type": kind, "group_size": None}
