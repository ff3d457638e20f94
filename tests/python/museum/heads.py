"""Exponentials: in heads of detectors, and in activations written out."""

from __future__ import annotations

import torch
from models import Calls
from torch import Tensor, nn

from museum.exhibit import Case, exhibit, noise


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return torch.cat([y[:, :2].sigmoid(), torch.exp(y[:, 2:4]) * 32, y[:, 4:].sigmoid()], 1)


@exhibit("QS010", "exp")
def box_sizes() -> Case:
    """Box sizes that are decoded with exp overflow: Megvii-BaseDetection/YOLOX#1658.

    https://github.com/Megvii-BaseDetection/YOLOX/issues/1658
    """
    torch.manual_seed(0)
    return Case(Head().eval(), [30 * noise(2, 4, 4, 4)], None, [noise(2, 4, 4, 4)])


@exhibit("QS010", "exp")
def softplus() -> Case:
    """log(1 + exp(x)) breaks in float16 from x = 11: apple/coremltools#2687.

    https://github.com/apple/coremltools/issues/2687
    """
    return Case(Calls(lambda x: (1 + x.exp()).log()), [5 * noise(4, 16)], None, [noise(4, 16)])


@exhibit("QS010", "exp")
def softmax_without_shift() -> Case:
    """logcumsumexp is converted without subtracting the largest, and overflows from 11.09: apple/coremltools#2729.

    https://github.com/apple/coremltools/issues/2729
    """
    return Case(Calls(lambda x: x.exp().cumsum(-1).log()), [3 * noise(4, 8) + 8], None, [noise(4, 8)])
