"""Train a small NAFNet to remove noise from photographs, see what int8 and float16 do to it, and cure both.

    python examples/nafnet_denoise.py [--steps N] [--qat-steps N]

NAFNet (Chen et al. 2022) is the network that TensorRT turns to NaN in FP16: at test time its pooling is local (TLSC, Chu et al. 2022),
by differences of cumulative sums over the image, and those leave float16's range. The script prints, for each way of quantizing, the
PSNR on a photograph that training did not see; the tensors that overflow; and what keeping them in float32 gives.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_sample_images
from torch import Tensor, nn
from tqdm import tqdm

import qsim

NOISE = 25 / 255
PATCH = 48  # side of the training patches; also the window of the local pooling


class LayerNorm2d(nn.Module):
    """Over the channels of each pixel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels, 1, 1)), nn.Parameter(torch.zeros(channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(1, keepdim=True)
        return centred / (centred.pow(2).mean(1, keepdim=True) + 1e-6).sqrt() * self.weight + self.bias


class LocalAveragePool(nn.Module):
    """The mean of the image in training; of the window around each pixel in evaluation, where images are larger than patches."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        if self.training or (height <= self.window and width <= self.window):
            return F.adaptive_avg_pool2d(x, 1)
        rows, columns = min(self.window, height), min(self.window, width)
        sums = F.pad(x.cumsum(-1).cumsum(-2), (1, 0, 1, 0))  # an integral image
        inner = sums[..., rows:, columns:] - sums[..., :-rows, columns:] - sums[..., rows:, :-columns] + sums[..., :-rows, :-columns]
        top, left = (height - inner.shape[-2]) // 2, (width - inner.shape[-1]) // 2
        border = (left, width - inner.shape[-1] - left, top, height - inner.shape[-2] - top)
        return F.pad(inner / (rows * columns), border, mode="replicate")


def gated(x: Tensor) -> Tensor:
    """SimpleGate: the product of the two halves of the channels."""
    left, right = x.chunk(2, dim=1)
    return left * right


class Block(nn.Module):
    def __init__(self, channels: int, window: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = LayerNorm2d(channels), LayerNorm2d(channels)
        self.expand, self.mix = (
            nn.Conv2d(channels, 2 * channels, 1),
            nn.Conv2d(2 * channels, 2 * channels, 3, padding=1, groups=2 * channels),
        )
        self.pool, self.attention = LocalAveragePool(window), nn.Conv2d(channels, channels, 1)
        self.project = nn.Conv2d(channels, channels, 1)
        self.widen, self.narrow = nn.Conv2d(channels, 2 * channels, 1), nn.Conv2d(channels, channels, 1)
        self.beta, self.gamma = (nn.Parameter(torch.zeros(channels, 1, 1)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = gated(self.mix(self.expand(self.norm1(x))))
        x = x + self.project(y * self.attention(self.pool(y))) * self.beta
        return x + self.narrow(gated(self.widen(self.norm2(x)))) * self.gamma


class NAFNet(nn.Module):
    """One level of down- and upsampling around a middle block; images whose sides are even."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.intro, self.ending = nn.Conv2d(3, channels, 3, padding=1), nn.Conv2d(channels, 3, 3, padding=1)
        self.encoder, self.decoder = Block(channels, PATCH), Block(channels, PATCH)
        self.down, self.middle = nn.Conv2d(channels, 2 * channels, 2, stride=2), Block(2 * channels, PATCH // 2)
        self.up = nn.Sequential(nn.Conv2d(2 * channels, 4 * channels, 1, bias=False), nn.PixelShuffle(2))

    def forward(self, image: Tensor) -> Tensor:
        skip = self.encoder(self.intro(image))
        x = self.up(self.middle(self.down(skip)))
        return self.ending(self.decoder(x + skip)) + image


def photographs() -> tuple[Tensor, Tensor]:
    """Two photographs that come with scikit-learn, (1, 3, height, width) in [0, 1]: one to train on, one to test on."""
    temple, flower = (torch.tensor(image).permute(2, 0, 1)[None] / 255 for image in load_sample_images().images)
    return temple, flower


def noisy(image: Tensor, generator: torch.Generator) -> Tensor:
    return image + NOISE * torch.randn(image.shape, generator=generator)


def train(model: nn.Module, photograph: Tensor, steps: int, lr: float, title: str) -> None:
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps)
    height, width = photograph.shape[-2:]
    model.train()
    for _ in tqdm(range(steps), desc=title, unit="step", leave=False, disable=None):
        rows, columns = (torch.randint(side - PATCH, (8,), generator=generator).tolist() for side in (height, width))
        clean = torch.cat([photograph[..., r : r + PATCH, c : c + PATCH] for r, c in zip(rows, columns, strict=True)])
        optimizer.zero_grad()
        F.mse_loss(model(noisy(clean, generator)), clean).backward()
        qsim.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


@torch.no_grad()
def psnr(model: nn.Module, noise: Tensor, clean: Tensor) -> float:
    """Peak signal-to-noise ratio in dB; NaN if the result has one."""
    model.eval()
    return -10 * torch.log10(F.mse_loss(model(noise).clamp(0, 1), clean)).item()


def overflowing(sim: qsim.QuantSim) -> list[str]:
    """The tensors in which float16 made infinities of numbers, the first one first."""
    return [key for key, quantizer in sim.quantizers().items() if quantizer.format_counts and quantizer.format_counts.overflows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="steps of float training")
    parser.add_argument("--qat-steps", type=int, default=100)
    options = parser.parse_args()

    console = Console()
    torch.manual_seed(0)
    train_photograph, test_photograph = photographs()
    clean = test_photograph[..., :416, :624]
    noise = noisy(clean, torch.Generator().manual_seed(1))
    batches = [noisy(train_photograph[..., top : top + 192, 64:320], torch.Generator().manual_seed(top)) for top in (0, 96, 192)]
    model = NAFNet()
    train(model, train_photograph, options.steps, 2e-3, "float training")

    table = Table(title="PSNR in dB on a photograph that training did not see")
    for column in ("", "calibrated", "retrained"):
        table.add_column(column, justify="right")
    table.add_row("noisy image", f"{psnr(nn.Identity(), noise, clean):.2f}", "")
    table.add_row("float32", f"{psnr(model, noise, clean):.2f}", "")
    for name, config in {"W8A8": qsim.int8(), "W4A8": qsim.w4a8()}.items():
        sim = qsim.QuantSim(model, batches[0], config)
        sim.calibrate(batches)
        calibrated = psnr(sim, noise, clean)
        train(sim, train_photograph, options.qat_steps, 5e-4, f"QAT {name}")
        table.add_row(name, f"{calibrated:.2f}", f"{psnr(sim, noise, clean):.2f}")

    half = qsim.QuantSim(model, batches[0], qsim.fp16())
    half.calibrate([noisy(train_photograph[..., :416, :624], torch.Generator().manual_seed(2))])  # as large as what it is to do
    table.add_row("float16", f"{psnr(half, noise, clean):.2f}", "")
    kept = qsim.fp16().override("*.pool.*", off=True)  # the whole chain: a sum that is cast back to float16 overflows too
    table.add_row("float16 but for the pooling", f"{psnr(qsim.QuantSim(model, batches[0], kept), noise, clean):.2f}", "")
    console.print(table)
    console.print(f"overflow float16: {', '.join(overflowing(half)) or 'none'}")


if __name__ == "__main__":
    main()
