"""Attach: each container's class is swapped for a subclass whose forward follows the plan. Module paths and state-dict keys stay."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from qsim.graph.actions import Plan
from qsim.graph.execute import Inputs, Place, Switch
from qsim.graph.frugal import Kept
from qsim.graph.record import containers, leaves, subclass
from qsim.graph.routes import Site
from qsim.graph.savings import Saving
from qsim.quantizers.quantizer import Quantizer

_PLACE = "_qsim_place"  # in a container's __dict__: a registered child would run when a Sequential does


class Simulated(nn.Module):
    """Mixin of a container's class: forward under the container's mode."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        place, inputs = self.__dict__[_PLACE]
        if not place.switch.on:
            return super().forward(*args, **kwargs)
        if inputs is not None:
            args, kwargs = inputs.quantize(args, kwargs)
        with place.switch.mode(place, self.training, self):
            return super().forward(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:  # the class has no importable name
        state = self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__  # type: ignore[no-untyped-call]
        return _rebuild, (type(self)._original,), state  # type: ignore[attr-defined]


class SimulatedEncoderLayer(Simulated):
    """In evaluation `nn.TransformerEncoderLayer` calls one function for all of itself, unless it sees a function mode; compiled, it does
    not see one. It does not do so either with an activation that the function lacks, and that is what it is told while simulating."""

    @property
    def activation_relu_or_gelu(self) -> int:
        known: int = vars(self)["activation_relu_or_gelu"]
        return 0 if vars(self)[_PLACE][0].switch.on else known


class SimulatedCopier(Simulated):
    """Mixin of a class that copies and pickles itself, as `torch.fx.GraphModule` does: it gets to do so as what it was written as."""

    @contextlib.contextmanager
    def _plain(self) -> Iterator[type[nn.Module]]:
        simulated = type(self)
        self.__class__ = simulated._original  # type: ignore[attr-defined]
        try:
            yield type(self)
        finally:
            self.__class__ = simulated

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        with self._plain():
            copied: nn.Module = copy.deepcopy(self, memo)
        vars(copied)[_PLACE] = copy.deepcopy(vars(self)[_PLACE], memo)
        return _simulate(copied)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with self._plain() as original:
            made = original.__reduce_ex__(self, protocol)  # type: ignore[misc]
        return _unpickled, (vars(self)[_PLACE], *made)


def _unpickled(place: Any, make: Callable[..., nn.Module], args: tuple[Any, ...], state: Any = None) -> nn.Module:
    module = make(*args)
    if state is not None:
        module.__setstate__(state)  # type: ignore[no-untyped-call]
    vars(module)[_PLACE] = place
    return _simulate(module)


def _simulate(module: nn.Module) -> nn.Module:
    module.__class__ = _simulated(type(module))
    return module


def _simulated(cls: type[nn.Module]) -> type[nn.Module]:
    mixin = SimulatedEncoderLayer if issubclass(cls, nn.TransformerEncoderLayer) else Simulated
    if hasattr(cls, "__deepcopy__"):
        mixin = SimulatedCopier
    return subclass(mixin, cls)  # type: ignore[arg-type]  # Module's __hash__ is annotated out of line


def _rebuild(cls: type[nn.Module]) -> nn.Module:
    simulated = _simulated(cls)
    return simulated.__new__(simulated)


def attach(model: nn.Module, plan: Plan, savings: Mapping[Site, Saving], quantizers: Mapping[str, Quantizer], switch: Switch) -> list[str]:
    """Make every container of `model` follow the plan. Returns a sentence for each that could not be made to."""
    notes = []
    kept: dict[tuple[str, ...], Kept] = {}
    made = {path: Place(path, plan, savings, quantizers, kept, switch) for path in plan.routes}
    for path, route in plan.routes.items():
        made[path].link(route.frames, made)
    for path, module in list(containers(model)):
        if path not in plan.routes:
            continue
        original = type(module)
        try:
            module.__class__ = _simulated(original)
        except TypeError as error:
            notes.append(f"'{path}' is not simulated: its class {original.__name__} takes no subclass here ({error})")
            continue
        if any(site in savings and savings[site].consumes for site in plan.routes[path].sites if site):
            made[path].leaves = list(leaves(module))
        inputs = Inputs(original, plan, quantizers, switch) if path == "" and plan.inputs else None
        vars(module)[_PLACE] = (made[path], inputs)
    return notes


def fall_back(model: nn.Module, formats: Mapping[str, str], quantizers: Mapping[str, Quantizer]) -> None:
    """From now on the operations in `formats`, by name, compute in these float formats, and all others as planned."""
    kept: dict[tuple[str, ...], Kept] = {}
    for place in places(model):
        place.fall_back(formats, kept)
    for module in model.modules():
        if _PLACE in vars(module) and (inputs := vars(module)[_PLACE][1]) is not None:
            inputs.fall_back(formats, quantizers)


def detach(model: nn.Module) -> None:
    """Undo `attach`: every container runs as it was written."""
    for module in model.modules():
        if vars(module).pop(_PLACE, None) is not None:
            module.__class__ = type(module)._original  # type: ignore[attr-defined]


def places(model: nn.Module) -> list[Place]:
    """The places of all containers that follow a plan, and of the frames in them."""
    found: list[Place] = [vars(module)[_PLACE][0] for module in model.modules() if _PLACE in vars(module)]
    for place in found:  # grows: a frame may have frames
        found += [inner for inner in place.frames.values() if inner not in found]
    return found
