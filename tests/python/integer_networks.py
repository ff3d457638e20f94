"""Networks that ONNX Runtime runs on integers, and the number systems they run in."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from models import ConvNet, seeded
from onnx_graphs import kernels, session
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import qsim
from qsim.integer.programs import PROGRAMS

Maker = Callable[[], nn.Module]


def convolution(inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1, act: Maker = nn.ReLU) -> nn.Module:
    layer = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs), act())


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.pool, self.fc1, self.act = nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, 4, 1), nn.ReLU()
        self.fc2, self.gate = nn.Conv2d(4, channels, 1), nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(self.fc2(self.act(self.fc1(self.pool(x)))))


class Mobile(nn.Module):
    """Depthwise and pointwise convolutions, ReLU6, squeeze-excite, residual addition, a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.depthwise = convolution(3, 16, 3, 2, act=nn.ReLU6), convolution(16, 16, 3, 1, 16, nn.ReLU6)
        self.excite, self.pointwise = SqueezeExcite(16), nn.Sequential(nn.Conv2d(16, 16, 1, bias=False), nn.BatchNorm2d(16))
        self.head, self.fc = convolution(16, 32, 1), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.pointwise(self.excite(self.depthwise(x)))
        return self.fc(self.head(x).mean((2, 3)))


class UNet(nn.Module):
    """Max and average pooling, a transposed convolution, concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.up = convolution(3, 8), convolution(8, 16), nn.ConvTranspose2d(16, 8, 2, 2)
        self.fuse, self.out, self.smooth = convolution(16, 8), nn.Conv2d(8, 4, 1), nn.AvgPool2d(3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.smooth(self.down2(F.max_pool2d(a, 2)))
        return self.out(self.fuse(torch.cat([a, self.up(b)], 1)))


class Gated(nn.Module):
    """SiLU and HardSwish behind convolutions, in place and not, a squeeze-excite whose gate is a HardSigmoid."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mix = convolution(3, 16, act=partial(nn.SiLU, inplace=True)), convolution(16, 16, act=nn.Hardswish)
        self.squeeze, self.excite, self.act = nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1), nn.Hardswish(inplace=True)
        self.head = convolution(16, 8, 1, act=nn.SiLU)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mix(self.stem(x))
        return self.head(x * F.hardsigmoid(self.excite(self.act(self.squeeze(x.mean((2, 3), keepdim=True))))))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(20, 64), nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.fc1(x))
        return self.fc3(F.relu(self.fc2(x)) + x)


class Attention(nn.Module):
    """Linear layers on sequences, products of activations, a softmax; a LayerNorm and a factor in float."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.q, self.k, self.v, self.out = nn.LayerNorm(16), *(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        weights = torch.softmax(self.q(y) @ self.k(y).transpose(1, 2) * 0.25, -1)
        return x + self.out(weights @ self.v(y))


class Rare(nn.Module):
    """An operand twice, constants, padding by name and by reflection, dilation, uneven windows, a rectifier that no grid takes over."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3, padding="same"), nn.Conv2d(8, 8, 4, padding="same")
        self.conv3, self.conv4 = nn.Conv2d(8, 8, 3, padding="valid"), nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect")
        self.conv5, self.factor = nn.Conv2d(8, 8, (3, 1), (2, 1), (1, 0), (2, 1)), nn.Parameter(torch.randn(8, 1, 1))
        self.conv6, self.fc = nn.Conv1d(8, 8, 3), nn.Linear(6, 5, bias=False)

    def forward(self, x: Tensor) -> dict[str, Any]:
        x = self.conv1(x)
        x = x + x
        x = F.leaky_relu(self.conv2(x) * self.factor + self.factor, 0.1)
        x = self.conv4(x)
        y = self.conv5(self.conv3(x) * 0.5)
        parts = x.clamp(-0.5, 0.7).chunk(2, 1)
        pooled = F.avg_pool2d(y, 3, 2, 1, ceil_mode=True), F.avg_pool2d(x, 2, 2, 1, count_include_pad=False), F.adaptive_avg_pool2d(x, 7)
        line = F.relu(self.conv6(x.mean(3)))
        return {
            "pooled": pooled,
            "scaled": x.mean((2, 3), keepdim=True) * x,
            "parts": parts,
            "line": self.fc(line[..., :6]),
            "y": torch.where(y > 0, y, y),
        }


