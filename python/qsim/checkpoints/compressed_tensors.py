"""compressed-tensors: what vLLM, llm-compressor and transformers read and write. Each group of layers has a layout: packed integers
(`pack_quantized`), or 8 bits as they are (`eight_bits`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from qsim.checkpoints import eight_bits, pack_quantized
from qsim.checkpoints.activation import Activation, missing_scale
from qsim.checkpoints.config_groups import Group, by_pattern, choose, is_expert, matches, read_groups, read_names
from qsim.checkpoints.folder import Parts
from qsim.checkpoints.packed_weight import PackedWeight, Scheme, left_in_float
from qsim.files.file_place import FilePlace
from qsim.warning import warn

FORMAT = "compressed-tensors"
_SEVERAL = "mixed-precision"
_NONE = "dense"  # of no weight: what caches alone are quantized beside
_LAYOUTS = (pack_quantized.LAYOUT, *eight_bits.LAYOUTS)


def read(
    state: dict[str, Tensor], quantization: Mapping[str, Any], place: FilePlace
) -> tuple[dict[str, PackedWeight], dict[str, Activation]]:
    """The packed weights of `state`, which are taken out of it, and what they are multiplied with where that is quantized."""
    rotations, sparse = quantization.get("transform_config"), quantization.get("sparsity_config")
    if rotations not in (None, {}):
        raise place.wanted("transform_config", rotations, "null: rotations that run in front of layers are not read")
    if sparse not in (None, {}) and not (isinstance(sparse, dict) and sparse.get("format") == "dense"):
        raise place.wanted("sparsity_config", sparse, "null: weights without their zeros are not read")
    if quantization.get("config_groups") in (None, {}) and quantization.get("kv_cache_scheme") is not None:
        return {}, {}
    groups = read_groups(quantization, pack_quantized.LAYOUT, _SEVERAL, place)
    for group in groups:
        if group.layout not in _LAYOUTS:
            raise group.place.wanted("format", group.layout, " or ".join(map(repr, _LAYOUTS)))
        (pack_quantized if group.layout == pack_quantized.LAYOUT else eight_bits).check(group)
    ignored = read_names(quantization, "ignore", place)
    weights: dict[str, PackedWeight] = {}
    activations: dict[str, Activation] = {}
    named = {name.rpartition(".")[0] for name in state}
    for module, packed in _modules(state, groups).items():
        parts = Parts(state, module, place)
        if module in ignored or matches(module, ignored):
            raise parts.place.error("is quantized, and 'ignore' of quantization_config has it left in float; expected one of both")
        fitting = [group for group in choose(module, groups, named) if (group.layout == pack_quantized.LAYOUT) == packed]
        if not fitting:
            what = "weight_packed" if packed else "weight_scale"
            raise parts.place.error(f"has {what}; expected what its group of config_groups says")
        if packed:
            weights[f"{module}.weight"] = pack_quantized.read(parts, fitting)
            continue
        weights[f"{module}.weight"], activation = eight_bits.read(parts, fitting)
        if activation is not None:
            activations[f"{module}.weight"] = activation
    for module in (module for group in groups for module in group.targets if module not in ignored):
        if f"{module}.weight" in state:
            raise place.at(module).error("has a weight in float, and config_groups says by its name that it is quantized")
    return weights, activations


def _modules(state: Mapping[str, Tensor], groups: Sequence[Group]) -> dict[str, bool]:
    """The modules with a quantized weight, in the order of the file, and whether it is packed."""
    found: dict[str, bool] = {}
    kept = {eight_bits.dtype_of(group) for group in groups if group.layout != pack_quantized.LAYOUT}
    for name, t in state.items():
        module, _, part = name.rpartition(".")
        if part == "weight_packed":
            found[module] = True
        elif kept and (part == "weight_scale" or (part == "weight" and t.dtype in kept)):
            found.setdefault(module, f"{module}.weight_packed" in state)
    return found


def problem(weight: PackedWeight, activation: Activation | None, format: str) -> str | None:
    """Why the format cannot hold a weight that is multiplied so; None if it can."""
    if missing := missing_scale(activation):
        return missing
    if _is_packed(weight.is_float, activation is not None):
        return pack_quantized.problem(weight)
    return eight_bits.problem(weight, activation)


def _is_packed(is_float: bool, has_activation: bool) -> bool:
    return not is_float and not has_activation


def packed(weight: PackedWeight, activation: Activation | None, format: str) -> dict[str, Tensor]:
    """The tensors of a weight and of what it is multiplied with, by what stands behind the name of its module."""
    return pack_quantized.packed(weight) if _is_packed(weight.is_float, activation is not None) else eight_bits.packed(weight, activation)


def _described(scheme: Scheme) -> tuple[str, dict[str, Any]]:
    """The layout of a group, and what it says besides its targets."""
    if _is_packed(scheme.is_float, scheme.activation is not None):
        return pack_quantized.LAYOUT, pack_quantized.described(scheme)
    return eight_bits.layout_of(scheme), eight_bits.described(scheme)


def differing(schemes: Mapping[str, Scheme], format: str) -> dict[str, str]:
    """The weights that cannot stand beside the first: there are none."""
    return {}


def quantization(schemes: Mapping[str, Scheme], format: str, linear: Sequence[str] | None = None) -> dict[str, Any]:
    """What ``quantization_config`` says of packed modules. `linear` names all linear layers, if known."""
    groups: dict[Scheme, list[str]] = defaultdict(list)
    for module, scheme in schemes.items():
        groups[scheme].append(module)
    by_type = len(groups) == 1 and linear is not None
    left_out = left_in_float(linear, schemes) if schemes else []
    targets = [["Linear"]] if by_type else [*groups.values()] if linear is None else by_pattern(groups.values(), left_out)
    described = [(names, *_described(scheme)) for names, scheme in zip(targets, groups, strict=True)]
    layouts = list(dict.fromkeys(layout for _, layout, _ in described)) or [_NONE]
    return {
        "quant_method": FORMAT,
        "format": layouts[0] if len(layouts) == 1 else _SEVERAL,
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{i}": {"targets": names, **said, **({} if len(layouts) == 1 else {"format": layout})}
            for i, (names, layout, said) in enumerate(described)
        },
        "ignore": left_out,
        "kv_cache_scheme": None,
    }


def warn_of_readers(schemes: Mapping[str, Scheme]) -> None:
    """Say what one reader makes of the files otherwise than they are."""
    warn_of_zero_points(schemes)
    experts = {scheme.bits: module for module, scheme in schemes.items() if is_expert(module)}
    if len(experts) > 1:
        warn(
            f"qsim: experts are written with {' and '.join(map(str, sorted(experts)))} bits ({', '.join(map(repr, experts.values()))}). "
            "transformers with compressed-tensors 0.20 reads all as the first: other numbers, without a word. One width for all it reads"
        )


def warn_of_zero_points(schemes: Mapping[str, Scheme]) -> None:
    """Zero points are packed, as the format has it and vLLM reads them; one reader has no room for that while it loads."""
    shifted = [module for module, scheme in schemes.items() if not scheme.symmetric]
    if not shifted:
        return
    more = f" and {len(shifted) - 1} more" if len(shifted) > 1 else ""
    cure = "unless told from_pretrained(folder, quantization_config=CompressedTensorsConfig(dequantize=True))"
    if len(set(schemes.values())) > 1:  # of several it would take the first for all
        cure = "and has no way round it beside weights of other widths, groups or symmetry"
    if any(map(is_expert, shifted)):
        cure = "and has no way round it for experts"
    warn(
        f"qsim: {shifted[0]!r}{more} written with zero points, packed as vLLM reads them. transformers with "
        f"compressed-tensors 0.18 to 0.20 refuses those (a size mismatch of weight_zero_point) {cure}; symmetric=True has none"
    )
