"""Scaling what a module returns, and what a layer reads, channel by channel."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from qsim.operations.layers import LAYERS, Layer, by_channel
from qsim.runs.snapshot import rewriting


def bias_of(module: nn.Module) -> Tensor | None:
    """The parameter `bias` of a module; None where there is none, under that name or at all."""
    return dict(module.named_parameters(recurse=False)).get("bias")


def scale_output(module: nn.Module, factors: Tensor, offset: float = 0.0) -> None:
    """Have a layer, or a norm, return its channels times `factors`. A norm multiplies with ``weight + offset``."""
    factors = factors.to(cast(Tensor, module.weight))
    if isinstance(module, LAYERS):
        weight = module.weight.detach().contiguous()
        view = by_channel(weight, module)
        view *= factors.view(view.shape[0], -1, 1, 1)
    else:
        weight = (cast(Tensor, module.weight) + offset) * factors - offset
    with rewriting():
        cast(Tensor, module.weight).copy_(weight)
        if (bias := bias_of(module)) is not None:
            bias.mul_(factors)


def scale_input(layer: Layer, factors: Tensor) -> None:
    """Have a layer compute with its input channels times `factors`."""
    weight = layer.weight.detach().contiguous()
    view = by_channel(weight, layer)
    view *= factors.to(weight).view(view.shape[0], 1, -1, 1)
    with rewriting():
        layer.weight.copy_(weight)


def output_range(layer: Layer) -> Tensor:
    """The largest magnitude among the weights of each output channel."""
    return by_channel(layer.weight.detach().contiguous(), layer).abs().amax((2, 3)).flatten()


def input_range(layer: Layer) -> Tensor:
    """The largest magnitude among the weights of each input channel."""
    return by_channel(layer.weight.detach().contiguous(), layer).abs().amax((1, 3)).flatten()


def along(factors: Tensor, x: Tensor, axis: int) -> Tensor:
    """`factors` in a shape that multiplies `x` along its axis."""
    return factors.to(x).view([-1 if i == axis % x.dim() else 1 for i in range(x.dim())])


def rows(x: Tensor, axis: int) -> Tensor:
    """`x` as [channel, everything else]."""
    return x.detach().movedim(axis, 0).flatten(1) if x.dim() > 1 else x.detach().unsqueeze(1)
