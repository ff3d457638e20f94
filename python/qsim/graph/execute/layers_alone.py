"""Layers of torch.nn that are called by themselves: ``sim.model.head(x)``, a loop over a Sequential, a layer that stands in another model.

In a container's forward a layer is an operation of it, and runs as it was written. Outside of all that is simulated it does what it does on
a path that no example took (`qsim.graph.plan.elsewhere`): its weight is on its grid, its result by its own quantizer, and that is said.
Layers keep their class, which programs ask for (``type(layer) is nn.Linear``), and get a forward of their own.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from qsim.graph.execute.folded_pairs import FOLDED, Folded, Names, normalizes, note_layer
from qsim.graph.execute.methods import PLACE, Outside
from qsim.graph.execute.mode import DEPTH
from qsim.graph.execute.other_exporters import refuse_exporter
from qsim.graph.execute.place import Place, place_of
from qsim.graph.record.call_sites import LEAF
from qsim.graph.record.containers import children
from qsim.warning import warn

_SHARED = "_qsim_shared"  # in a layer's __dict__
OWN = "_qsim_own"  # in a container's
Pair = tuple[Names, _BatchNorm, bool]  # of a layer and the BatchNorm that is folded into it; that; whether it came before the layer


class _Shared:
    """The place of the container that a layer is an operation of. A copy of the layer alone shares it; in a copy of the container the layer
    gets the copy's (`link_layers`). What is unpickled alone has none."""

    def __init__(self, place: Place | None = None) -> None:
        self.place = place

    def __deepcopy__(self, memo: dict[int, Any]) -> _Shared:
        return self

    def __reduce__(self) -> tuple[type[_Shared], tuple[()]]:
        return _Shared, ()


class _Own:
    """The container in whose __dict__ it is. In that of a shallow copy (``clone.__dict__ = module.__dict__.copy()``, as libraries for
    meta-learning make them) it is still the original."""

    def __init__(self, container: nn.Module | None = None) -> None:
        self.container = container

    def __deepcopy__(self, memo: dict[int, Any]) -> _Own:
        return _Own()

    def __reduce__(self) -> tuple[type[_Own], tuple[()]]:
        return _Own, ()


def simulate_alone(layer: nn.Module) -> None:
    """Have a layer simulate where it is called by itself, if it has no forward of its own on the instance."""
    if "forward" not in vars(layer):
        vars(layer)[_SHARED] = _Shared()
        vars(layer)["forward"] = functools.partial(forward, layer)  # copies and pickles of the layer have one of their own


def link_layers(container: nn.Module) -> None:
    """Give the layers that are operations of a container its place."""
    shared = _Shared(vars(container)[PLACE][0])
    for layer in _layers(container):
        vars(layer)[_SHARED] = shared
    vars(container)[OWN] = _Own(container)


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """The layers of a container that simulate where they are called by themselves, also behind what was put around them, or into them,
    since they were simulated: wrappers, parametrizations."""
    for m in children(module):
        if _SHARED in vars(m):
            yield m
        elif PLACE not in vars(m):
            yield from _layers(m)


def own_layers(container: nn.Module) -> None:
    """Have the layers of a shallow copy run with what they have themselves, and not as those that they are copies of."""
    if is_dynamo_compiling():
        raise RuntimeError("QuantSim: a shallow copy of a simulated module is compiled; call it once before, or copy it with copy.deepcopy")
    for layer in _layers(container):
        if vars(layer)["forward"].args[0] is not layer:
            vars(layer)["forward"] = functools.partial(forward, layer)
    vars(container)[OWN] = _Own(container)


def release_layer(layer: nn.Module) -> None:
    """Undo all of it, for a layer or for what stands in the place of a BatchNorm."""
    shared, folded = vars(layer).pop(_SHARED, None), vars(layer).pop(FOLDED, None)
    if shared is not None or folded is not None:
        del vars(layer)["forward"]


def is_simulated_alone(layer: nn.Module) -> bool:
    """Whether a layer belongs to a simulation."""
    return _SHARED in vars(layer)


def pair(model: nn.Module, pairs: Iterable[Pair]) -> None:
    """Have the calls counted of layers, and of what stands in the place of the BatchNorms that are folded into them."""
    for names, bn, before in pairs:
        layer, norm = map(model.get_submodule, names)
        if _SHARED in vars(layer) and type(norm) is nn.Identity and "forward" not in vars(norm):
            vars(layer)[FOLDED] = vars(norm)[FOLDED] = Folded(names, None if before else bn)
            vars(norm)["forward"] = functools.partial(_normalized, norm)


def _normalized(norm: nn.Module, x: Tensor) -> Tensor:
    """What stands in the place of a BatchNorm: returns what its layer computed with it, and normalizes where that did not run."""
    folded: Folded = norm.__dict__[FOLDED]
    if not normalizes(folded, inside=_runs_inside()):
        return x
    bn: Any = folded.was
    mean, variance, weight, bias = (
        None if t is None else t.detach().to(x.device, x.dtype) for t in (bn.running_mean, bn.running_var, bn.weight, bn.bias)
    )
    return F.batch_norm(x, mean, variance, weight, bias, eps=bn.eps)


def in_float(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What a layer computes as it was written."""
    return type(layer).forward(layer, *args, **kwargs)


def forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    is_inside = _runs_inside()
    if FOLDED in layer.__dict__:
        note_layer(layer.__dict__[FOLDED], inside=is_inside)
    if is_inside:
        return type(layer).forward(layer, *args, **kwargs)
    return _by_itself(layer if is_dynamo_compiling() else _called(layer, sys._getframe(1)), args, kwargs)


def _called(layer: nn.Module, frame: FrameType) -> nn.Module:
    """The layer that is called, which may be a shallow copy of the one whose forward it has. `frame`: that of `nn.Module.__call__`."""
    above = frame.f_locals.get("self")
    is_copy = isinstance(above, nn.Module) and vars(above).get(_SHARED) is vars(layer)[_SHARED]
    return above if is_copy else layer  # type: ignore[return-value]


def _runs_inside() -> bool:
    """Whether a layer that is called is an operation of a container that runs: a mode of this package sees it, and not to say that it is
    outside of all that is simulated."""
    if not is_dynamo_compiling() and DEPTH.modes:
        return True
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return any(type(mode).__module__.startswith("qsim.") and not isinstance(mode, Outside) for mode in modes)


def _by_itself(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    place: Place | None = vars(layer)[_SHARED].place
    if place is None:
        warn(f"QuantSim: '{vars(layer)[LEAF]}' was saved without its simulation: it computes in float")
        return in_float(layer, *args, **kwargs)
    switch = place.switch
    if not switch.on:
        return in_float(layer, *args, **kwargs)
    refuse_exporter(not switch.marks)
    is_traced = is_dynamo_compiling()
    mode: Any = switch.traced_mode(place, layer.training, layer, None, switch) if is_traced else switch.mode(place, layer.training, layer)
    _note(place.token, vars(layer)[LEAF])
    return run_alone(mode, layer, *args, **kwargs)


def run_alone(mode: TorchFunctionMode, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Runs a layer under a mode: where what the mode follows begins."""
    with mode:
        return type(layer).forward(layer, *args, **kwargs)


def _note(token: int, layer: str) -> None:
    place = place_of(token)
    place.note_alone(layer)
    place.switch.say()


_note._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as in qsim.graph.execute.answers
