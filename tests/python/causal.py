"""A small causal language model whose cache goes in and out as tensors, and the tokens that it, a simulation or a file generates."""

from pathlib import Path

import onnxruntime
import torch
from torch import Tensor, nn
from torch.export import Dim

import qsim

HEADS, LAYERS = 4, 2


class Causal(nn.Module):
    """Two layers with a cache of `torch.cat`; the head is tied to the table."""

    def __init__(self, width: int = 64, heads: int = HEADS, layers: int = LAYERS) -> None:
        super().__init__()
        self.table, self.heads = nn.Embedding(50, width), heads
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 50, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor, *cache: Tensor) -> tuple[Tensor, ...]:
        x, caches = self.table(ids), []
        for i, (qkv, out) in enumerate(zip(self.qkv, self.out, strict=True)):
            q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in qkv(self.norm(x)).chunk(3, -1))
            k, v = (torch.cat([old, new], 2) for old, new in zip(cache[2 * i : 2 * i + 2], (k, v), strict=True))
            caches += [k, v]
            behind = torch.arange(k.shape[2]) > torch.arange(q.shape[2])[:, None] + (k.shape[2] - q.shape[2])
            scores = (q @ k.mT / 4).masked_fill(behind, -1e9)
            x = x + out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return (self.head(self.norm(x)), *caches)

    def call(self, length: int, past: int) -> tuple[Tensor, ...]:
        """Tokens, and a cache of so many others."""
        return torch.randint(50, (1, length)), *(torch.randn(1, HEADS, past, 16) for _ in range(2 * LAYERS))


def exported_tokens(sim: qsim.QuantSim, path: Path) -> tuple[qsim.ExportReport, list[int]]:
    """A simulated `Causal` in a file for ONNX Runtime that takes any number of tokens and any cache, and what it generates."""
    shapes = ({1: Dim.DYNAMIC}, ({2: Dim.DYNAMIC},) * 2 * LAYERS)
    report = sim.export(path, target="onnxruntime", dynamic_shapes=shapes)
    options = onnxruntime.SessionOptions()
    for entry in report.session_options.items():
        options.add_session_config_entry(*entry)
    session = onnxruntime.InferenceSession(str(report.path), options, providers=["CPUExecutionProvider"])

    def step(*inputs: Tensor) -> list[Tensor]:
        feed = {end.name: t.numpy() for end, t in zip(session.get_inputs(), inputs, strict=True)}
        return [torch.from_numpy(t) for t in session.run(None, feed)]

    return report, generated(step)


def generated(step, count: int = 24) -> list[int]:
    """Greedy tokens behind seven, one call of `step` each."""
    ids, cache, tokens = torch.arange(7)[None], [torch.zeros(1, HEADS, 0, 16)] * 2 * LAYERS, []
    for _ in range(count):
        with torch.no_grad():
            logits, *cache = step(ids, *cache)
        tokens.append(int(logits[0, -1].argmax()))
        ids = torch.tensor([tokens[-1:]])
    return tokens
