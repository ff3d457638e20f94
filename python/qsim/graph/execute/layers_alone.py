"""Layers of torch.nn that are called by themselves: ``sim.model.head(x)``, a loop over a Sequential, a layer that stands in another model.

In a container's forward a layer is an operation of it, and runs as it was written. Outside of all that is simulated it does what it does on
a path that no example took (`qsim.graph.plan.elsewhere`): its weight is on its grid, its result by its own quantizer, and that is said.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn
from torch._C import _get_function_stack_at, _len_torch_function_stack
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from qsim.graph.execute.methods import PLACE
from qsim.graph.execute.mode import LocalMode
from qsim.graph.execute.other_exporters import refuse_exporter, refuse_script
from qsim.graph.execute.place import Place, place_of
from qsim.graph.record.call_sites import LEAF
from qsim.graph.record.containers import leaves
from qsim.warning import warn

_SHARED = "_qsim_shared"  # in a layer's __dict__


class _Shared:
    """The place of the container that a layer is an operation of. A copy of the layer alone shares it; in a copy of the container the layer
    gets the copy's (`link_layers`). What is unpickled alone has none."""

    def __init__(self, place: Place | None = None) -> None:
        self.place = place

    def __deepcopy__(self, memo: dict[int, Any]) -> _Shared:
        return self

    def __reduce__(self) -> tuple[type[_Shared], tuple[()]]:
        return _Shared, ()


class LayerAlone(nn.Module):
    """Mixin of a layer's class: outside of all that is simulated the forward runs under a mode of its own."""

    _original: type[nn.Module]

    def __reduce_ex__(self, protocol: Any) -> Any:  # the class has no importable name
        state = self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__  # type: ignore[no-untyped-call]
        return _rebuild, (self._original,), state

    def __prepare_scriptable__(self) -> NoReturn:  # what torch.jit.script asks for
        refuse_script()


@functools.cache
def _simulated_alone(cls: type[nn.Module]) -> type[nn.Module]:
    plain: Callable[..., Any] = cls.forward

    @functools.wraps(plain)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        modes = _len_torch_function_stack()
        if modes and (isinstance(_get_function_stack_at(modes - 1), LocalMode) or not _is_alone()):
            return plain(self, *args, **kwargs)
        return _by_itself(self, plain, args, kwargs)

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "_original": cls, "forward": forward}
    return type(cls.__name__, (LayerAlone, cls), names)


def _is_alone() -> bool:
    """Whether no mode of this package looks on."""
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return not any(type(mode).__module__.startswith("qsim.") for mode in modes)


def _by_itself(layer: nn.Module, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    place: Place | None = vars(layer)[_SHARED].place
    if place is None:
        warn(f"QuantSim: '{vars(layer)[LEAF]}' was saved without its simulation: it computes in float")
        return plain(layer, *args, **kwargs)
    switch = place.switch
    if not switch.on:
        return plain(layer, *args, **kwargs)
    refuse_exporter(not switch.marks)
    is_traced = torch.compiler.is_dynamo_compiling()
    mode: Any = switch.traced_mode(place, layer.training, layer, None, switch) if is_traced else switch.mode(place, layer.training, layer)
    _note(place.token, vars(layer)[LEAF])
    return run_alone(mode, plain, layer, *args, **kwargs)


def _note(token: int, layer: str) -> None:
    place = place_of(token)
    place.note_alone(layer)
    place.switch.say()


_note._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as in qsim.graph.execute.traced


def run_alone(mode: TorchFunctionMode, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a function under a mode: where what the mode follows begins."""
    with mode:
        return function(*args, **kwargs)


def in_float(layer: nn.Module, *args: Any) -> Any:
    """What a layer computes as it was written."""
    return getattr(type(layer), "_original", type(layer)).forward(layer, *args)


def simulate_alone(layer: nn.Module) -> None:
    """Have a layer simulate where it is called by itself."""
    layer.__class__ = _simulated_alone(type(layer))  # type: ignore[assignment, arg-type]  # Module's __hash__


def link_layers(container: nn.Module) -> None:
    """Give the layers that are operations of a container its place."""
    shared = _Shared(vars(container)[PLACE][0])
    for layer in leaves(container):
        if isinstance(layer, LayerAlone):
            vars(layer)[_SHARED] = shared


def release_layer(layer: nn.Module) -> None:
    """Undo both."""
    if isinstance(layer, LayerAlone):
        del vars(layer)[_SHARED]
        layer.__class__ = layer._original  # type: ignore[assignment]


def _rebuild(cls: type[nn.Module]) -> nn.Module:
    return cls.__new__(_simulated_alone(cls))  # type: ignore[arg-type]  # Module's __hash__
