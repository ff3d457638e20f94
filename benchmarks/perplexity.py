"""What quantization costs a character language model, in nats a character, beside torchao's round-to-nearest on the same weights.

    python benchmarks/perplexity.py [--steps 1500] [--seed 0]

The text is that which ships with Python: docstrings of its standard library. Prints a row per scheme: the loss on held-out text above
that of the float model, of qsim and of torchao. Both quantize the linear layers but the head. torchao's NVFP4 of activations is applied
by hooks, because its own layers want a GPU.
"""

from __future__ import annotations

import argparse
import ast
import copy
import sysconfig
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, IntxWeightOnlyConfig, PerGroup, quantize_
from torchao.quantization.quant_primitives import MappingType

import qsim

LENGTH, CHARACTERS = 128, 96
SCHEMES = {"W4A16 g32": qsim.w4a16(group=32), "W8A8 dynamic": qsim.w8a8_dynamic(), "NVFP4": qsim.nvfp4()}


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm, self.then = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.then(x))))


class CharacterModel(nn.Module):
    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(CHARACTERS, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CHARACTERS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.blocks(self.characters(ids) + self.places.weight[: ids.shape[1]])
        return self.head(self.norm(x))


def text(characters: int = 1_000_000) -> Tensor:
    """Docstrings of the standard library's modules, in the order of their names, in printable ASCII."""
    found: list[str] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        kinds = ast.Module, ast.ClassDef, ast.FunctionDef
        found += [docstring for node in nodes if isinstance(node, kinds) and (docstring := ast.get_docstring(node))]
    codes = torch.frombuffer(bytearray("\n\n".join(found).encode("ascii", "replace")), dtype=torch.uint8)[:characters].long()
    return torch.where(codes == 10, 0, (codes - 31).clamp(1, CHARACTERS - 1))


def batches(data: Tensor, count: int, size: int, seed: int) -> list[Tensor]:
    starts = torch.randint(len(data) - LENGTH - 1, (count, size, 1), generator=torch.Generator().manual_seed(seed))
    return list(data[starts + torch.arange(LENGTH + 1)])


def loss(model: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def trained(data: Tensor, steps: int, seed: int) -> CharacterModel:
    torch.manual_seed(seed)
    model = CharacterModel()
    optimizer = torch.optim.AdamW(model.parameters(), 4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 8e-3, total_steps=steps)
    for batch in batches(data, steps, 8, seed):
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def held_out(model: Callable[[Tensor], Tensor], test: list[Tensor]) -> float:
    return sum(loss(model, batch).item() for batch in test) / len(test)


def simulated(model: nn.Module, config: qsim.Config, data: list[Tensor]) -> nn.Module:
    sim = qsim.QuantSim(model, data[0], config)
    sim.calibrate(data, progress=False)
    return sim


def by_torchao(model: nn.Module, scheme: str) -> nn.Module:
    model = copy.deepcopy(model)

    def inner(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and name != "head"

    if scheme == "W4A16 g32":
        config = IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32), mapping_type=MappingType.SYMMETRIC)
        quantize_(model, config, inner)
    elif scheme == "W8A8 dynamic":
        quantize_(model, Int8DynamicActivationInt8WeightConfig(), inner)
    else:
        for name, module in model.named_modules():
            if inner(module, name):
                module.weight = nn.Parameter(nvfp4(module.weight.detach()), requires_grad=False)
                module.register_forward_pre_hook(lambda _, args: (nvfp4(args[0]),))
    return model


def nvfp4(x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    made: Any = NVFP4Tensor.to_nvfp4(rows, per_tensor_scale=per_tensor_amax_to_scale(rows.abs().amax()))
    return made.dequantize(x.dtype).reshape(x.shape)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    data = text()
    split = len(data) * 9 // 10
    model = trained(data[:split], options.steps, options.seed)
    test, seen = batches(data[split:], 16, 16, 1), [batch[:, :-1] for batch in batches(data[:split], 4, 16, 2)]
    in_float = held_out(model, test)
    print(f"float: {in_float:.4f} nats a character\n{'':14}{'qsim':>10}{'torchao':>10}")
    above: Callable[[nn.Module], float] = partial(lambda quantized: held_out(quantized, test) - in_float)
    for scheme, config in SCHEMES.items():
        print(f"{scheme:14}{above(simulated(model, config, seen)):10.5f}{above(by_torchao(model, scheme)):10.5f}")


if __name__ == "__main__":
    main()
