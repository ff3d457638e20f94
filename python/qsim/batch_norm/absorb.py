"""The arithmetic of folding: a BatchNorm's numbers in the weight and bias of a layer (docs/numerics.md, section 8), and the numbers for
which that is refused. What is refused for other reasons: `qsim.batch_norm.foldable`."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from qsim.operations.layers import Layer, by_channel
from qsim.runs.snapshot import rewriting

# From here on the rounding of a float32 input, 2^-24 of it, grows to the size of the normalized signal: the result is noise.
_LARGEST_FACTOR = 2.0**23


class NotFoldable(Exception):
    """Carries the reason: one sentence that names the modules."""


def absorb(layer: Layer, bn: _BatchNorm, *, before: bool, names: tuple[str, str]) -> Tensor:
    """Change weight and bias of `layer` in place, so that alone it computes what it did with `bn` right before or behind it.

    Parameters
    ----------
    layer : Layer
        Known to compute with its weight and bias as torch's own do (`find_folds`).
    bn : BatchNorm
        Not changed.
    before : bool
        It runs before the layer, not behind it.
    names : tuple of str
        Of the layer and of the BatchNorm, for the reason.

    Returns
    -------
    Tensor
        What each element of the weight was multiplied by, in float64 on the CPU.

    Raises
    ------
    NotFoldable
        The statistics mean nothing, or the product is not finite in the layer's type; nothing is changed.
    """
    layer_name, bn_name = names
    g, mean, beta = normalization(bn_name, bn)
    weight, bias = (_before if before else _after)(layer, g, mean, beta)
    new = {"weight": weight.to(layer.weight.dtype), "bias": bias.to(layer.weight.dtype)}  # the one rounding
    for name, t in new.items():
        if not bool(t.isfinite().all()):
            raise NotFoldable(f"the {name} of '{layer_name}' with '{bn_name}' folded into it would not be finite in {t.dtype}")
    with rewriting():
        layer.weight.copy_(new["weight"])
        if layer.bias is None:
            layer.bias = nn.Parameter(new["bias"].to(layer.weight.device), requires_grad=layer.weight.requires_grad)
        else:
            layer.bias.copy_(new["bias"])
    return _scaled(torch.ones_like(weight), layer, g, before)


def normalization(name: str, bn: _BatchNorm) -> tuple[Tensor, Tensor, Tensor]:
    """`g = gamma / sqrt(var + eps)`, mean and beta of a BatchNorm in float64; raises NotFoldable where they mean nothing."""
    if cast(Tensor, bn.running_mean).is_meta:
        raise NotFoldable(f"'{name}' is on the meta device: its statistics have no values")
    mean, var = _exact(cast(Tensor, bn.running_mean)), _exact(cast(Tensor, bn.running_var))
    gamma = torch.ones_like(mean) if bn.weight is None else _exact(bn.weight)
    beta = torch.zeros_like(mean) if bn.bias is None else _exact(bn.bias)
    for what, t in (("running_mean", mean), ("running_var", var), ("weight", gamma), ("bias", beta)):
        _refuse(~t.isfinite(), name, f"its {what} is not finite")
    _refuse(var < 0, name, "its running_var is negative")
    _refuse(var + bn.eps == 0, name, "its running_var and eps are both zero")
    g = gamma / (var + bn.eps).sqrt()
    _refuse(g.abs() > _LARGEST_FACTOR, name, f"it would multiply by more than {_LARGEST_FACTOR:.3g} (weight / sqrt(running_var + eps))")
    return g, mean, beta


def _refuse(bad: Tensor, name: str, why: str) -> None:
    if bool(bad.any()):
        channels = bad.nonzero().flatten().tolist()
        raise NotFoldable(f"'{name}' has degenerate statistics: {why} in {len(channels)} of {bad.numel()} channels, first in {channels[0]}")


def _after(layer: Layer, g: Tensor, mean: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Weight and bias of `layer` followed by the normalization: `W' = W g` by output channel, `b' = beta + (b - mean) g`."""
    return _scaled(_exact(layer.weight), layer, g, before=False), beta + (_bias(layer) - mean) * g


def _before(layer: Layer, g: Tensor, mean: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Weight and bias of `layer` preceded by the normalization: `W' = W g` by input channel, `b' = b + W (beta - mean g)`."""
    weight, bias = _exact(layer.weight), _bias(layer)
    view = by_channel(weight, layer)
    bias += (view * (beta - mean * g).view(view.shape[0], 1, -1, 1)).sum((2, 3)).flatten()
    return _scaled(weight, layer, g, before=True), bias


def _scaled(weight: Tensor, layer: Layer, g: Tensor, before: bool) -> Tensor:
    """`weight`, multiplied in place by `g` along its output channels, or its input channels."""
    view = by_channel(weight, layer)
    view *= g.view(view.shape[0], 1, -1, 1) if before else g.view(view.shape[0], -1, 1, 1)
    return weight


def _bias(layer: Layer) -> Tensor:
    channels = layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
    return torch.zeros(channels, dtype=torch.float64) if layer.bias is None else _exact(layer.bias)


def _exact(t: Tensor) -> Tensor:
    """A copy in float64, on the CPU: not every device has that type."""
    return t.detach().to("cpu", torch.float64, copy=True, memory_format=torch.contiguous_format)
