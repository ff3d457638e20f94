"""Normalizations written out: the squares overflow, and the output is small, finite and wrong."""

from __future__ import annotations

import torch
from models import Calls
from torch import Tensor, nn

from museum.exhibit import Case, exhibit, noise


class LayerNorm(nn.Module):
    def __init__(self, dim: int, along: int = -1) -> None:
        super().__init__()
        self.weight, self.bias, self.along = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim)), along

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(self.along, keepdim=True)
        variance = centred.pow(2).mean(self.along, keepdim=True)
        return centred / torch.sqrt(variance + 1e-5) * self.weight + self.bias


@exhibit("QS010", "1.pow")
def decomposed_layer_norm() -> Case:
    """BERT in TensorRT FP16 differs from float32 where LayerNorm is Pow and ReduceMean: NVIDIA/TensorRT#2564.

    https://github.com/NVIDIA/TensorRT/issues/2564. Activations of 400: 160000 as a square, and nothing is NaN.
    """
    torch.manual_seed(0)
    return Case(nn.Sequential(nn.Linear(16, 32), LayerNorm(32)).eval(), [700 * noise(4, 16)], None, [noise(4, 16)])


class ChannelNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        u = x.mean(1, keepdim=True)
        s = (x - u).square().mean(1, keepdim=True)
        x = (x - u) / torch.sqrt(s + 1e-6)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


@exhibit("QS010", "1.square")
def channels_first_norm() -> Case:
    """The LayerNorm of ConvNeXt's last stage overflows in FP16, and all images get the same class: facebookresearch/ConvNeXt#80.

    https://github.com/facebookresearch/ConvNeXt/issues/80
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 2, stride=2), ChannelNorm(8), nn.AdaptiveAvgPool2d(1)).eval()
    return Case(model, [900 * noise(2, 3, 8, 8)], None, [noise(2, 3, 8, 8)])


class RMSNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


@exhibit("QS010", "norm.pow")
def rms_norm() -> Case:
    """nn.RMSNorm in float16 gives wrong answers in Llama, because the squares overflow: pytorch/pytorch#133085.

    https://github.com/pytorch/pytorch/pull/133085. Inf under the root, 0 behind it: zeros, no NaN.
    """

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = RMSNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(nn.functional.silu(self.up(self.norm(x))))

    torch.manual_seed(0)
    return Case(Block().eval(), [400 * noise(4, 16)], None, [noise(4, 16)])


@exhibit("QS010", "var")
def instance_norm() -> Case:
    """The variance of InstanceNorm overflows in float16, and the channel collapses to zero: ml-explore/mlx#4228.

    https://github.com/ml-explore/mlx/issues/4228; the same in microsoft/onnxruntime#10079
    """

    def model(x: Tensor) -> Tensor:
        return (x - x.mean((2, 3), keepdim=True)) / (x.var((2, 3), unbiased=False, keepdim=True) + 1e-5).sqrt()

    board = torch.where((torch.arange(8)[:, None] + torch.arange(8)) % 2 == 0, 512.0, -512.0)
    data = board + noise(1, 2, 8, 8)
    return Case(Calls(model), [data], None, [data / 512])


@exhibit("QS010", "mul")
def group_norm() -> Case:
    """Squares in GroupNorm overflow in FP16 where convolutions return more than 256: neuroneural/brainchop-cli#56.

    https://github.com/neuroneural/brainchop-cli/pull/56
    """

    def model(x: Tensor) -> Tensor:
        groups = x.reshape(x.shape[0], 2, -1)
        groups = groups - groups.mean(-1, keepdim=True)
        variance = (groups * groups).mean(-1, keepdim=True)
        return (groups * (variance + 1e-5).rsqrt()).reshape(x.shape)

    return Case(Calls(model), [375 * noise(2, 8, 4, 4)], None, [noise(2, 8, 4, 4)])


@exhibit("QS010", "pow")
def l2_normalization() -> Case:
    """Results of a speech model explode to Inf in TensorRT FP16, at its l2_normalize: NVIDIA/TensorRT#1954.

    https://github.com/NVIDIA/TensorRT/issues/1954
    """

    def model(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True).clamp(min=1e-4))

    return Case(Calls(model), [300 * noise(4, 32)], None, [noise(4, 32)])


@exhibit("QS010", "linalg_vector_norm")
def norm_of_large_activations() -> Case:
    """OpenELM in Core ML float16: norms of activations reach hundreds of thousands: huggingface/swift-transformers#95.

    https://github.com/huggingface/swift-transformers/issues/95
    """

    def model(x: Tensor) -> Tensor:
        return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp(min=1e-3)

    return Case(Calls(model), [30000 * noise(4, 64).tanh()], None, [noise(4, 64)])


@exhibit("QS010", "wo")
def feed_forward() -> Case:
    """T5's feed-forward layer gives 66246 where FP16 ends at 65504, and the loss is NaN: huggingface/transformers#5651.

    https://github.com/huggingface/transformers/issues/5651
    """

    class FeedForward(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wi, self.wo = nn.Linear(16, 64, bias=False), nn.Linear(64, 16, bias=False)
            self.norm = nn.LayerNorm(16)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x + self.wo(self.wi(x).relu()))

    torch.manual_seed(0)
    model, x = FeedForward().eval(), noise(4, 16)
    with torch.no_grad():
        model.wo.weight *= 66246.39 * 4 / model.wo(model.wi(40 * x).relu()).abs().max()
    return Case(model, [40 * x], None, [x])
