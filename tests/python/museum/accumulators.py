"""Sums inside an operation, where accumulators are as narrow as the tensors."""

from __future__ import annotations

import torch
from models import Calls
from torch import nn

from museum.exhibit import COREML, Case, exhibit, noise


@exhibit("QS011", "logsumexp", COREML)
def logsumexp() -> Case:
    """logsumexp over 32 channels drops to zero on the Neural Engine from x = 7.63: apple/coremltools#2690.

    https://github.com/apple/coremltools/issues/2690
    """
    return Case(Calls(lambda x: x.logsumexp(1)), [9 + 0.1 * noise(2, 32, 4, 4)], None, [noise(2, 32, 4, 4)])


@exhibit("QS011", "1", COREML)
def global_average() -> Case:
    """Global average pooling overflows in FP16 while it adds up: PaddlePaddle/Paddle-Lite#9763.

    https://github.com/PaddlePaddle/Paddle-Lite/pull/9763
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Identity(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)).eval()
    return Case(model, [20 + noise(1, 4, 64, 64)], None, [1 + noise(1, 4, 16, 16)])


@exhibit("QS011", "mean_2", COREML)
def squared_deviations() -> Case:
    """Squared deviations over 257 x 256 pixels overflow an FP16 accumulator: openvinotoolkit/openvino#35976.

    https://github.com/openvinotoolkit/openvino/pull/35976
    """

    def model(x: torch.Tensor) -> torch.Tensor:
        centred = x - x.mean((2, 3), keepdim=True)
        return centred / (centred.square().mean((2, 3), keepdim=True) + 1e-5).sqrt()

    return Case(Calls(model), [3 * noise(1, 1, 257, 256)], None, [noise(1, 1, 32, 32)])
