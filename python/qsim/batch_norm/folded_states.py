"""States of a model as it was before its BatchNorms were folded: they are folded on the way in, into the model or into a part of it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from qsim.batch_norm.absorb import NotFoldable, absorb
from qsim.batch_norm.foldable import Fold
from qsim.batch_norm.lone_norms import reset
from qsim.graph.record.containers import full_name
from qsim.operations.layers import Layer
from qsim.warning import warn

_OURS = "qsim: "


def fold_state(model: nn.Module, folds: Collection[tuple[Fold, _BatchNorm]], state: dict[str, Any]) -> bool:
    """Fold the BatchNorms in a state dict of the model as it was, so that it fits the model as it is.

    Parameters
    ----------
    model : nn.Module
        After `folds`; not changed. The BatchNorms in `folds` become those of the state.
    state : dict of str to Tensor
        Changed in place. One without entries of BatchNorms that are gone stays as it is.

    Returns
    -------
    bool
        Whether it had such entries.

    Raises
    ------
    NotFoldable
        The state has some of those BatchNorms and not the others or their layers, or statistics that mean nothing.
    """
    layers: dict[str, nn.Module] = {}
    if not any(_has(state, fold.batch_norm, bn) for fold, bn in folds):
        for fold, _ in folds:
            if f"{fold.layer}.weight" in state and f"{fold.layer}.bias" not in state and not fold.alone:
                raise NotFoldable(_without(fold))
        return False
    norms: list[tuple[_BatchNorm, _BatchNorm]] = []
    for fold, bn in folds:
        if fold.layer not in layers:
            layer = model.get_submodule(fold.layer)
            layers[fold.layer] = reset(cast(Layer, copy.deepcopy(layer))) if fold.alone else _loaded(fold.layer, layer, state)
        norm = cast(_BatchNorm, _loaded(fold.batch_norm, bn, state))
        norms.append((bn, norm))
        absorb(cast(Layer, layers[fold.layer]), norm, before=fold.before, names=(fold.layer, fold.batch_norm))
    state.update({f"{path}.{name}": t for path, layer in layers.items() for name, t in layer.state_dict().items()})
    with torch.no_grad():
        for bn, norm in norms:
            for name, t in norm.state_dict().items():
                getattr(bn, name).copy_(t)
    return True


def _loaded(path: str, module: nn.Module, state: dict[str, Any]) -> nn.Module:
    """A copy of the module, without its children, that holds its entries of the state, which are taken out."""
    names = [key.removeprefix(f"{path}.") for key in state if key.startswith(f"{path}.")]
    own = {name: state.pop(f"{path}.{name}") for name in names if "." not in name}
    module = copy.deepcopy(module)
    _take_as_it_is(module)
    for child, _ in list(module.named_children()):
        delattr(module, child)
    if "bias" not in own and not isinstance(module, _BatchNorm):  # a layer's came with the folding
        module.register_parameter("bias", None)
    try:
        nn.Module.load_state_dict(module, own)  # a container that is simulated would tell of it
    except RuntimeError as error:
        raise NotFoldable(f"'{path}', which has part in folding BatchNorm, does not load ({error})") from error
    return module


def fold_what_is_loaded(model: nn.Module, folds: Iterable[tuple[Fold, _BatchNorm]]) -> None:
    """From now on states of the model before `folds` may be loaded into any part of it. None: as any model's again."""
    folds = tuple(folds)
    concerned = {above for fold, _ in folds for path in (fold.batch_norm, fold.layer) for above in _above(path)}
    for module in model.modules():
        _take_as_it_is(module)
    for path, module in model.named_modules(remove_duplicate=False):
        if path in concerned:
            module.register_load_state_dict_pre_hook(_Folding(path, folds))  # type: ignore[no-untyped-call]


def _take_as_it_is(module: nn.Module) -> None:
    hooks = module._load_state_dict_pre_hooks
    for key in [key for key, hook in hooks.items() if isinstance(getattr(hook, "hook", hook), _Folding)]:
        del hooks[key]


class _Folding:
    """What a module calls before it takes its part of a state, and its children theirs."""

    def __init__(self, path: str, folds: tuple[tuple[Fold, _BatchNorm], ...]) -> None:
        self._path, self._folds = path, folds

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, *reports: Any) -> None:
        errors: list[str] = reports[-1]
        if any(error.startswith(_OURS) for error in errors):  # of what holds this module
            return
        named = {key.removeprefix(prefix): t for key, t in state.items() if key.startswith(prefix)}
        before = list(named)
        try:
            changed = self._fold(module, named, alone=prefix == "")
        except NotFoldable as error:
            errors.append(f"{_OURS}{error}. Load the state of all of the model, or of a part that holds both: sim.load_state_dict(state)")
            return
        if changed:
            for key in before:
                del state[prefix + key]
            state.update({prefix + name: t for name, t in named.items()})

    def _fold(self, module: nn.Module, named: dict[str, Tensor], *, alone: bool) -> bool:
        inside: list[tuple[Fold, _BatchNorm]] = []
        for fold, bn in self._folds:
            norm, layer = _within(self._path, fold.batch_norm), _within(self._path, fold.layer)
            if norm and layer:
                inside.append((dataclasses.replace(fold, batch_norm=norm, layer=layer), bn))
            elif norm is not None and _has(named, norm, bn):
                raise NotFoldable(f"the state has '{fold.batch_norm}', which is folded into '{fold.layer}', without that layer")
            elif layer is not None and full_name(layer, "weight") in named:
                self._take_layer(fold, has_bias=full_name(layer, "bias") in named, alone=alone)
        there = [(fold, bn) for fold, bn in inside if _has(named, fold.batch_norm, bn)]
        others = [each for each in inside if each not in there]
        for fold, _ in others if there else ():  # the state is of the model as it was, with its layers
            if f"{fold.layer}.weight" in named and not fold.alone:
                raise NotFoldable(_without(fold))
        return fold_state(module, there, named) if there else fold_state(module, others, named)

    def _take_layer(self, fold: Fold, *, has_bias: bool, alone: bool) -> None:
        if not has_bias and not fold.alone:
            raise NotFoldable(_without(fold))
        if alone:  # with what holds both, the BatchNorm was folded before
            warn(
                f"QuantSim: what is loaded into '{fold.layer}' by itself is taken for weights with '{fold.batch_norm}' folded into them, "
                "as this layer's own are. Load those of the float model with the BatchNorm: sim.load_state_dict(state)"
            )


def _without(fold: Fold) -> str:
    return f"the state has '{fold.layer}' as it was before '{fold.batch_norm}' was folded into it, without that BatchNorm"


def _above(path: str) -> list[str]:
    """A path, and those of all that hold it."""
    names = path.split(".")
    return [".".join(names[:count]) for count in range(len(names) + 1)]


def _within(path: str, inner: str) -> str | None:
    """What a path is called in the module at another, if it lies there; "" if it is that module."""
    if inner == path:
        return ""
    beginning = full_name(path, "")
    return inner.removeprefix(beginning) if inner.startswith(beginning) else None


def _has(named: Mapping[str, Any], path: str, bn: _BatchNorm) -> bool:
    """Whether a state has entries of a BatchNorm."""
    return any(full_name(path, name) in named for name in bn.state_dict() if "." not in name)  # its own, not its children's
