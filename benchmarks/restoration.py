"""Accuracy of three small networks on scikit-learn's digits: in float, calibrated, restored, and distilled on top.

    python benchmarks/restoration.py [--seeds 5]

Prints, for weights and activations of several widths, the mean over the seeds, the worst difference to calibration alone, and the
seconds that `restore` takes on one thread: the table of docs/restore.md.
"""

from __future__ import annotations

import argparse
import math
import time
from statistics import mean

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import qsim

TRAINING, BATCH = 1200, 64
WIDTHS = {"W8A8": (8, 8), "W4A8": (4, 8), "W4A4": (4, 4), "W3A8": (3, 8), "W2A8": (2, 8)}
WAYS: dict[str, int | None] = {"calibrated": None, "restored": 0, "200 steps": 200}


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    layer = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs))


class Convolutional(nn.Module):
    epochs = 20

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [convolution(1, 16, 3), convolution(16, 16, 3, groups=16), convolution(16, 32, 1), convolution(32, 32, 3, 2)]
        )
        self.head = nn.Linear(32 * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x.flatten(1))


class Inverted(nn.Module):
    """The block of MobileNetV2."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        hidden = 4 * inputs
        self.expand, self.depthwise = convolution(inputs, hidden, 1), convolution(hidden, hidden, 3, stride, hidden)
        self.project, self.adds = convolution(hidden, outputs, 1), inputs == outputs and stride == 1

    def forward(self, x: Tensor) -> Tensor:
        y = self.project(F.relu6(self.depthwise(F.relu6(self.expand(x)))))
        return x + y if self.adds else y


class Mobile(nn.Module):
    epochs = 25

    def __init__(self) -> None:
        super().__init__()
        self.stem = convolution(1, 8, 3)
        self.blocks = nn.Sequential(Inverted(8, 8, 1), Inverted(8, 12, 2), Inverted(12, 12, 1), Inverted(12, 16, 2))
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(F.relu6(self.stem(x))).mean((2, 3)))


class Encoder(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        q, k, v = (layer(y).unflatten(-1, (4, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        shares = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1)
        x = x + self.out((shares @ v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Vision(nn.Module):
    epochs = 40

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patches, self.positions = nn.Conv2d(1, width, 2, 2), nn.Parameter(0.02 * torch.randn(1, 16, width))
        self.blocks = nn.Sequential(*(Encoder(width) for _ in range(3)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.norm(self.blocks(x)).mean(1))


def digits() -> tuple[Tensor, Tensor]:
    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
    return torch.tensor(found.images).float()[order, None] / 16, torch.tensor(found.target)[order]


def trained(kind: type[nn.Module], images: Tensor, labels: Tensor, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = kind()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, kind.epochs * -(-TRAINING // BATCH))
    for _ in range(kind.epochs):
        for batch in torch.randperm(TRAINING).split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
            schedule.step()
    return model.eval()


@torch.no_grad()
def accuracy(network: nn.Module, images: Tensor, labels: Tensor) -> float:
    return 100 * float((network(images[TRAINING:]).argmax(1) == labels[TRAINING:]).float().mean())


def simulated(model: nn.Module, images: Tensor, widths: tuple[int, int], steps: int | None) -> tuple[qsim.QuantSim, float]:
    """The simulation, and the seconds that restoring took."""
    config = qsim.Config(
        weight=qsim.TensorSpec(bits=widths[0], symmetric=True, axis=0, method="minmax" if widths[0] == 8 else "mse"),
        activation=qsim.TensorSpec(bits=widths[1]),
    )
    batches = images[:TRAINING].split(BATCH)
    sim = qsim.QuantSim(model, images[:2], config)
    sim.calibrate(batches, progress=False)
    since = time.perf_counter()
    if steps is not None:
        sim.restore(batches, steps=steps, progress=False)
    return sim, time.perf_counter() - since


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    seeds = range(parser.parse_args().seeds)
    torch.set_num_threads(1)
    images, labels = digits()
    for kind in (Convolutional, Mobile, Vision):
        models = [trained(kind, images, labels, seed) for seed in seeds]
        print(f"{kind.__name__}: float {mean(accuracy(model, images, labels) for model in models):.2f}")
        for name, widths in WIDTHS.items():
            plain: list[float] = []
            for way, steps in WAYS.items():
                found = [simulated(model, images, widths, steps) for model in models]
                values = [accuracy(sim, images, labels) for sim, _ in found]
                plain = plain or values
                worst = min(value - before for value, before in zip(values, plain, strict=True))
                print(
                    f"  {name} {way:10} {mean(values):6.2f}  worst {worst:+.2f}  {mean(seconds for _, seconds in found):.1f} s", flush=True
                )


if __name__ == "__main__":
    main()