# model, shape of one input, how many give 10,000 outputs
NETWORKS = {
    "convolutions": (ConvNet, (1, 12, 12), 1000),
    "mobile": (Mobile, (3, 12, 12), 1000),
    "unet": (UNet, (3, 16, 16), 10),
    "gated": (Gated, (3, 12, 12), 10),
    "mlp": (MLP, (20,), 1000),
    "attention": (Attention, (9, 16), 70),
    "rare": (Rare, (3, 14, 14), 40),
}

BARS = ("convolutions", "mobile", "gated", "unet", "mlp")


def _system(**activation: bool) -> qsim.Profile:
    return dataclasses.replace(qsim.config.profile.ONNXRUNTIME, activation=activation)


SYSTEMS = {
    "int8": qsim.int8(target=_system(signed=True, symmetric=False)),
    "int8 symmetric": qsim.int8(target=_system(signed=True, symmetric=True)),
    "uint8, weights of 7 bits": qsim.int8(target=_system(signed=False, symmetric=False)).override("*", weight={"bits": 7}),
    "uint8": qsim.int8(target="onnxruntime"),
    "weights of 4 bits": qsim.w4a8(target="onnxruntime"),
    "bias in float": dataclasses.replace(qsim.int8(target="onnxruntime"), bias=False),
}


def simulated(network: str, system: str) -> tuple[qsim.QuantSim, Tensor]:
    """A calibrated simulation, and inputs that it has not seen."""
    model, shape, count = NETWORKS[network]
    built = seeded(model)
    sim = qsim.QuantSim(built, torch.randn(2, *shape), SYSTEMS[system])
    sim.calibrate([torch.randn(64, *shape)], progress=False)
    return sim, torch.randn(count, *shape)


def with_ties(sim: qsim.QuantSim) -> None:
    """Make all scales powers of two: then sums and products lie halfway between integers all the time."""
    for quantizer in sim.quantizers().values():
        encoding = quantizer.encoding
        quantizer.set_encoding(dataclasses.replace(encoding, scale=2.0 ** encoding.scale.log2().round()))


def by_runtime(sim: qsim.QuantSim, x: Tensor, folder: Path, *, optimize: bool = True, **options: Any) -> tuple[list[np.ndarray], Path]:
    """What ONNX Runtime makes of the exported simulation, and the graph that it ran."""
    file, ran = folder / "model.onnx", folder / "ran.onnx"
    sim.export(file, target="onnxruntime", **options)
    running = session(str(file), optimize, ran)
    return running.run(None, {running.get_inputs()[0].name: x.numpy()}), ran


def differing(found: Any, expected: list[np.ndarray]) -> tuple[int, int]:
    """How many outputs differ, and of how many."""
    pairs = list(zip(tree_leaves(found), expected, strict=True))
    return sum(int((a.numpy() != b).sum()) for a, b in pairs), sum(b.size for _, b in pairs)


_KERNELS = ("QLinear", "QGemm", "MatMulIntegerToFloat")
# Their sums in float32 are rounded in an order that differs from CPU to CPU: of a million results a few fall to the next integer.
_ROUNDED = ("ConvTranspose", "LayerNormalization", "Conv", "FusedConv", "Gemm", "MatMul")


def check_integers(sim: qsim.QuantSim, x: Tensor, folder: Path) -> int:
    """Assert that no output differs from the runtime's, hardly any behind sums in float32, and that it ran the kernels that qsim says.

    Returns in how many outputs the plain simulation differs.
    """
    expected, ran = by_runtime(sim, x, folder)
    wrong, compared = differing(sim.evaluate(x, integer=True), expected)
    assert compared >= 10_000
    assert wrong <= (compared // 5000 if set(kernels(ran)) & set(_ROUNDED) else 0)
    (evaluation,) = sim.derived[PROGRAMS].values()
    mine = Counter(kernel.kernel for kernel in evaluation.prepared.kernels if kernel.kernel)
    assert mine == Counter({op: count for op, count in kernels(ran).items() if op.startswith(_KERNELS)})
    return differing(sim.evaluate(x), expected)[0]
