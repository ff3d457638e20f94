"""Reads the JSON files that tell AIMET what a runtime quantizes (its `config_file`): six sections, later ones win.

Format: AIMET documentation, "Runtime configuration" (quic.github.io/aimet-pages). What it says maps to `Config` and `Profile`:

==================================== ===================================================================================
AIMET                                qsim
==================================== ===================================================================================
`is_output_quantized`                `Profile.outputs`
`is_input_quantized` of an op_type   `Profile.inputs`
`is_quantized`, `is_symmetric`       rules on specs of weights (of parameters), and of activations (of operations)
`per_channel_quantization`           `axis` of weights
`strict_symmetric`                   `narrow`: [-127, 127]
`unsigned_symmetric`                 an asymmetric grid from 0 for operations whose results are never negative: the same grid
`params.bias.is_quantized`           int32 biases (`Profile.bias`)
`supported_kernels`                  an op_type's first kernel, where it lacks the bits that the config asks for
`encoding_constraints`               `Profile.ranges`
`supergroups`                        `Profile.chains`
`model_input`, `model_output`        `Profile.model_input`, `Profile.model_output`
==================================== ===================================================================================

Rules for operations that only move values say nothing here: their results lie on the grid of what they were given.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from qsim.config.override import Change, Override
from qsim.config.profile import Profile
from qsim.numbers.spec import TensorSpec
from qsim.operations.onnx_types import COMPUTING, ON_GRID, RECTIFYING

_ALIASES = {
    "Linear": "Gemm",
    "Mean": "ReduceMean",
    "Upsample": "Resize",
    "PReLU": "PRelu",
    "Relu6": "Clip",
    "SiLU": "Swish",
    "Embedding": "Gather",
    "GroupNorm": "GroupNormalization",
    "LayerNorm": "LayerNormalization",
}
_PARAMETERS = ("weight", "bias", "running_mean", "running_var")


class _Section:
    """An object of the file, with the path that errors name; `keys` are those that it may have, all if there are none."""

    def __init__(self, file: str, path: str, value: Any, keys: tuple[str, ...]) -> None:
        self.file, self.path = file, path
        if not isinstance(value, Mapping):
            raise self.error(path or "the file", value, "an object")
        self.entries = value
        for key in value:
            if keys and key not in keys:
                raise ValueError(f"{file}: got unknown key {self.at(key)!r}; expected one of {', '.join(keys)}")

    def at(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def error(self, at: str, value: Any, expected: str) -> ValueError:
        return ValueError(f"{self.file}: got {value!r} for {at!r}; expected {expected}")

    def section(self, key: str, *keys: str) -> _Section:
        return _Section(self.file, self.at(key), self.entries.get(key, {}), keys)

    def flag(self, key: str) -> bool | None:
        """True, False, or None where the file says nothing."""
        value = self.entries.get(key)
        if value is None or isinstance(value, bool):
            return value
        if value not in ("True", "False"):
            raise self.error(self.at(key), value, '"True" or "False"')
        return bool(value == "True")

    def list(self, key: str) -> list[Any]:
        value = self.entries.get(key, [])
        if not isinstance(value, list):
            raise self.error(self.at(key), value, "a list")
        return value

    def op_type(self, name: Any, at: str) -> str:
        """The ONNX operator type that AIMET's name means."""
        known = _ALIASES.get(name, name) if isinstance(name, str) else None
        if known not in COMPUTING | ON_GRID:
            raise self.error(at, name, "an ONNX operator type that qsim knows, such as 'Conv', 'Gemm' or 'Add'")
        return str(known)


class Rules(NamedTuple):
    """What a file says, as fields of a `Config`."""

    weight: TensorSpec | None
    activation: TensorSpec | None
    target: Profile


def read(source: str | Path | Mapping[str, Any], weight: TensorSpec | None, activation: TensorSpec | None) -> Rules:
    """What a file describes; `weight` and `activation` have what it does not say. See `Config.from_aimet`."""
    file = "the AIMET config" if isinstance(source, Mapping) else str(source)
    try:
        content = source if isinstance(source, Mapping) else json.loads(Path(source).read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}: got no JSON ({error}); expected AIMET's configuration file") from None
    return _Reading(
        _Section(file, "", content, ("defaults", "params", "op_type", "supergroups", "model_input", "model_output")), weight, activation
    ).rules()


Flags = tuple[bool | None, bool | None]
Kernel = tuple[tuple[tuple[str, Any], ...], ...]  # changes of the specs of activations and of weights


