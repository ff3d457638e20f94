"""The models whose simulations live: each with inputs, and with what its simulation computes, written out by hand where that is short."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .hand import Hand

Call = tuple[tuple[Any, ...], dict[str, Any]]


class Residual(nn.Module):
    """Convolutions with BatchNorm, one of them beside a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.c1, self.b1 = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.c2, self.b2 = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.fc = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.b1(self.c1(x)))
        return self.fc(F.relu(self.b2(self.c2(y)) + y).mean((2, 3)))


def residual_by_hand(h: Hand, x: Tensor) -> Tensor:
    x = h.q("input", x)
    y = h.q("c1.output", F.relu(h.norm("b1", h.product(F.conv2d, "c1", x, "input", padding=1))))
    z = h.q("c2.output", h.norm("b2", h.product(F.conv2d, "c2", y, "c1.output", padding=1)))
    z = h.q("mean.output", h.q("add.output", F.relu(z + y)).mean((2, 3)))
    return h.q("fc.output", h.product(F.linear, "fc", z, "mean.output"))


class Block(nn.Module):
    """A transformer's block."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.proj = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        a = torch.softmax(q @ k.transpose(-2, -1) * (d // self.heads) ** -0.5, -1)
        x = x + self.proj((a @ v).transpose(1, 2).reshape(b, n, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def block_by_hand(h: Hand, x: Tensor) -> Tensor:
    b, n, d = x.shape
    x = h.q("input", x)
    y = h.product(F.linear, "qkv", h.q("norm.output", h.module("norm", x)), "norm.output")
    q, k, v = h.q("qkv.output", y).reshape(b, n, 3, 2, d // 2).permute(2, 0, 3, 1, 4).unbind(0)
    a = h.q("mul.output", h.q("matmul.output", q @ k.transpose(-2, -1)) * (d // 2) ** -0.5)
    a = h.q("softmax.output", torch.softmax(a, -1))
    y = h.q("matmul_2.output", a @ v).transpose(1, 2).reshape(b, n, d)
    x = h.q("add.output", x + h.q("proj.output", h.product(F.linear, "proj", y, "matmul_2.output")))
    y = F.gelu(h.product(F.linear, "up", h.q("norm2.output", h.module("norm2", x)), "norm2.output"))
    y = h.q("down.output", h.product(F.linear, "down", h.q("up.output", y), "up.output"))
    return h.q("add_2.output", x + y)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn, self.head = nn.Linear(6, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(torch.relu(self.embed(x)))[0][:, -1])


class Shared(nn.Module):
    """Two layers with one weight, a layer that is called twice, and a table that is the last layer's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.table, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
        self.b.weight, self.head.weight = self.a.weight, self.table.weight

    def forward(self, indices: Tensor) -> Tensor:
        x = self.a(self.a(self.table(indices)))
        return self.head(torch.relu(self.b(torch.relu(x))))


class Remembering(nn.Module):
    """A mean of what it has seen, in a buffer that its forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(8, 8), nn.Linear(8, 4), nn.BatchNorm1d(8)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm(self.first(x)))
        self.seen.mul_(0.9).add_(y.detach().mean(0) * 0.1)
        return self.second(y - self.seen)


class TwoPaths(nn.Module):
    """A flag decides which of two layers runs."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.wide, self.narrow, self.head = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 16, bias=False), nn.Linear(16, 3)

    def forward(self, x: Tensor, wide: bool = True) -> Tensor:
        x = F.relu6(self.stem(x))
        return self.head(torch.tanh(self.wide(x)) if wide else F.relu(self.narrow(x)))


def two_paths_by_hand(h: Hand, x: Tensor, wide: bool = True) -> Tensor:
    x = h.q("stem.output", F.relu6(h.product(F.linear, "stem", h.q("input", x), "input")))
    if wide:
        y = h.q("wide.output", torch.tanh(h.product(F.linear, "wide", x, "stem.output")))
        return h.q("head.output", h.product(F.linear, "head", y, "wide.output"))
    y = h.q("narrow.output", F.relu(h.product(F.linear, "narrow", x, "stem.output")))
    return h.q("head.output", h.product(F.linear, "head", y, "narrow.output"))


@dataclass(frozen=True)
class Subject:
    """A model with its inputs.

    Attributes
    ----------
    made : callable
        The model class.
    inputs : callable
        ``inputs(size)``: positional arguments of a batch of that size, random.
    paths : tuple of dict
        Keyword arguments of the paths that there are; the first example is recorded with the first.
    by_hand : callable, optional
        What the simulation for the target "default" computes: quantizers stand where the documents have them.
    is_stateful : bool
        Whether its forward writes buffers.
    shares : bool
        Whether modules of it have parameters in common.
    """

    made: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[Any, ...]]
    paths: tuple[dict[str, Any], ...] = ({},)
    by_hand: Callable[..., Tensor] | None = None
    is_stateful: bool = False
    shares: bool = False

    def model(self, seed: int) -> nn.Module:
        """In eval mode, with statistics as a training leaves them."""
        torch.manual_seed(seed)
        model = self.made()
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2)
                module.num_batches_tracked.fill_(10)
                nn.init.uniform_(module.weight, 0.5, 1.5)
        return model.eval()

    def examples(self) -> list[Call]:
        torch.manual_seed(1)
        return [(self.inputs(2), dict(path)) for path in self.paths]

    def call(self, seed: int) -> Call:
        """Arguments of a call: another size, another path."""
        rng = random.Random(seed)
        torch.manual_seed(seed)
        return self.inputs(rng.choice((2, 3, 8))), dict(rng.choice(self.paths))


SUBJECTS: dict[str, Subject] = {
    "residual": Subject(Residual, lambda n: (torch.randn(n, 3, 16, 16),), by_hand=residual_by_hand),
    "block": Subject(Block, lambda n: (torch.randn(n, 5, 16),), by_hand=block_by_hand),
    "recurrent": Subject(Recurrent, lambda n: (torch.randn(n, 5, 6),)),
    "shared": Subject(Shared, lambda n: (torch.randint(0, 12, (n, 5)),), shares=True),
    "remembering": Subject(Remembering, lambda n: (torch.randn(n, 8),), is_stateful=True),
    "two paths": Subject(TwoPaths, lambda n: (torch.randn(n, 8),), ({"wide": True}, {"wide": False}), two_paths_by_hand),
}
