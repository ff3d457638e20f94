"""Frozen BatchNorms that are none by class: modules with the four tensors of one, all of them buffers, as detectors have in their backbones
(`torchvision.ops.FrozenBatchNorm2d`, and those of DETR and its kin). They fold as others do once they are BatchNorms."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qsim.batch_norm.own_forward import is_torchs_own
from qsim.runs.offloaded import has_hooks

_TENSORS = ("weight", "bias", "running_mean", "running_var")
_EPS = 1e-5  # where a module does not tell its own
_TOLERANCE = 1e-9  # in float64


class FrozenBatchNorm(nn.BatchNorm2d):
    """Normalizes by its running statistics in training mode too."""

    def train(self, mode: bool = True) -> FrozenBatchNorm:
        """As of any module, for the others' sake: it stays in eval mode."""
        super().train(False)
        return self


def as_batch_norms(model: nn.Module, wanted: Callable[[str], bool] = lambda path: True) -> None:
    """Put BatchNorms in the places of frozen ones that are none by class and compute the same, which is tried. They hold the same
    tensors by the same names."""
    made: dict[nn.Module, nn.Module] = {}
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if path and wanted(path) and _is_frozen(module):
            parent, _, name = path.rpartition(".")
            if module not in made:
                made[module] = _batch_norm(module)
            setattr(model.get_submodule(parent), name, made[module])


def _is_frozen(module: nn.Module) -> bool:
    if next(module.children(), None) is not None or next(module.parameters(), None) is not None:
        return False
    held = dict(module.named_buffers())
    if set(held) != set(_TENSORS) or is_torchs_own(module, "forward"):
        return False
    shape = held["weight"].shape
    if len(shape) != 1 or any(t.shape != shape or t.is_meta or not t.is_floating_point() for t in held.values()):
        return False
    if has_hooks(module):
        return False
    x = torch.randn(2, len(held["weight"]), 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        try:
            tried = copy.deepcopy(module).to("cpu", torch.float64)
            found: Any = tried(x.clone())
        except Exception:  # whatever else it is
            return False
        weight, bias, mean, var = (held[name].to("cpu", torch.float64) for name in _TENSORS)
        expected = F.batch_norm(x, mean, var, weight, bias, eps=_eps(module))
    return isinstance(found, Tensor) and found.shape == x.shape and torch.allclose(found, expected, rtol=_TOLERANCE, atol=_TOLERANCE)


def _eps(module: nn.Module) -> float:
    return float(getattr(module, "eps", _EPS))


def _batch_norm(module: nn.Module) -> FrozenBatchNorm:
    held = dict(module.named_buffers())
    # Not tracking: states have no num_batches_tracked.
    made = FrozenBatchNorm(len(held["weight"]), _eps(module), track_running_stats=False, device="meta")
    made.weight, made.bias = (nn.Parameter(held[name], requires_grad=False) for name in _TENSORS[:2])
    made.running_mean, made.running_var = held["running_mean"], held["running_var"]
    return made.train(module.training)
