"""Accuracy on scikit-learn's digits: a float network of three convolutions, quantized after training and trained on.

    python benchmarks/accuracy.py [--seeds 4] [--qat-epochs 5]

Prints a row per bit width and recipe: the mean over seeds of the accuracy after calibration and after training, and the differences to the
float network. A seed decides the split of the data, the initial weights and the order of the batches.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import qsim

REESTIMATED = "kept, statistics anew"
WIDTHS = {"W8A8": qsim.int8(), "W4A8": qsim.w4a8(), "W4A4": qsim.int4()}


def recipes(config: qsim.Config) -> Iterator[tuple[str, qsim.Config]]:
    assert config.activation is not None
    kept = replace(config, batch_norm="keep")
    yield "BatchNorm folded", config
    yield "BatchNorm kept", kept
    yield REESTIMATED, kept
    yield "kept, running ranges", replace(kept, activation=replace(config.activation, method="ema"))
    yield "kept, learnable ranges", replace(kept, activation=replace(config.activation, learnable=True))


def network(channels: int = 8) -> nn.Sequential:
    def layer(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]

    body = [*layer(1, channels), nn.MaxPool2d(2), *layer(channels, 2 * channels), *layer(2 * channels, 2 * channels)]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * channels, 10))


def data(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images, test images, training labels, test labels."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    split = train_test_split(images, torch.tensor(digits.target), test_size=450, random_state=seed, stratify=digits.target)
    return tuple(split)


def train(model: nn.Module, images: Tensor, labels: Tensor, epochs: int, lr: float, seed: int) -> None:
    model.train()
    order = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.param_groups(lr) if isinstance(model, qsim.QuantSim) else model.parameters(), lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * -(-len(images) // 64))
    for _ in range(epochs):
        for batch in torch.randperm(len(images), generator=order).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            qsim.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    return 100 * (model(images).argmax(1) == labels).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=15, help="epochs of float training")
    parser.add_argument("--qat-epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate of the training on")
    options = parser.parse_args()
    torch.set_num_threads(1)
    floats, found = [], defaultdict(list)
    for seed in range(options.seeds):
        torch.manual_seed(seed)
        images, held_out, labels, held_out_labels = data(seed)
        model = network()
        train(model, images, labels, options.epochs, 5e-3, seed)
        floats.append(accuracy(model, held_out, held_out_labels))
        for width, config in WIDTHS.items():
            for recipe, changed in recipes(config):
                sim = qsim.QuantSim(model, held_out[:8], changed)
                sim.calibrate(images.split(64), progress=False)
                if recipe == REESTIMATED:
                    sim.reestimate_batch_norms(images.split(64), progress=False)
                quantized = accuracy(sim, held_out, held_out_labels)
                train(sim, images, labels, options.qat_epochs, options.lr, seed)
                sim.fold_batch_norms()
                found[width, recipe].append((quantized, accuracy(sim, held_out, held_out_labels)))
    reference = torch.tensor(floats).mean().item()
    print(f"float {reference:.2f} (from {min(floats):.2f} to {max(floats):.2f})")
    for (width, recipe), results in found.items():
        quantized, trained = torch.tensor(results).mean(0).tolist()
        print(
            f"{width} {recipe:24} {quantized:.2f} ({quantized - reference:+.2f}) -> {trained:.2f} ({trained - reference:+.2f})", flush=True
        )


if __name__ == "__main__":
    main()
