from __future__ import annotations

import glob
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from qsim.checkpoints.packed_weight import PackedWeight
from qsim.config.config import Config
from qsim.config.kv_cache import KVCache
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

    def config(self) -> Config:
        """What simulates it: a config that quantizes these weights on their grids, what they are multiplied with, and nothing else.

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
        if not specs:
            raise ValueError("Checkpoint.config: it has no packed weights")
        usual = Counter(specs.values()).most_common(1)[0][0]
        config = Config(usual, None, target=w4a16().target, kv_cache=self.kv_cache).override("*", weight=None)
        for activation in reversed(dict.fromkeys(self.activations.values())):
            config = config.override(op_type="input", activation=activation)  # where one of the layers reads it: most likely the first
        for name, spec in specs.items():
            config = config.override(glob.escape(name.removesuffix(".weight")), weight=spec, activation=self.activations.get(name))
        return config


def _spec(name: str, weight: PackedWeight) -> TensorSpec:
    try:
        encoding = weight.encoding
    except ValueError as error:
        raise ValueError(f"Checkpoint.config: '{name}': {error}; Checkpoint.state_dict has the weights in float") from None
    if weight.is_float:
        return TensorSpec(dtype=encoding.dtype, axis=encoding.axis, block_size=encoding.block_size, method="minmax")
    signed = encoding.dtype.startswith("int")
    return TensorSpec(
        bits=weight.bits, symmetric=encoding.symmetric, signed=signed, axis=encoding.axis, block_size=encoding.block_size, method="minmax"
    )
