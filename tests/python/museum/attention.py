"""Attention: scores that overflow, and masks that the format does not have."""

from __future__ import annotations

import torch
from models import Calls
from torch import Tensor, nn

from museum.exhibit import COREML, Case, exhibit, noise

LOWEST = torch.finfo(torch.float32).min


@exhibit("QS010", "matmul")
def attention_scores() -> Case:
    """Queries of 576 and keys of 383 give scores of 784449, and the softmax is NaN: pytorch/pytorch#119131.

    https://github.com/pytorch/pytorch/issues/119131
    """

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.transpose(-2, -1) / 4).softmax(-1) @ v

    q, k, v = noise(1, 6, 16), noise(1, 6, 16, seed=1), noise(1, 6, 16, seed=2)
    q, k = q / q.abs().max() * 576, k / k.abs().max() * 383
    return Case(Calls(model), [(q, k, v)], None, [(q / 576, k / 383, v)])


class Attention(nn.Module):
    """As in BERT, with one of the ways to mask what is padding."""

    def __init__(self, mask) -> None:
        super().__init__()
        self.query, self.key, self.value, self.mask = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16), mask

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(-1, -2) / 4
        return self.mask(scores, attention_mask).softmax(-1) @ self.value(x)


def padded() -> list[tuple[Tensor, Tensor]]:
    mask = torch.ones(2, 1, 6)
    mask[1, :, 4:] = 0
    return [(noise(2, 6, 16), mask)]


def padded_rows() -> list[tuple[Tensor, Tensor]]:
    """Rows of padding are masked throughout, as those of queries are."""
    rows = torch.ones(2, 6, 6)
    rows[1, 4:], rows[1, :, 4:] = 0, 0
    return [(padded()[0][0], rows)]


def attention(mask) -> nn.Module:
    torch.manual_seed(0)
    return Attention(mask).eval()


@exhibit("QS012", "mul", COREML)
def extended_mask() -> Case:
    """A mask of finfo(float32).min makes decoders NaN in Core ML float16, without a word: apple/coremltools#2669.

    https://github.com/apple/coremltools/pull/2669. The mask is (1 - mask) * -3.4e38: 0 times -Inf where nothing is masked.
    """
    model = attention(lambda scores, mask: scores + (1.0 - mask) * LOWEST)
    return Case(model, padded(), attention(lambda scores, mask: scores + (1.0 - mask) * -1e4))


@exhibit("QS012", "masked_fill")
def filled_row() -> Case:
    """masked_fill with -1e10 is -Inf in half precision, and a padded row NaN: bentrevett/pytorch-seq2seq#191.

    https://github.com/bentrevett/pytorch-seq2seq/issues/191
    """
    model = attention(lambda scores, mask: scores.masked_fill(mask == 0, -1e10))
    return Case(model, padded_rows(), attention(lambda scores, mask: scores.masked_fill(mask == 0, -1e4)))


@exhibit("QS012", "add")
def selected_bias() -> Case:
    """Attention with a bias of -1e10 chosen by a mask gives NaN in float16: google/flax#982.

    https://github.com/google/flax/issues/982
    """

    def chosen(fill: float):
        return lambda scores, mask: scores + torch.where(mask > 0, 0.0, fill)

    return Case(attention(chosen(-1e10)), padded_rows(), attention(chosen(-1e4)), padded())


@exhibit("QS012", "mul_2")
def two_masks() -> Case:
    """BERT4Keras' Roberta in TensorRT FP16: a mask of -999999995904 is out of bounds: NVIDIA/TensorRT#2466.

    https://github.com/NVIDIA/TensorRT/issues/2466
    """

    def large(value: float):
        return lambda scores, mask: scores * mask - (1.0 - mask) * value

    return Case(attention(large(999999995904.0)), padded(), attention(large(1e4)))


@exhibit("QS010", "matmul_2")
def linear_attention() -> Case:
    """EfficientViT's linear attention is NaN in half precision at its products and its division: mit-han-lab/efficientvit#15.

    https://github.com/mit-han-lab/efficientvit/issues/15
    """

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = q.relu(), k.relu()
        v = torch.cat([v, torch.ones_like(v[..., :1])], -1)
        out = q @ (k.transpose(-1, -2) @ v)
        return out[..., :-1] / (out[..., -1:] + 1e-3)

    q, k, v = (noise(1, 256, 8, seed=i) for i in range(3))
    return Case(Calls(model), [(20 * q, 20 * k, 4 * v)], None, [(q, k, v)])


@exhibit("QS010", "exp")
def random_features() -> Case:
    """Performer's softmax kernel needs a range that FP16 has not: facebookresearch/xformers#96.

    https://github.com/facebookresearch/xformers/issues/96
    """

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = q.softmax(-1), (k - 0.5 * (k * k).sum(-1, keepdim=True) / 64).exp()
        context = k.transpose(-1, -2) @ v
        return (q @ context) / (q @ k.sum(-2).unsqueeze(-1))

    q, k, v = (noise(1, 16, 8, seed=i) for i in range(3))
    return Case(Calls(model), [(q, 7 * k, v)], None, [(q, k, v)])
