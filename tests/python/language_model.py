"""A small causal language model as Hugging Face writes them: a config, a cache of `torch.cat`, a loss if there are labels, `generate`."""

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import nn

TOKENS = torch.randint(32, (2, 7), generator=torch.Generator().manual_seed(1))


@dataclass
class ModelConfig:
    use_cache: bool = True
    model_type: str = "toy"

    def to_dict(self):
        return asdict(self)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.v_proj, self.o_proj = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.heads = heads

    def forward(self, x, cache):
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        if cache is not None:
            k, v = (torch.cat([old, new], -2) for old, new in zip(cache, (k, v), strict=True))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[-2] > 1)
        return self.o_proj(out.transpose(1, 2).flatten(2)), (k, v)


class LanguageModel(nn.Module):
    """``model(input_ids)``: a dict of logits and cache, and of the loss if there are labels."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.config = ModelConfig()
        self.embed, self.attention = nn.Embedding(32, 16), Attention(16, 2)
        self.norm, self.lm_head = nn.LayerNorm(16), nn.Linear(16, 32, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, input_ids, cache=None, labels=None):
        x = self.embed(input_ids)
        y, cache = self.attention(self.norm(x), cache)
        out = {"logits": self.lm_head(x + y)}
        if labels is not None:
            out["loss"] = F.cross_entropy(out["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {**out, "cache": cache} if self.config.use_cache else out

    @torch.no_grad()
    def generate(self, input_ids, count):
        logits, cache, token = [], None, input_ids
        for _ in range(count):
            out = self(token, cache=cache) if cache is not None else self(token)
            logits.append(out["logits"][:, -1])
            token, cache = logits[-1].argmax(-1, keepdim=True), out["cache"]
        return torch.stack(logits, 1)
