"""Models that are broken before anything is quantized."""

from __future__ import annotations

import torch
from models import Calls
from torch import Tensor, nn

from museum.exhibit import INT8, Case, exhibit, noise


@exhibit("QS001", "1.div", INT8)
def not_finite_range() -> Case:
    """AIMET's histogram: "range of [nan, inf] is not finite", because a layer returned them: qualcomm/aimet#3520.

    https://github.com/qualcomm/aimet/issues/3520
    """

    class Standardize(nn.Module):
        def __init__(self, epsilon: float) -> None:
            super().__init__()
            self.epsilon = epsilon

        def forward(self, x: Tensor) -> Tensor:
            return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + self.epsilon)

    torch.manual_seed(0)
    x = noise(32, 8)
    x[2] = 0
    layers = nn.Linear(8, 8, bias=False), nn.Linear(8, 4)
    make = [nn.Sequential(layers[0], Standardize(epsilon), layers[1]).eval() for epsilon in (0.0, 1e-2)]
    return Case(make[0], [x], make[1])


@exhibit("QS001", "exp", INT8)
def own_activation() -> Case:
    """A new activation function in YOLOv7-tiny ends calibration with "range of [0, nan] is not finite": NVIDIA-AI-IOT/yolo_deepstream#62.

    https://github.com/NVIDIA-AI-IOT/yolo_deepstream/issues/62
    """
    model = Calls(lambda x: x * (x.exp() / (1 + x.exp())))
    return Case(model, [100 * noise(32, 16)], Calls(lambda x: x * x.sigmoid()))
