"""What modules with a forward of their own compute, tried on random numbers: folding asks for what an operation does, not for its class."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


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
    with torch.no_grad(), torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
        for training in (False, True):
            x = torch.randn(4, bn.num_features, *[8] * (dims - 2), device=device, dtype=dtype)
            try:
                torch.manual_seed(0)
                found = copy.deepcopy(bn).train(training)(x.clone())
                torch.manual_seed(0)
                expected = _normalized(copy.deepcopy(bn).train(training), x)
            except Exception:
                return False
            if not isinstance(found, Tensor) or not torch.equal(found, expected):
                return False
    return True


def _normalized(bn: _BatchNorm, x: Tensor) -> Tensor:
    """What torch's own BatchNorm computes, then the module's children."""
    x = F.batch_norm(x, bn.running_mean, bn.running_var, bn.weight, bn.bias, bn.training, bn.momentum or 0.0, bn.eps)
    for child in bn.children():
        x = child(x)
    return x
