"""Layers for BatchNorms that fold into no other: behind a concatenation, an addition, or a convolution that others read too.

In evaluation a BatchNorm multiplies a channel by a number and adds another. So does a depthwise convolution whose kernel has one element,
and that has an integer kernel where BatchNormalization runs in float: a weight that has its scale for itself is exact in 8 bits, and what
is added is int32, as other biases are.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from qsim.operations.layers import Layer

NAME = "norm"  # of the layer, in a Sequential in place of the BatchNorm
_CONVOLUTIONS: dict[int, type[nn.Conv1d] | type[nn.Conv2d]] = {3: nn.Conv1d, 4: nn.Conv2d}  # by the dimensions of what they read


def has_layer(dims: set[int]) -> bool:
    """Whether there is one for tensors of so many dimensions. Depthwise convolutions over volumes take longer than BatchNormalization."""
    return len(dims) == 1 and dims <= _CONVOLUTIONS.keys()


def unit_layer(bn: _BatchNorm, dims: int) -> Layer:
    """The layer before a BatchNorm is folded into it: it returns what it reads."""
    like = next(t for t in (bn.weight, bn.running_mean) if t is not None)
    channels = bn.num_features
    layer = _CONVOLUTIONS[dims](channels, channels, 1, groups=channels, bias=False, device=like.device, dtype=like.dtype)
    layer.weight.requires_grad_(bn.weight is None or bn.weight.requires_grad)
    return reset(layer)


def reset(layer: Layer) -> Layer:
    """`layer`, without what was folded into it."""
    layer.bias = None
    with torch.no_grad():
        layer.weight.fill_(1.0)
    return layer.train(False)


def before_children(bn: _BatchNorm, layer: nn.Module | None) -> nn.Module:
    """What stands in place of a BatchNorm: its layer, if it has one, and what it called behind the normalization."""
    modules = OrderedDict([*([] if layer is None else [(NAME, layer)]), *bn.named_children()])
    return (nn.Sequential(modules) if modules else nn.Identity()).train(bn.training)
