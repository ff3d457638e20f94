"""Methods of a simulated model that are called by themselves: ``sim.model.encode(x)`` beside ``sim(x)``.

A method that the forward calls too, at one place, is simulated as it is there. Any other runs as it was written, and the layers that it
calls as those that are called by themselves; where it multiplies with a weight of the model itself, that is in float, and said.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from qsim.graph.execute.mode import LocalMode
from qsim.graph.execute.place import Place
from qsim.graph.record.call_sites import Spot, spot_in
from qsim.graph.record.containers import full_name
from qsim.operations.functions import MAC, Function, route_name

PLACE = "_qsim_place"  # in a container's __dict__: a registered child would run when a Sequential does


def methods(cls: type[nn.Module]) -> dict[str, Callable[..., Any]]:
    """Stand-ins for the public methods of a model's class, by name."""
    found: dict[str, FunctionType] = {}
    for base in reversed(cls.__mro__):
        if issubclass(base, nn.Module) and not base.__module__.startswith("torch."):
            found.update({name: value for name, value in vars(base).items() if isinstance(value, FunctionType)})
    wanted = {name: method for name, method in found.items() if not name.startswith("_") and not hasattr(nn.Module, name)}
    return {name: _stand_in(method) for name, method in wanted.items()}


def _stand_in(method: FunctionType) -> Callable[..., Any]:
    code = _innermost(method).__code__

    @functools.wraps(method)
    def called(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        place: Place | None = vars(self)[PLACE][0] if PLACE in vars(self) else None
        is_inside = isinstance(_get_current_function_mode(), LocalMode)  # type: ignore[no-untyped-call]
        if place is None or not place.switch.on or torch.compiler.is_dynamo_compiling() or is_inside:
            return method(self, *args, **kwargs)
        above = _above(place, code)
        if above is None:
            mode: TorchFunctionMode = Outside(place, method.__name__, "was called by itself")
        else:
            mode = place.switch.mode(place, self.training, self, None, above)
            name = full_name(place.path, method.__name__)
            place.switch.notice(f"'{name}' was called by itself: it is simulated, and what it is given is not quantized", name, "")
        out = _alone(mode, method, self, *args, **kwargs)
        place.switch.say()
        return out

    return called


def caller(model: Any) -> Callable[..., Any]:
    """What calls a simulated model. If its `forward` was set on the instance since, it says what that computes in float: all that does
    not run in the forward that is simulated. Not of a compiled one, which would be compiled for the mode that looks on."""
    if torch.compiler.is_dynamo_compiling() or "forward" not in vars(model):
        return model  # type: ignore[no-any-return]
    is_compiled = hasattr(vars(model)["forward"], "_torchdynamo_orig_callable")
    looks_on = PLACE in vars(model) and vars(model)[PLACE][0].switch.on and not is_compiled
    return functools.partial(_run_own_forward, model) if looks_on else model  # type: ignore[no-any-return]


def _run_own_forward(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    place: Place = vars(model)[PLACE][0]
    out = _alone(Outside(place, "forward", "was set on the model after it was simulated"), model, *args, **kwargs)
    place.switch.say()
    return out


def _alone(mode: TorchFunctionMode, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with mode:
        return method(*args, **kwargs)


def _innermost(function: Any) -> FunctionType:
    """A function without what decorators put around it."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function  # type: ignore[no-any-return]


def _above(place: Place, code: CodeType) -> tuple[Spot, ...] | None:
    """What lies above a method in the recorded calls of a container; None if it is none of them, or was called at several places."""
    found = set()
    for spots, _, _ in place.keys:
        at = next((i for i, spot in enumerate(spots) if spot_in(spot, code)), None)
        if at is not None:
            found.add(spots[at + 1 :])
    return found.pop() if len(found) == 1 else None


def _parameter(value: Any) -> nn.Parameter | None:
    """The parameter that a tensor is, or is a view of."""
    base = value._base if isinstance(value, Tensor) and value._is_view() else value
    return base if isinstance(base, nn.Parameter) else None


class Outside(TorchFunctionMode):
    """Says which weights are read outside all that is simulated."""

    def __init__(self, place: Place, method: str, what: str) -> None:
        super().__init__()
        self.place, self.method, self.what = place, method, what

    def __torch_function__(self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if route_name(func).strip("_") in MAC:
            weights = map(_parameter, (*args, *kwargs.values()))
            names = [name for weight in weights if weight is not None and (name := self.place.switch.parameter_name(weight))]
            if names:
                where = full_name(self.place.path, self.method)
                self.place.switch.notice(f"'{where}' {self.what}: '{names[0]}' and what it computes are in float", where, "")
        return func(*args, **kwargs)
