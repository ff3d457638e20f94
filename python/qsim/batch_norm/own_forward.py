"""What modules with a forward of their own compute, tried on random numbers: folding asks for what an operation does, not for its class."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from qsim.batch_norm.absorb import NotFoldable, absorb
from qsim.operations.layers import Layer
from qsim.runs.random_numbers import random_numbers_unchanged, seed_random_numbers


def is_torchs_own(module: nn.Module, method: str) -> bool:
    """Whether a module's class has this method from `torch.nn`, or not at all."""
    return getattr(type(module), method, nn.Module.forward).__module__.startswith("torch.nn.")


def is_followed_by_children(bn: _BatchNorm, dims: int) -> bool:
    """Whether a BatchNorm with a forward of its own normalizes and then calls its children, one after the other, as timm's do.

    Tried, in both modes, on random numbers with `dims` dimensions: the results are the same to the bit.
    """
    if dims < 2 or any(t.is_meta for t in bn.state_dict().values()) or bn.running_mean is None:
        return False
    device, dtype = bn.running_mean.device, bn.running_mean.dtype
    with torch.no_grad(), random_numbers_unchanged():
        for training in (False, True):
            x = torch.randn(4, bn.num_features, *[8] * (dims - 2), device=device, dtype=dtype)
            try:
                seed_random_numbers(0)
                found = copy.deepcopy(bn).train(training)(x.clone())
                seed_random_numbers(0)
                expected = _normalized(copy.deepcopy(bn).train(training), x)
            except Exception:
                return False
            if not isinstance(found, Tensor) or not torch.equal(found, expected):
                return False
    return True


def is_a_product(layer: Layer, *, before: bool) -> bool:
    """Whether a layer with a forward of its own computes what it did with a BatchNorm folded into its weight and bias: on a copy, in
    float64, with statistics and inputs drawn at random. timm's Conv2dSame, which pads by itself, does."""
    kernel = [] if isinstance(layer, nn.Linear) else [d * (k - 1) + 1 for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
    inputs, outputs = (layer.in_features, layer.out_features) if isinstance(layer, nn.Linear) else (layer.in_channels, layer.out_channels)
    bn = getattr(nn, f"BatchNorm{max(len(kernel), 1)}d")(inputs if before else outputs)
    with torch.no_grad(), random_numbers_unchanged():
        for t in (bn.weight, bn.bias, bn.running_mean, bn.running_var):
            t.uniform_(0.5, 2.0)
        x = torch.randn(2, inputs, *(2 * size + 3 for size in kernel), dtype=torch.float64)
        bn, layer = bn.to("cpu", torch.float64).eval(), copy.deepcopy(layer).to("cpu", torch.float64).eval()
        first, second = (bn, layer) if before else (layer, bn)
        try:
            expected = second(first(x))
            absorb(layer, bn, before=before, names=("layer", "bn"))
            return torch.allclose(layer(x), expected, rtol=1e-9, atol=1e-9)
        except NotFoldable:  # for its numbers, which whoever folds it names
            return True
        except (RuntimeError, TypeError, ValueError):
            return False


def _normalized(bn: _BatchNorm, x: Tensor) -> Tensor:
    """What torch's own BatchNorm computes, then the module's children."""
    x = F.batch_norm(x, bn.running_mean, bn.running_var, bn.weight, bn.bias, bn.training, bn.momentum or 0.0, bn.eps)
    for child in bn.children():
        x = child(x)
    return x