class _Reading:
    """What the sections say, one after the other."""

    def __init__(self, root: _Section, weight: TensorSpec | None, activation: TensorSpec | None) -> None:
        self.root, self.weight, self.activation = root, weight, activation
        switches = ("strict_symmetric", "unsigned_symmetric", "per_channel_quantization")
        self.defaults = root.section("defaults", "ops", "params", *switches, "supported_kernels", "hw_version")
        self.ops = self.defaults.section("ops", "is_input_quantized", "is_output_quantized", "is_symmetric")
        self.strict = bool(self.defaults.flag("strict_symmetric"))
        self.unsigned = bool(self.defaults.flag("unsigned_symmetric"))
        self.per_channel = bool(self.defaults.flag("per_channel_quantization"))
        default = self.defaults.section("params", "is_quantized", "is_symmetric")
        general = (default.flag("is_quantized"), default.flag("is_symmetric"))
        self.weights, self.biases = (_resolved(self._said(root, name), general) for name in ("weight", "bias"))

    def rules(self) -> Rules:
        if kernels := self._kernels(self.defaults):
            self._check(kernels)
        symmetric = bool(self.ops.flag("is_symmetric"))
        op_types = self._op_types()
        outputs: tuple[str, ...] = ("*",) if self.ops.flag("is_output_quantized") else ()
        inputs: tuple[str, ...] = ("*",) if self.ops.flag("is_input_quantized") else ()
        rules: list[Override] = []
        if symmetric and self.unsigned:
            rules += [Override(op_type=name, activation={"symmetric": False, "narrow": False}) for name in RECTIFYING]
        if not self.weights[0]:
            rules.append(Override(weight=None))
        biases: tuple[str, ...] = ("*",) if self.biases[0] else ()
        ranges = []
        for name, section in op_types.items():
            rules += self._rules(name, section)
            outputs += _pattern(name, section.flag("is_output_quantized"))
            inputs += _pattern(name, section.flag("is_input_quantized"))
            biases += _pattern(name, self._said(section, "bias")[0])
            if "encoding_constraints" in section.entries:
                ranges.append((name, *self._range(section)))
        profile = Profile(
            "aimet",
            chains=self._chains(),
            outputs=outputs,
            inputs=inputs,
            ranges=tuple(ranges),
            bias=biases,
            model_input=bool(self.root.section("model_input", "is_input_quantized").flag("is_input_quantized")),
            model_output=self.root.section("model_output", "is_output_quantized").flag("is_output_quantized"),
            rules=tuple(rules),
        )
        weight = self._weight(self.weight, self.weights[1], self.per_channel)
        activation = self._grid(self.activation, symmetric)
        return Rules(weight, activation, profile)

    def _op_types(self) -> dict[str, _Section]:
        """The sections of operations that compute; those that only move values are checked and dropped."""
        section = self.root.section("op_type")
        flags = ("is_input_quantized", "is_output_quantized", "is_symmetric", "per_channel_quantization")
        found = {}
        for name in section.entries:
            op_type = section.op_type(name, section.at(name))
            inner = section.section(name, *flags, "params", "supported_kernels", "encoding_constraints")
            for flag in flags:
                inner.flag(flag)
            if op_type in COMPUTING:
                found[op_type] = inner
        return found

    def _rules(self, name: str, section: _Section) -> list[Override]:
        """What a section says of the specs of its operations."""
        weight: Change = ()
        quantized, symmetric = self._said(section, "weight")
        per_channel = section.flag("per_channel_quantization")
        quantized = self.weights[0] if quantized is None else quantized
        if not quantized:
            weight = None
        elif (symmetric, per_channel) != (None, None) or not self.weights[0]:
            symmetric = self.weights[1] if symmetric is None else symmetric
            weight = self._weight(self.weight, symmetric, self.per_channel if per_channel is None else per_channel)
        activation: Change = {}
        if (flag := section.flag("is_symmetric")) is not None:
            activation = {"symmetric": flag, "narrow": flag and self.strict}
            if flag and self.unsigned and name in RECTIFYING:
                activation = {"symmetric": False, "narrow": False}
        rules = [] if weight == () and not activation else [Override(op_type=name, weight=weight, activation=activation)]
        kernels = self._kernels(section)
        if kernels and self._kernel() not in kernels:
            (activation_changes, weight_changes) = kernels[0]
            rules.append(Override(op_type=name, weight=dict(weight_changes), activation=dict(activation_changes)))
        return rules

    # Parameters.

    def _said(self, outer: _Section, name: str) -> Flags:
        """Whether parameters of a name are quantized, and symmetric, where the `params` of a section say so."""
        params = outer.section("params", *_PARAMETERS)
        flags = {key: params.section(key, "is_quantized", "is_symmetric") for key in params.entries}
        return (flags[name].flag("is_quantized"), flags[name].flag("is_symmetric")) if name in flags else (None, None)

    def _weight(self, spec: TensorSpec | None, symmetric: bool, per_channel: bool) -> TensorSpec | None:
        grid = self._grid(spec, symmetric)
        if grid is None or (per_channel and grid.axis is not None):
            return grid
        return dataclasses.replace(grid, axis=0 if per_channel else None, block_size=None)

    def _grid(self, spec: TensorSpec | None, symmetric: bool) -> TensorSpec | None:
        if spec is None or spec.is_float:
            return spec
        return dataclasses.replace(spec, symmetric=symmetric, narrow=symmetric and self.strict)

    # Kernels, ranges, supergroups.

    def _kernel(self) -> Kernel:
        """What the base config asks for, as `_kernels` has it."""
        specs = (self.activation, self.weight)
        return tuple(_format(spec.bits, spec.is_float) if spec is not None else _format(32, True) for spec in specs)

    def _kernels(self, section: _Section) -> list[Kernel]:
        found = []
        for i, entry in enumerate(section.list("supported_kernels")):
            kernel = _Section(section.file, f"{section.path}.supported_kernels[{i}]", entry, ("activation", "param"))
            formats = []
            for role in ("activation", "param"):
                part = kernel.section(role, "bitwidth", "dtype")
                bits, dtype = part.entries.get("bitwidth"), part.entries.get("dtype")
                if bits not in (4, 8, 16, 32):
                    raise part.error(part.at("bitwidth"), bits, "4, 8, 16 or 32")
                if dtype not in ("int", "float") or (dtype == "float") < (bits == 32) or (dtype == "float" and bits < 16):
                    raise part.error(part.at("dtype"), dtype, '"int" up to 16 bits or "float" of 16 or 32')
                formats.append(_format(bits, dtype == "float"))
            found.append(tuple(formats))
        return found

    def _check(self, kernels: list[Kernel]) -> None:
        if self._kernel() not in kernels:
            described = " or ".join(f"activations {dict(activation)} with weights {dict(weight)}" for activation, weight in kernels)
            activation, weight = (dict(part) for part in self._kernel())
            raise ValueError(
                f"{self.root.file}: got activations {activation} with weights {weight} from the base config; expected a kernel of "
                f"'defaults.supported_kernels': {described}"
            )

    def _range(self, section: _Section) -> tuple[float, float]:
        limits = section.section("encoding_constraints", "min", "max")
        low, high = limits.entries.get("min"), limits.entries.get("max")
        if not isinstance(low, (int, float)) or not isinstance(high, (int, float)) or not low < high:
            raise section.error(limits.path, dict(limits.entries), "numbers 'min' and 'max', the first one smaller")
        return float(low), float(high)

    def _chains(self) -> tuple[tuple[str, ...], ...]:
        chains = []
        for i, entry in enumerate(self.root.list("supergroups")):
            group = _Section(self.root.file, f"supergroups[{i}]", entry, ("op_list",))
            names = group.list("op_list")
            if len(names) < 2:
                raise group.error(group.at("op_list"), names, "two operations or more")
            types = [group.op_type(name, f"{group.at('op_list')}[{j}]") for j, name in enumerate(names)]
            chains.append(tuple(name for name in types if name in COMPUTING))
        return tuple(dict.fromkeys(chain for chain in chains if len(chain) > 1))


def _resolved(said: Flags, general: Flags) -> tuple[bool, bool]:
    quantized, symmetric = (bool(broad if narrow is None else narrow) for narrow, broad in zip(said, general, strict=True))
    return quantized, symmetric


def _format(bits: int, is_float: bool) -> tuple[tuple[str, Any], ...]:
    if is_float:
        return (("dtype", "float16" if bits == 16 else "float"),)
    return (("dtype", "int"), ("bits", bits))


def _pattern(name: str, on: bool | None) -> tuple[str, ...]:
    return () if on is None else (name,) if on else (f"!{name}",)
