"""Perplexity of a small language model with outlier channels, quantized as it is and equalized.

    python benchmarks/equalization.py [--steps 500]

The text is what Python's `help` has on its topics. After training, three channels of each norm are made 100 times as large, and the weights
that read them as much smaller, which changes nothing in float. Prints a row for each norm, preset and list of methods.
"""

from __future__ import annotations

import argparse
import copy
import math
import pydoc_data.topics
from collections import Counter
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qsim

LENGTH, CHARACTERS, OUTLIERS = 64, 50, [3, 17, 40]
METHODS = [[], ["cross_layer"], ["smooth_quant"], ["awq"], ["rotation"], ["smooth_quant", "rotation"]]
PRESETS = {"int8": qsim.int8(), "int4": qsim.int4()}


class Block(nn.Module):
    def __init__(self, width: int, norm: type[nn.Module]) -> None:
        super().__init__()
        self.ln1, self.ln2 = norm(width), norm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.gate, self.down = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln1(x)
        q, k, v = (layer(y).unflatten(-1, (4, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = self.ln2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Language(nn.Module):
    def __init__(self, norm: type[nn.Module], width: int = 64) -> None:
        super().__init__()
        self.characters, self.positions = nn.Embedding(CHARACTERS, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width, norm) for _ in range(3)))
        self.norm, self.head = norm(width), nn.Linear(width, CHARACTERS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.characters(x) + self.positions(torch.arange(x.shape[1])))))

    def norms(self) -> Iterator[tuple[nn.Module, list[nn.Linear]]]:
        """Each norm with the layers that read it."""
        for block in self.blocks:
            yield block.ln1, [block.q, block.k, block.v]
            yield block.ln2, [block.up, block.gate]
        yield self.norm, [self.head]


def text() -> tuple[Tensor, Tensor]:
    """Nine tenths to train on, and the rest; the rarest characters are one."""
    whole = "\n".join(pydoc_data.topics.topics.values())
    number = {character: i + 1 for i, (character, _) in enumerate(Counter(whole).most_common(CHARACTERS - 1))}
    codes = torch.tensor([number.get(character, 0) for character in whole])
    return codes[: len(codes) * 9 // 10], codes[len(codes) * 9 // 10 :]


def batches(codes: Tensor, count: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        at = torch.randint(len(codes) - LENGTH - 1, (32, 1), generator=generator) + torch.arange(LENGTH)
        yield codes[at], codes[at + 1]


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def trained(norm: type[nn.Module], codes: Tensor, steps: int) -> Language:
    torch.manual_seed(0)
    model = Language(norm)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for x, y in batches(codes, steps, 0):
        optimizer.zero_grad()
        loss(model, x, y).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        for module, readers in model.norms():
            for parameter in module.parameters():
                parameter[OUTLIERS] *= 100
            for reader in readers:
                reader.weight[:, OUTLIERS] /= 100
    return model.eval()


def perplexity(model: nn.Module, codes: Tensor) -> float:
    with torch.no_grad():
        return math.exp(sum(loss(model, x, y).item() for x, y in batches(codes, 10, 1)) / 10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    steps = parser.parse_args().steps
    training, held_out = text()
    calibration = [x for x, _ in batches(training, 8, 2)]
    for norm in (nn.LayerNorm, nn.RMSNorm):
        model = trained(norm, training, steps)
        print(f"{norm.__name__:10} {'float':6} {'':24} {perplexity(model, held_out):7.3f}")
        for preset, config in PRESETS.items():
            for methods in METHODS:
                changed = copy.deepcopy(model)
                if methods:
                    assert not qsim.equalize(changed, calibration[0], calibration[:2], methods=methods).put_back
                sim = qsim.QuantSim(changed, calibration[0], config)
                sim.calibrate(calibration, progress=False)
                print(f"{norm.__name__:10} {preset:6} {', '.join(methods):24} {perplexity(sim, held_out):7.3f}", flush=True)


if __name__ == "__main__":
    main()
