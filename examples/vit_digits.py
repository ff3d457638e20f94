"""Train a small vision transformer on scikit-learn's digits and find the mixed precision that it stands.

    python examples/vit_digits.py [--epochs N] [--qat-epochs N] [--depth N]

Prints the accuracy at 8 and 4 bits, which operations lose most at 4 bits (each quantized alone), what keeping the worst of them at 8
bits gives, and what retraining with learned scales gives.
"""

from __future__ import annotations

import argparse

import torch
from digits import accuracy, loaders, train
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import qsim

KEPT = 3  # operations that mixed precision keeps at 8 bits


class VisionTransformer(nn.Module):
    """Patches of 2 x 2, a class token, learned positions, pre-norm encoder layers."""

    def __init__(self, width: int = 48, heads: int = 4, depth: int = 3, classes: int = 10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, kernel_size=2, stride=2)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 17, width))
        layers = [nn.TransformerEncoderLayer(width, heads, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True) for _ in range(depth)]
        self.layers = nn.ModuleList(layers)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x[:, 0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20, help="epochs of float training")
    parser.add_argument("--qat-epochs", type=int, default=5)
    parser.add_argument("--depth", type=int, default=3, help="encoder layers (default: 3)")
    options = parser.parse_args()

    console = Console()
    torch.manual_seed(0)
    train_loader, test_loader = loaders()
    example = next(iter(train_loader))[0]
    model = VisionTransformer(depth=options.depth)
    train(model, train_loader, options.epochs, torch.optim.AdamW(model.parameters(), 2e-3), "float training")

    def calibrated(config: qsim.Config) -> qsim.QuantSim:
        sim = qsim.QuantSim(model, example, config)
        sim.calibrate(train_loader)
        return sim

    four = calibrated(qsim.int4())
    worst = four.sensitivity([example], groups="operation").worst(KEPT)  # by the SQNR of the logits, which needs no labels
    mixed = qsim.int4()
    for name in worst:
        mixed = mixed.override(name, bits=8)

    table = Table(title="Digits: accuracy in percent")
    for column in ("", "calibrated", "retrained"):
        table.add_column(column, justify="right")
    table.add_row("float32", f"{accuracy(model, test_loader):.2f}", "")
    for name, config in {"W8A8": qsim.int8(), "W4A8": qsim.w4a8(), "W4A4": qsim.int4(), f"W4A4, {KEPT} at 8 bits": mixed}.items():
        before = accuracy(calibrated(config), test_loader)
        sim = calibrated(config.override("*", learnable=True))  # LSQ
        groups = sim.param_groups(lr=5e-4, scale_lr=5e-5)
        train(sim, train_loader, options.qat_epochs, torch.optim.AdamW(groups), f"QAT {name}")
        table.add_row(name, f"{before:.2f}", f"{accuracy(sim, test_loader):.2f}")
    console.print(table)
    console.print("most sensitive at 4 bits, each alone: " + ", ".join(worst))


if __name__ == "__main__":
    main()
