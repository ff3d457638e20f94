"""A small language model with the parts that transformers differ in."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class OwnNorm(nn.Module):
    """An RMSNorm with a forward of its own; with an offset as Gemma's, which multiplies with 1 + weight."""

    def __init__(self, width: int, offset: float = 0.0) -> None:
        super().__init__()
        self.weight, self.offset = nn.Parameter(torch.rand(width) + 0.5), offset

    def forward(self, x: Tensor) -> Tensor:
        normalized = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        return (self.weight + self.offset) * normalized.to(x.dtype)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, kv: int, bias: bool, fused: bool) -> None:
        super().__init__()
        self.heads, self.kv, self.size, self.fused = heads, kv, width // heads, fused
        if fused:
            self.qkv = nn.Linear(width, (heads + 2 * kv) * self.size, bias)
        else:
            self.q, self.k, self.v = (nn.Linear(width, n * self.size, bias) for n in (heads, kv, kv))
        self.o = nn.Linear(width, width, bias)

    def forward(self, x: Tensor) -> Tensor:
        sizes = [n * self.size for n in (self.heads, self.kv, self.kv)]
        parts = self.qkv(x).split(sizes, -1) if self.fused else (self.q(x), self.k(x), self.v(x))
        q, k, v = (t.unflatten(-1, (-1, self.size)).transpose(1, 2) for t in parts)
        k, v = (t.repeat_interleave(self.heads // self.kv, 1) for t in (k, v))
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.transpose(-1, -2) / self.size**0.5).masked_fill(torch.ones(q.shape[2], q.shape[2]).triu(1).bool(), -1e9)
            y = scores.softmax(-1) @ v
        return self.o(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, kv: int, bias: bool, fused: bool, gated: bool, norm) -> None:
        super().__init__()
        self.ln1, self.ln2, self.attn, self.gated = norm(), norm(), Attention(width, heads, kv, bias, fused), gated
        self.up, self.down = nn.Linear(width, 2 * width, bias), nn.Linear(2 * width, width, bias)
        self.gate = nn.Linear(width, 2 * width, bias) if gated else None

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        y = self.ln2(x)
        y = F.silu(self.gate(y)) * self.up(y) if self.gated else F.relu(self.up(y))
        return x + self.down(y)


class Transformer(nn.Module):
    """Tokens [batch, length] to scores [batch, length, 50]."""

    def __init__(self, width=32, heads=4, kv=4, layers=2, bias=True, fused=False, gated=False, rms=False, offset=0.0) -> None:
        torch.manual_seed(0)
        super().__init__()

        def norm() -> nn.Module:
            made = OwnNorm(width, offset) if rms else nn.LayerNorm(width)
            for parameter in made.parameters():
                nn.init.uniform_(parameter, 0.5, 2.0)
            return made

        self.tokens, self.positions = nn.Embedding(50, width), nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width, heads, kv, bias, fused, gated, norm) for _ in range(layers))
        self.norm, self.head = norm(), nn.Linear(width, 50, bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def tokens(seed: int, length: int, batch: int = 2) -> Tensor:
    return torch.randint(50, (batch, length), generator=torch.Generator().manual_seed(seed))
