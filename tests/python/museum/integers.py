"""BatchNorm and integer grids."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from models import Calls, Forward
from torch import Tensor, nn

from museum.exhibit import INT8, Case, exhibit, noise
from qsim.clinic.targets import TARGETS

X = noise(32, 3, 8, 8)


def network() -> nn.Sequential:
    """A depthwise-separable network with the statistics of its data."""
    torch.manual_seed(0)
    depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
    first = nn.Conv2d(3, 8, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6()
    model = nn.Sequential(*first, depthwise, nn.BatchNorm2d(8), nn.ReLU6(), nn.Conv2d(8, 4, 1))
    model[1].momentum = model[4].momentum = None
    with torch.no_grad():
        for _ in range(3):
            model.train()(X)
    return model.eval()


@exhibit("QS023", "4", INT8)
def folded_depthwise() -> Case:
    """MobileNet falls to 0.001 with one scale for a depthwise weight that a BatchNorm was folded into: ARM-software/armnn#344.

    https://github.com/ARM-software/armnn/issues/344; tensorflow/tensorflow#43882
    """
    model = network()
    with torch.no_grad():
        model[4].running_var[3] *= 1e-4
    return Case(model, [X], network(), None, {"target": dataclasses.replace(TARGETS[INT8], per_channel=False)})


@exhibit("QS030", "0", INT8)
def one_channel() -> Case:
    """MobileNet v3 in PyTorch: 76.3 in float32, 14.3 with one scale per tensor, 69.0 by channel: Edgecortix-Inc/pytorch_quantization#5.

    https://github.com/Edgecortix-Inc/pytorch_quantization/pull/5
    """
    model = nn.Sequential(nn.Conv2d(3, 8, 3))
    healthy = nn.Sequential(nn.Conv2d(3, 8, 3))
    with torch.no_grad():
        model[0].weight[5] *= 50
    return Case(model, [X], healthy, None, {"target": dataclasses.replace(TARGETS[INT8], per_channel=False)})


@exhibit("QS031", "0", INT8)
def bias_scale() -> Case:
    """A convolution with very small weights and biases of 5 and -4.5: the bias does not fit into int32: microsoft/onnxruntime#22020.

    https://github.com/microsoft/onnxruntime/pull/22020; microsoft/onnxruntime#21000
    """
    torch.manual_seed(0)
    model, healthy = nn.Sequential(nn.Conv2d(3, 2, 3)), nn.Sequential(nn.Conv2d(3, 2, 3))
    with torch.no_grad():
        model[0].weight *= 1e-7 / model[0].weight.abs().max()
        model[0].bias.copy_(torch.tensor([5.0, -4.5]))
    return Case(model, [X], healthy)


@exhibit("QS032", "cat", INT8)
def boxes_and_scores() -> Case:
    """A detector that is quantized with its boxes joined to its scores: PINTO0309/onnx2tf#644.

    https://github.com/PINTO0309/onnx2tf/issues/644; tensorflow/tensorflow#43541
    """

    def model(size: float) -> nn.Module:
        return Calls(lambda x: torch.cat([x.sigmoid() * size, x.sigmoid()], 1))

    return Case(model(640.0), [X], model(1.0))


def _decoder(change: Callable[[Tensor], Tensor]) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.Linear(64, 64)
    return Forward(lambda m, x: m.q(change(x)), q=layer)


@exhibit("QS036", "q", INT8)
def outlier_features() -> Case:
    """Llama 13B with activations of 8 bits falls from 0.545 to 0.026: channels of outliers in all tokens: mit-han-lab/smoothquant#42.

    https://github.com/mit-han-lab/smoothquant/issues/42; arXiv 2208.07339, section 4
    """
    large = torch.ones(64)
    large[[3, 40]] = 70.0
    return Case(_decoder(lambda x: x * large), [noise(4, 16, 64)], _decoder(lambda x: x))


@exhibit("QS037", "q", INT8)
def massive_activations() -> Case:
    """Llama 2 13B with one scale for a tensor has 29 % on MMLU, with one for each token 55 %: NVIDIA/TensorRT-LLM#1618.

    https://github.com/NVIDIA/TensorRT-LLM/issues/1618; arXiv 2402.17762, section 2: what its first tokens hold
    """

    def first_token(x: Tensor) -> Tensor:
        x = x.clone()
        x[:, 0, [7, 20]] = 2000.0
        return x

    return Case(_decoder(first_token), [noise(4, 128, 64)], _decoder(lambda x: x))


@exhibit("QS020", "1", INT8)
def batch_norm_in_training() -> Case:
    """DenseNet with BatchNorms that stay in training mode through quantization: 1.7 instead of 72.9 %: pytorch/pytorch#115715.

    https://github.com/pytorch/pytorch/pull/115715
    """
    model = network()
    model[1].train()
    return Case(model, [X], network())


@exhibit("QS021", "4", INT8)
def stale_statistics() -> Case:
    """Statistics that training never updated, because quantizers stood between them and BatchNorm: pytorch/executorch#21056.

    https://github.com/pytorch/executorch/pull/21056
    """
    model = network()
    with torch.no_grad():
        model[4].weight.fill_(1.5)
        model[4].running_mean.zero_()
        model[4].running_var.fill_(1.0)
    return Case(model, [X], network())


@exhibit("QS033", "", INT8)
def unlike_evaluation() -> Case:
    """Calibrated on images that are not normalized, validated on images that are: FasterAI-Labs/fasterai#80.

    https://github.com/FasterAI-Labs/fasterai/pull/80
    """
    torch.manual_seed(0)
    images = noise(32, 3, 8, 8).sigmoid()
    normalized = (images - 0.45) / 0.225
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    return Case(model, [images * 255], None, [normalized], {"evaluation": [normalized.flip(0)]})


@exhibit("QS005", "cat", INT8)
def sentinels() -> Case:
    """Inf scales from int8 calibration: NVIDIA/TensorRT#1480; here because a range is wider than float32: 3.4e38 at both ends.

    https://github.com/NVIDIA/TensorRT/issues/1480
    """

    def model(limit: float) -> nn.Module:
        def bounds(x: Tensor) -> Tensor:
            return torch.cat([x * 0 + limit, x * 0 - limit]).tanh()

        return Calls(bounds)

    return Case(model(3e38), [X], model(3.0))
