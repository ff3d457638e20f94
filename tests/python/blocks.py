"""Blocks of well-known architectures, and what reaches the operations of a simulation when it runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import qsim


class ResNet(nn.Module):
    """Stem, a block with an identity, a block with a convolution in the shortcut, head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2))
        self.layer1, self.layer2 = Residual(8, 8), Residual(8, 12)
        self.fc = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.adaptive_avg_pool2d(self.layer2(self.layer1(self.stem(x))), 1).flatten(1))


class Residual(nn.Module):
    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.shortcut = nn.Conv2d(channels, width, 1) if channels != width else None
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += x if self.shortcut is None else self.shortcut(x)
        return self.relu(y)


class Inception(nn.Module):
    """A concatenation of a concatenation: pooled, sliced, and read by a convolution; one branch is read elsewhere too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(3, 4, 3, padding=1) for _ in range(3))
        self.side, self.last = nn.Conv2d(4, 8, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = F.relu(self.a(x)), self.b(x), torch.tanh(self.c(x))
        inner = F.max_pool2d(torch.cat([a, b], 1), 2)
        outer = torch.cat([inner, F.max_pool2d(c, 2)], 1)
        return self.last(outer[:, 2:10]) + F.max_pool2d(self.side(a), 2)[:, :4]


class SqueezeExcite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.squeeze, self.excite = nn.Conv2d(8, 2, 1), nn.Conv2d(2, 8, 1)
        self.project = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu6(self.conv(x))
        return self.project(y * torch.sigmoid(self.excite(F.silu(self.squeeze(y.mean((2, 3), keepdim=True))))))


class Transformer(nn.Module):
    """Patches with a class token, attention with two heads, and a perceptron, each behind a LayerNorm and added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        weights = F.softmax(q @ k.transpose(-1, -2) * 0.5, -1)
        x = x + self.proj((weights @ v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


BLOCKS = {"resnet": ResNet, "concat": Inception, "squeeze": SqueezeExcite, "transformer": Transformer}


@dataclass
class Ran:
    """An operation that ran: ATen's name, and the floating-point tensors that it read and wrote, as they were then."""

    name: str
    read: list[Tensor]
    wrote: Tensor


class _Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ran: list[Ran] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        read = [t.clone() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.is_floating_point()]
        out = func(*args, **(kwargs or {}))
        wrote = tree_leaves(out)[0]
        if isinstance(wrote, Tensor) and func.namespace == "aten":
            self.ran.append(Ran(func.overloadpacket.__name__.strip("_"), read, wrote.clone()))
        return out


@contextmanager
def watched() -> Iterator[list[Ran]]:
    """Within the context, everything that ATen computes is noted, with the values of its operands: a simulation cannot hide them."""
    with torch.no_grad(), _Watch() as watch:
        yield watch.ran


def grids(sim: qsim.QuantSim, t: Tensor) -> set[str]:
    """The quantizers, and of weights those of all their layouts, that leave `t` as it is: on whose grid it lies."""
    found = set()
    for key, quantizer in sim.quantizers().items():
        planned = sim.decisions.quantizers[key]
        if planned.parameter is not None:
            weight = quantizer.quantize(sim.model.get_parameter(planned.parameter).detach())
            if t.numel() == weight.numel() and any(torch.equal(t.flatten(), w.flatten()) for w in (weight, weight.transpose(0, -1))):
                found.add(key)
        elif torch.equal(quantizer.quantize(t), t):
            found.add(key)
    return found
