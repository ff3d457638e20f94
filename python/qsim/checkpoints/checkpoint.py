from __future__ import annotations

import dataclasses
import glob
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from qsim.checkpoints.experts import join, join_activations
from qsim.checkpoints.kv_scales import scale_names
from qsim.checkpoints.packed_weight import PackedWeight
from qsim.checkpoints.published_names import STACK, published
from qsim.config.config import Config
from qsim.config.kv_cache import KVCache
from qsim.config.override import SiteInfo
from qsim.config.presets import w4a16
from qsim.numbers.encoding import Encoding
from qsim.numbers.spec import TensorSpec


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """What a checkpoint with packed weights holds.

    Parameters
    ----------
    weights : mapping of str to PackedWeight
        By the name of the parameter: ``model.layers.0.mlp.down_proj.weight``.
    tensors : mapping of str to Tensor
        All others, by name, in the types of the file.
    format : str
        What it was read from: "gptq", "gptq_v2", "awq", "compressed-tensors", "fp8" or "gguf".
    model_config : mapping
        The model's ``config.json`` without what says how it is quantized; of GGUF nothing.
    activations : mapping of str to TensorSpec
        What is multiplied with a weight is quantized so, by the weight's name; weights that are not in it are multiplied with floats.
    encodings : mapping of str to Encoding
        Of these activations, where the file has their scale, by the weight's name; of keys and values by the scale's name,
        ``model.layers.0.self_attn.k_scale``.
    kv_cache : KVCache, optional
        How keys and values in a cache are quantized.

    Examples
    --------
    >>> import torch
    >>> integers, scale = torch.tensor([[1, -2]], dtype=torch.int8), torch.ones(1, 1)
    >>> weight = qsim.PackedWeight(integers, scale, torch.zeros(1, 1, dtype=torch.int32), 4, 2)
    >>> Checkpoint({"fc.weight": weight}, {}, "gptq").state_dict()
    {'fc.weight': tensor([[ 1., -2.]])}
    """

    weights: Mapping[str, PackedWeight]
    tensors: Mapping[str, Tensor]
    format: str
    model_config: Mapping[str, Any] = field(default_factory=dict)
    activations: Mapping[str, TensorSpec] = field(default_factory=dict)
    encodings: Mapping[str, Encoding] = field(default_factory=dict)
    kv_cache: KVCache | None = None

    def state_dict(self) -> dict[str, Tensor]:
        """The weights in float32, dequantized, and all other tensors: for `nn.Module.load_state_dict`."""
        return {**{name: weight.dequantize() for name, weight in self.weights.items()}, **self.tensors}

    def for_model(self, model: nn.Module) -> Checkpoint:
        """The same in the names and shapes of a model, where transformers 5 has others than published files: experts that have a weight
        each in the one parameter that the model has for them.

        `QuantSim.load_compressed` does it. A checkpoint that is as the model comes back as it is.

        Parameters
        ----------
        model : nn.Module
            Of transformers, whose table of conversions is asked. Tensors that its class ignores (layers that predict several tokens, of
            DeepSeek-V3) are left out.

        Raises
        ------
        FileFormatError
            An expert is not there, or does not fit the others.

        Examples
        --------
        >>> checkpoint = Checkpoint({}, {"weight": torch.zeros(2, 3)}, "gptq")
        >>> checkpoint.for_model(torch.nn.Linear(3, 2)) is checkpoint
        True
        """
        entries: dict[str, PackedWeight | Tensor] = {**self.weights, **self.tensors}
        layout = published(model, () if self.kv_cache is None else scale_names(model))
        others = {*layout.names.values()} - model.state_dict().keys()
        if not any(name in layout.parts or name in others for name in entries):
            return self
        ignored = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
        entries = {name: entry for name, entry in entries.items() if not any(pattern.search(name) for pattern in ignored)}
        found = join(entries, layout)
        activations, encodings = join_activations(self.activations, self.encodings, entries, layout)
        return dataclasses.replace(
            self,
            weights={name: entry for name, entry in found.items() if isinstance(entry, PackedWeight)},
            tensors={name: entry for name, entry in found.items() if isinstance(entry, Tensor)},
            activations=activations,
            encodings=encodings,
        )

    def config(self) -> Config:
        """What simulates it: a config that quantizes these weights on their grids, what they are multiplied with, and nothing else.

        Of a model that has experts in one parameter: ``checkpoint.for_model(model).config()``.

        Raises
        ------
        ValueError
            A weight has a grid that no simulation has.

        Examples
        --------
        >>> import torch
        >>> integers, scale = torch.zeros(8, 64, dtype=torch.int8), torch.ones(8, 2)
        >>> weight = qsim.PackedWeight(integers, scale, torch.zeros(8, 2, dtype=torch.int32), 4, 32)
        >>> Checkpoint({"fc.weight": weight}, {}, "gptq").config().overrides[-1].weight.block_size
        32
        """
        specs = {name: _spec(name, weight) for name, weight in self.weights.items()}
        if not specs and self.kv_cache is None:
            raise ValueError("Checkpoint.config: it has no packed weights")
        usual = Counter(specs.values()).most_common(1)[0][0] if specs else None
        config = Config(usual, None, target=w4a16().target, kv_cache=self.kv_cache)
        config = config.override("*", weight=None) if specs else config
        for activation in reversed(dict.fromkeys(self.activations.values())):
            config = config.override(op_type="input", activation=activation)  # where one of the layers reads it: most likely the first
        for name, spec in specs.items():
            config = config.override(self._sites(name, specs), weight=spec, activation=self.activations.get(name))
        return config

    def _sites(self, name: str, specs: Mapping[str, TensorSpec]) -> str | _OfShape:
        """What an override says of the operations that read a weight: of a stack all in its module, those of its shape if others differ."""
        weight, owner = self.weights[name], name.rpartition(".")[0]
        if weight.integers.dim() < STACK:
            return glob.escape(name.removesuffix(".weight"))
        pattern, beside = f"{glob.escape(owner)}.*", [other for other in specs if other.rpartition(".")[0] == owner]
        if all((specs[other], self.activations.get(other)) == (specs[name], self.activations.get(name)) for other in beside):
            return pattern
        return _OfShape(pattern, tuple(weight.integers.shape))


@dataclass(frozen=True)
class _OfShape:
    """Operations whose weight has a shape, among those of a pattern."""

    pattern: str
    shape: tuple[int, ...]

    def __call__(self, site: SiteInfo) -> bool:
        return fnmatchcase(site.name, self.pattern) and site.weight_shape == self.shape


def _spec(name: str, weight: PackedWeight) -> TensorSpec:
    try:
        encoding = weight.encoding
    except ValueError as error:
        raise ValueError(f"Checkpoint.config: '{name}': {error}; Checkpoint.state_dict has the weights in float") from None
    axis, size = encoding.axis, encoding.block_size
    if weight.integers.dim() == STACK:  # as a config says it of each weight in it
        last = {1: 0, 2: 1}
        axis = tuple(last[a] for a in axis) if isinstance(axis, tuple) else None if axis == 0 else 1
        axis, size = (0, None) if weight.block_size is None and axis == 1 else (axis, size)
    if weight.is_float:
        return TensorSpec(dtype=encoding.dtype, axis=axis, block_size=size, method="minmax")
    signed = encoding.dtype.startswith("int")
    return TensorSpec(bits=weight.bits, symmetric=encoding.symmetric, signed=signed, axis=axis, block_size=size, method="minmax")
