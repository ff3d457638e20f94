"""Weights packed as vLLM, llm-compressor and transformers read them: the format "pack-quantized" of compressed-tensors.

Source: github.com/vllm-project/compressed-tensors, compressors/pack_quantized. At 4 and 8 bits, the ones written here, every version of it
packs alike: along the input channels, the first number in the lowest bits, each raised by half of the grid.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qsim.atomic import write_atomically
from qsim.deploy.bake import integer_state_dict
from qsim.numbers.encoding import Encoding
from qsim.simulation.simulation import Simulation

_BITS = {"int4": 4, "uint4": 4, "int8": 8, "uint8": 8}


def save_compressed(sim: Simulation, folder: str | os.PathLike[str]) -> None:
    """`QuantSim.save_compressed` documents it."""
    state = integer_state_dict(sim)
    encodings = _encodings(sim, state)
    groups: dict[str, list[str]] = defaultdict(list)
    for name, encoding in encodings.items():
        module = name.removesuffix(".weight")
        scheme, packed = _packed(encoding, state.pop(name), state.pop(f"{name}_scale"), state.pop(f"{name}_zero_point"))
        groups[json.dumps(scheme)].append(module)
        state.update({f"{module}.{part}": t for part, t in packed.items()})
    try:
        from safetensors.torch import save
    except ImportError as error:
        raise ImportError('QuantSim.save_compressed writes with safetensors: pip install "qsim[weights]"') from error
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    config = {**_model_config(sim.model), "quantization_config": _quantization_config(sim.model, groups)}
    write_atomically(target / "model.safetensors", save(_once(state), metadata={"format": "pt"}))
    write_atomically(target / "config.json", json.dumps(config, indent=2).encode())


def _encodings(sim: Simulation, state: dict[str, Tensor]) -> dict[str, Encoding]:
    """The encodings of the weights in the state. Raises a ValueError that lists what the format cannot hold."""
    keys = {planned.parameter: key for key, planned in sim.decisions.quantizers.items() if planned.role == "weight"}
    found, problems = {}, []
    for name in state:
        if f"{name}_scale" in state and name in keys:
            encoding = sim.quantizers()[keys[name]].encoding
            assert encoding is not None
            found[name] = encoding
            if problem := _problem(sim.model, name, encoding):
                problems.append(f"'{name}' {problem}")
    own = {keys[name] for name in found}
    if others := [key for key, quantizer in sim.quantizers().items() if quantizer.enabled and key not in own and key in sim.needed()]:
        problems.append(
            f"{len(others)} quantizers are of no weight ({others[0]!r}, ...): what is written is weights alone; activation=None"
        )
    if problems or not found:
        listed = "\n  ".join(problems or ["no weight is quantized"])
        raise ValueError(f"QuantSim.save_compressed: the format cannot hold this simulation:\n  {listed}")
    return found


def _problem(model: nn.Module, name: str, encoding: Encoding) -> str | None:
    owner, _, own = name.rpartition(".")
    module = model.get_submodule(owner)
    weight: Tensor = getattr(module, own)
    if own != "weight" or not isinstance(module, nn.Linear):
        return f'is no weight of an nn.Linear: leave it in float, Config.override("{owner}", weight=None)'
    if sum(parameter is weight for m in model.modules() for parameter in vars(m)["_parameters"].values()) > 1:
        return f'is shared with another module: leave it in float, Config.override("{owner}", weight=None)'
    if encoding.dtype not in _BITS:
        return f"is {encoding.dtype}; expected integers of 4 or 8 bits"
    if encoding.axis not in (0, 1) or (encoding.axis == 1) != (encoding.block_size is not None):
        return f"has axis={encoding.axis}, block_size={encoding.block_size}; expected axis=0, or axis=1 with a block size"
    if isinstance(encoding.block_size, int) and weight.shape[1] % encoding.block_size:
        return f"has {weight.shape[1]} input channels, which groups of {encoding.block_size} do not divide"
    if not torch.equal(encoding.scale.to(weight.dtype).float(), encoding.scale):
        return f"is {weight.dtype} with scales of float32, which readers would round: simulate model.float()"
    return None


def _packed(encoding: Encoding, q: Tensor, scale: Tensor, zero_point: Tensor) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The scheme and the tensors of a weight."""
    bits = _BITS[encoding.dtype]
    offset = -(2 ** (bits - 1)) if encoding.dtype.startswith("u") else 0  # to a signed grid
    signed, zeros = q.to(torch.int32) + offset, zero_point.reshape(q.shape[0], -1) + offset
    symmetric = not bool(zeros.any())
    tensors = {
        "weight_packed": pack(signed, bits),
        "weight_scale": scale.reshape(q.shape[0], -1).contiguous(),
        "weight_shape": torch.tensor(q.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = pack(zeros.T, bits).T.contiguous()
    group = encoding.block_size
    scheme = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "channel" if group is None else "group",
        "dynamic": False,
    }
    return {**scheme, "group_size": group}, tensors


def pack(numbers: Tensor, bits: int) -> Tensor:
    """Signed numbers of 4 or 8 bits in int32 words, along the last axis.

    Parameters
    ----------
    numbers : Tensor, int32, shape ``[rows, columns]``
    bits : int

    Returns
    -------
    Tensor, int32, shape ``[rows, ceil(columns * bits / 32)]``
    """
    each = 32 // bits
    raised = (numbers + 2 ** (bits - 1)).to(torch.int64)
    padded = nn.functional.pad(raised, (0, -raised.shape[1] % each)).reshape(len(raised), -1, each)
    words = (padded << (torch.arange(each, device=padded.device) * bits)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _quantization_config(model: nn.Module, groups: dict[str, list[str]]) -> dict[str, Any]:
    linear = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    packed = {module for modules in groups.values() for module in modules}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{i}": {
                "targets": ["Linear"] if len(groups) == 1 else modules,
                "weights": json.loads(scheme),
                "input_activations": None,
                "output_activations": None,
            }
            for i, (scheme, modules) in enumerate(groups.items())
        },
        "ignore": [path for path in linear if path not in packed],
        "kv_cache_scheme": None,
    }


def _model_config(model: nn.Module) -> dict[str, Any]:
    """The config of a Hugging Face model; empty for others."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_json_string"):
        return {}
    told: dict[str, Any] = json.loads(config.to_json_string())
    return {**told, "architectures": [type(model).__name__]}


def _once(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each memory once, as safetensors wants it: of shared entries the first."""
    seen: set[int] = set()
    found = {}
    for name, t in state.items():
        if t.data_ptr() not in seen or t.numel() == 0:
            found[name] = t.contiguous()
            seen.add(t.data_ptr())
    return found
