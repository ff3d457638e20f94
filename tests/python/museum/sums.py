"""Sums that grow beyond float16 although what is made of them is small."""

from __future__ import annotations

import torch
from models import Calls
from torch import Tensor

from museum.exhibit import Case, exhibit, noise


@exhibit("QS010", "cumsum_2")
def integral_image() -> Case:
    """NAFNet with its test-time local pooling is NaN in TensorRT FP16: NVIDIA/TensorRT#4338.

    https://github.com/NVIDIA/TensorRT/issues/4338. Local means are differences of an integral image, whose corner is the sum of it all.
    """

    def pooled(x: Tensor) -> Tensor:
        s = x.cumsum(-1).cumsum(-2)
        return (s[..., 8:, 8:] - s[..., :-8, 8:] - s[..., 8:, :-8] + s[..., :-8, :-8]) / 64

    return Case(Calls(pooled), [40 + noise(1, 2, 64, 64)], None, [noise(1, 2, 24, 24)])


@exhibit("QS010", "sum")
def count_of_ones() -> Case:
    """A sum of 65536 ones is Inf in FP16: tracel-ai/burn#4109.

    https://github.com/tracel-ai/burn/issues/4109. Here as the count that a masked mean divides by.
    """

    def model(x: Tensor, mask: Tensor) -> Tensor:
        return x * mask / mask.sum().sqrt()

    return Case(Calls(model), [(noise(256, 256), torch.ones(256, 256))], None, [(noise(64, 64), torch.ones(64, 64))])


@exhibit("QS010", "mul_2")
def class_offsets() -> Case:
    """Boxes moved apart by class times the largest coordinate leave float16, and NMS keeps duplicates: MultimediaTechLab/YOLO#234.

    https://github.com/MultimediaTechLab/YOLO/pull/234
    """

    def model(boxes: Tensor, labels: Tensor) -> Tensor:
        shifted = boxes.sigmoid() * 3500 + labels * 3501
        corners = shifted[:, None] - shifted[None]
        return corners.abs().clamp(max=100)

    boxes, labels = noise(6, 4), torch.tensor([0.0, 1, 2, 2, 18, 19])[:, None]
    return Case(Calls(model), [(boxes, labels)], Calls(lambda b, n: ((b.sigmoid() + n)[:, None] - (b.sigmoid() + n)[None]).abs()))


@exhibit("QS016", "cos")
def rotary_positions() -> Case:
    """Angles of rotary embeddings are wrong in reduced precision: their rounding is as long as a period: EleutherAI/gpt-neox#1003.

    https://github.com/EleutherAI/gpt-neox/issues/1003
    """
    frequencies = 10000.0 ** (-torch.arange(0, 16, 2) / 16)

    def model(x: Tensor, positions: Tensor) -> Tensor:
        angles = torch.einsum("i,j->ij", positions, frequencies)
        return x * angles.cos()

    x = noise(8, 8)
    late, early = torch.arange(8.0) * 251 + 1857, torch.arange(8.0)
    return Case(Calls(model), [(x, late)], None, [(x, early)])
