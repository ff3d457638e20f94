"""Train a small CNN on scikit-learn's digits, see what 8 and 4 bits do to it, retrain it, and calibrate it on broken data.

    python examples/digits_qat.py [--output FOLDER]

Prints one table (float, post-training quantization and quantization-aware training at three bit widths), then what a calibration
with NaN and Inf in its batches reports. Writes digits_qat.png: one tensor's histogram with its chosen ranges, and the accuracies.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from digits import accuracy, loaders, train
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import qsim

CONFIGS = {"W8A8": qsim.int8(), "W4A8": qsim.w4a8(), "W4A4": qsim.int4()}
METHODS = ("minmax", "tf_enhanced")


def conv_bn_relu(inputs: int, outputs: int, kernel: int, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU())


class DigitsNet(nn.Module):
    """Conv-BN-ReLU, a depthwise convolution, a residual add and a concat on 8 x 8 images."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv_bn_relu(1, 8, 3)
        self.depthwise = conv_bn_relu(8, 8, 3, groups=8)
        self.pointwise = nn.Sequential(nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8))
        self.wide, self.narrow = conv_bn_relu(8, 12, 3), conv_bn_relu(8, 4, 1)
        self.pool = nn.AvgPool2d(4)
        self.classifier = nn.Linear(16 * 2 * 2, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        x = torch.relu(x + self.pointwise(self.depthwise(x)))
        x = torch.cat([self.wide(x), self.narrow(x)], dim=1)
        return self.classifier(self.pool(x).flatten(1))


class Stages(dict[str, float]):
    """Seconds per stage."""

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self[name] = self.get(name, 0.0) + time.perf_counter() - start


def spoiled(batches: list[Tensor]) -> list[Tensor]:
    """The batches, and copies of three of them broken in the ways in which pipelines break data."""
    one_nan, infinite, all_nan = (batch.clone() for batch in batches[:3])
    one_nan[0, 0, 0, 0] = torch.nan
    infinite[3, 0, 4, 4:6] = torch.tensor([torch.inf, torch.nan])
    all_nan.fill_(torch.nan)
    return [batches[0], one_nan, *batches[1:5], infinite, *batches[5:], all_nan]


def plot(path: Path, sim: qsim.QuantSim, accuracies: dict[str, dict[str, float]], name: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    quantizer = sim.quantizers()[name]
    edges, counts = quantizer.observer.histogram(bins=120)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    left.stairs(counts, edges, fill=True, color="tab:gray", label=f"{quantizer.counts.elements:,} values")
    for method, color in zip(METHODS, ("tab:red", "tab:blue"), strict=True):
        encoding = quantizer.observer.encoding(quantizer.spec, method)
        ends = [((q - encoding.zero_point) * encoding.scale).item() for q in (encoding.quant_min, encoding.quant_max)]
        for end in ends:
            left.axvline(end, color=color, linestyle="--", label=f"{method}: {ends[0]:.3g} to {ends[1]:.3g}" if end == ends[1] else None)
    left.set(title=f"{name} and its {quantizer.spec.bits}-bit ranges", xlabel="value", ylabel="count", yscale="log")
    left.legend()
    columns = list(accuracies["W8A8"])
    for i, column in enumerate(columns):
        positions = [j + 0.2 * (i - (len(columns) - 1) / 2) for j in range(len(accuracies))]
        bars = right.bar(positions, [row[column] for row in accuracies.values()], width=0.18, label=column)
        right.bar_label(bars, fmt="%.1f", fontsize=7)
    right.set_xticks(range(len(accuracies)), list(accuracies))
    lowest = min(min(row.values()) for row in accuracies.values())
    right.set(title="accuracy on 450 held-out digits", ylabel="percent", ylim=(max(0, lowest - 3), 101))
    right.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncol=len(columns), fontsize=8)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("out"), help="folder for digits_qat.png")
    parser.add_argument("--epochs", type=int, default=20, help="epochs of float training")
    parser.add_argument("--qat-epochs", type=int, default=10)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)

    console, stages = Console(), Stages()
    torch.manual_seed(0)
    train_loader, test_loader = loaders()
    example = next(iter(test_loader))[0][:8]
    model = DigitsNet()
    with stages("train float"):
        train(model, train_loader, options.epochs, torch.optim.Adam(model.parameters(), 3e-3), "float training")
    float_accuracy = accuracy(model, test_loader)

    accuracies: dict[str, dict[str, float]] = {}
    sims: dict[str, qsim.QuantSim] = {}
    for name, config in CONFIGS.items():
        row = {"float": float_accuracy}
        with stages("wrap"):
            sims[name] = sim = qsim.QuantSim(model, example, config)
        with stages("calibrate"):
            sim.calibrate(train_loader)
        for method in METHODS:  # one calibration pass serves every method
            with stages("search ranges"):
                sim.set_method(method)
            with stages("evaluate"):
                row[f"PTQ {method}"] = accuracy(sim, test_loader)
        with stages("QAT"):
            train(sim, train_loader, options.qat_epochs, torch.optim.Adam(sim.parameters(), 1e-3), f"QAT {name}")
        row["QAT"] = accuracy(sim, test_loader)
        accuracies[name] = row

    table = Table(title="Digits: accuracy in percent")
    for column in ("", *accuracies["W8A8"]):
        table.add_column(column, justify="right")
    for name, row in accuracies.items():
        table.add_row(name, *(f"{value:.2f}" for value in row.values()))
    console.print(table)
    console.print("seconds: " + ", ".join(f"{name} {seconds:.2f}" for name, seconds in stages.items()))

    console.rule("Calibration once more, with NaN and Inf in its batches")
    batches = [images for images, _ in train_loader]
    clean, broken = (qsim.QuantSim(model, example, qsim.int8()) for _ in range(2))
    clean.calibrate(batches)
    console.print(str(broken.calibrate(spoiled(batches))), markup=False)
    ranges = [{key: (q.min.tolist(), q.max.tolist()) for key, q in sim.quantizers().items()} for sim in (clean, broken)]
    moved = [key for key in ranges[0] if ranges[0][key] != ranges[1][key]]
    console.print(f"ranges that moved: {', '.join(moved) or 'none'}")

    path = options.output / "digits_qat.png"
    plot(path, sims["W4A4"], accuracies, "add.output")
    console.print(f"wrote {path}")


if __name__ == "__main__":
    main()
