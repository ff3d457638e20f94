"""Notices hooks and wrappers that were put between a layer and the BatchNorm folded into it: what they see is normalized already."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from qsim.batch_norm.foldable import Fold
from qsim.folders import QSIM, TORCH
from qsim.warning import warn

_LEFT = "_forward_hooks", "_backward_hooks", "_backward_pre_hooks"  # of the module that comes first: they see what it returns
_ENTERED = "_forward_pre_hooks", "_backward_hooks"  # of the one behind it: they see what it takes


class FoldedHooks:
    """Looks, in each call of a simulation, at the modules whose results are other than the float model's.

    Parameters
    ----------
    model : nn.Module
        After the folds.
    folds : iterable of (Fold, BatchNorm)
    """

    def __init__(self, model: nn.Module, folds: Iterable[tuple[Fold, _BatchNorm]]) -> None:
        self._model = model
        self.pairs = [((fold.layer, fold.batch_norm), bn, fold.before) for fold, bn in folds if not fold.alone]
        self._hooked: list[tuple[dict[int, Any], str, Fold]] = []  # hooks of modules, with the path of the module
        self._held: list[tuple[nn.Module, str, nn.Module, str, Fold]] = []  # modules, each after what holds it and by what name
        for fold, _ in folds:
            if not fold.alone:
                first, then = (fold.batch_norm, fold.layer) if fold.before else (fold.layer, fold.batch_norm)
                for path, names in ((first, _LEFT), (then, _ENTERED)):
                    module, (above, _, own) = model.get_submodule(path), path.rpartition(".")
                    self._hooked += [(getattr(module, name), path, fold) for name in names]
                    self._held.append((model.get_submodule(above), own, module, path, fold))
        self._told: set[str] = set()

    def look(self) -> None:
        """Warn, once for each module, of hooks of the user's, and of what was put around it."""
        if torch.compiler.is_compiling():
            return
        for hooks, path, fold in self._hooked:
            if hooks and path not in self._told and any(map(_is_anothers, hooks.values())):
                self._warn("a hook on", path, fold)
                if path == fold.layer and not fold.before:
                    self._model.get_submodule(fold.batch_norm).register_forward_hook(_as_a_new_tensor)
        for holder, own, module, path, fold in self._held:
            now = vars(holder)["_modules"].get(own)  # in each call of the simulation: nn.Module's __getattr__ takes five times as long
            if now is not module and path not in self._told and _wraps(now, module):
                self._warn(f"the {type(now).__name__} around", path, fold)

    def _warn(self, who: str, path: str, fold: Fold) -> None:
        self._told.add(path)
        what = (
            f"has the normalization of '{fold.batch_norm}' still to come"
            if fold.before
            else f"is what '{fold.layer}' computes with '{fold.batch_norm}' folded into it, normalized already"
        )
        warn(
            f"QuantSim: {who} '{path}' sees other tensors than in the float model: what it gets {what}, and what it returns is used as "
            "that. Put it there before the model is simulated, or use Config(batch_norm='keep')"
        )


def _as_a_new_tensor(_: nn.Module, args: Any, out: Tensor) -> Tensor | None:
    """What a full backward hook hands on is a view that torch lets nobody write to, as rectifiers and additions behind a BatchNorm do: they
    wrote into a tensor of its own."""
    return out.clone() if out.requires_grad and out._is_view() else None


def _wraps(now: Any, module: nn.Module) -> bool:
    """Whether what stands in a module's place is somebody's that calls it; torch's own, of compiled or sharded modules, change nothing."""
    return isinstance(now, nn.Module) and not type(now).__module__.startswith("torch.") and any(each is module for each in now.modules())


def _is_anothers(hook: Any) -> bool:
    """Whether it is neither the library's own nor torch's, as those of sharded modules are."""
    called = hook if hasattr(hook, "__code__") else type(hook).__call__
    code = getattr(called, "__code__", None)
    return code is None or not code.co_filename.startswith((QSIM, TORCH))
