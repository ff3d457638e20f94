"""What the containers of a simulated model are: subclasses of their own classes, whose forward follows a plan.

Transformer encoders of torch take a way of their own in evaluation, which depends on whether a function mode looks on:
`nn.TransformerEncoderLayer` calls one function for all of itself, and `nn.TransformerEncoder` packs padded sequences into a nested tensor,
so that padded positions come out as zeros. A simulation has to see the operations, and return what the model returns.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Generator, Iterator
from types import GeneratorType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode, _get_current_function_mode_stack

from qsim.graph.execute.folded_pairs import PairedInFloat, begin_pairs
from qsim.graph.execute.inputs import Copy, Refilled
from qsim.graph.execute.layers_alone import OWN, in_float, is_simulated_alone, link_layers, own_layers
from qsim.graph.execute.methods import PLACE, methods
from qsim.graph.execute.mode import LocalMode
from qsim.graph.execute.other_exporters import refuse_exporter, refuse_script
from qsim.graph.execute.place import Place
from qsim.graph.execute.traced import switch_of
from qsim.graph.record.containers import Swapped, is_parametrized, subclass
from qsim.graph.record.resume import driven
from qsim.runs.sharding import refuse_replicas
from qsim.warning import warn

WITHOUT_RANGES = (
    "QuantSim: a state without ranges was loaded into a calibrated simulation: the parameters are new, and the ranges are "
    "those of the ones before. Call sim.calibrate(data)"
)


def refuse_simulated(model: nn.Module, caller: str, instead: str) -> None:
    """Raise a ValueError where a model is simulated, or a part of it, for a function that takes the float model. `instead`: what to do."""
    if any(isinstance(m, Simulated) or is_simulated_alone(m) for m in model.modules()):
        raise ValueError(f"{caller}: got a simulation{instead}")


class Simulated(Swapped):
    """Mixin of a container's class: forward under the container's mode."""

    _made_as: tuple[tuple[str, ...], int] = ((), 0)  # what `simulated` takes besides the class

    @classmethod
    def made_of(cls) -> None:
        if not torch.compiler.is_dynamo_compiling() and not isinstance(_get_current_function_mode(), LocalMode):  # type: ignore[no-untyped-call]
            warn(f"QuantSim: a {cls.__name__} was made of a simulated one, as a slice is: what it computes between its layers is in float")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        place, inputs = self.__dict__[PLACE]
        if self.__dict__[OWN].container is not self:
            own_layers(self)
        outer = _get_current_function_mode()  # type: ignore[no-untyped-call]
        is_traced = torch.compiler.is_dynamo_compiling()
        switch = switch_of(place, outer) if is_traced else place.switch
        if not (is_traced or torch.is_grad_enabled()) and switch.needs_gradients and outer is None:
            return _with_gradients(self, args, kwargs)
        if is_traced and place.path == "":
            begin_pairs()
        if not switch.on:
            with PairedInFloat(self, place) if place.path == "" and not is_traced else contextlib.nullcontext():
                return super().forward(*args, **kwargs)
        refuse_exporter(not switch.marks)
        copies: list[Copy | Refilled] = []
        if inputs is not None:
            noted = None if switch.marks else copies
            args, kwargs = inputs.quantize(args, kwargs, marks=switch.marks, falls_back=switch.falls_back, copies=noted)
        mode: Any = switch.traced_mode(place, self.training, self, None, switch) if is_traced else switch.mode(place, self.training, self)
        with mode.within(outer):
            out = super().forward(*args, **kwargs)
        if type(out) is GeneratorType:
            return _to_its_end(out, mode, copies)
        if copies:
            _settle(copies, place)
        mode.end(out)
        return out

    def train(self, mode: bool = True) -> Simulated:
        place = vars(self)[PLACE][0]
        if place.path == "":  # its children are asked next
            place.release_kept()
        for quantizer in place.standing():
            quantizer.train(mode)
        return super().train(mode)

    def _qsim_followers(self) -> list[nn.Module]:
        """What follows the mode of the container, and is no part of it."""
        return [module for quantizer in vars(self)[PLACE][0].standing() for module in quantizer.modules()]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        self._release_kept(prefix)
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self._release_kept(prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _release_kept(self, prefix: str) -> None:
        """Once for a state dict, of the whole model or of this part, before others take parameters and a write would move them."""
        place = vars(self)[PLACE][0]
        if place.path == "" or not prefix:
            place.release_kept()

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of every module, with a warning where ranges were chosen for other parameters. Not where a simulation loads its own state."""
        found = super().load_state_dict(*args, **kwargs)
        if vars(self)[PLACE][0].has_ranges():
            warn(WITHOUT_RANGES)
        return found

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if PLACE in vars(self):
            link_layers(self)

    def __prepare_scriptable__(self) -> NoReturn:  # what torch.jit.script asks for
        refuse_script()

    def _replicate_for_data_parallel(self) -> NoReturn:
        refuse_replicas()

    def __reduce_ex__(self, protocol: Any) -> Any:  # the class has no importable name
        state = self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__  # type: ignore[no-untyped-call]
        return _rebuild, (type(self)._original, *type(self)._made_as), state  # type: ignore[attr-defined]


def _with_gradients(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with torch.enable_grad():
        return module(*args, **kwargs)


def _settle(copies: list[Copy | Refilled], place: Place) -> None:
    for each in copies:
        if path := each.settle():
            place.note_written(path)


def _to_its_end(generator: GeneratorType[Any, Any, Any], mode: LocalMode, copies: list[Copy | Refilled]) -> Generator[Any, Any, Any]:
    """What a forward that is a generator returns; its call is over when nothing more is asked of it."""
    try:
        value = yield from driven(generator, mode)
    except GeneratorExit:
        mode.tell()
        raise
    _settle(copies, mode.place)
    mode.end(value)
    return value


class SimulatedEncoderLayer(Simulated):
    """Keeps off the one function for all: with an activation that this lacks the layer does not call it, and that is what it is told.
    Compiled, it would not see the mode."""

    @property
    def activation_relu_or_gelu(self) -> int:
        if torch.compiler.is_dynamo_compiling() or vars(self)[PLACE][0].switch.on:
            return 0
        known: int = vars(self)["activation_relu_or_gelu"]
        return known


class SimulatedEncoder(Simulated):
    """Returns at padded positions what the model returns there, where it packs sequences."""

    def forward(
        self, src: Tensor, mask: Tensor | None = None, src_key_padding_mask: Tensor | None = None, is_causal: bool | None = None
    ) -> Tensor:
        out: Tensor = super().forward(src, mask, src_key_padding_mask, is_causal)
        switch = (place := vars(self)[PLACE][0]).switch
        if not switch.on or mask is not None or src_key_padding_mask is None or not _may_pack(self, src, in_a_file=switch.marks):
            return out
        padded = src_key_padding_mask if src_key_padding_mask.dtype is torch.bool else src_key_padding_mask == -torch.inf
        if getattr(self, "mask_check", True):
            with torch._C.DisableTorchFunction():
                at_the_end = (padded[:, 1:] | ~padded[:, :-1]).all()
                if not switch.marks and not at_the_end:
                    return out
                padded = padded & at_the_end  # for a file to decide
        first: Any = self.layers[0]  # type: ignore[index]
        padded = (padded if first.self_attn.batch_first else padded.T)[..., None]
        with torch._C.DisableTorchFunction():
            if self.norm is None:
                return out.masked_fill(padded, 0.0)
            norm: nn.Module = self.norm  # type: ignore[assignment]
            there = in_float(norm, torch.zeros_like(out))
            for _, quantize in place.outputs_of(norm):
                there = quantize(there)
            return torch.where(padded, there, out)


def _may_pack(encoder: Any, src: Tensor, *, in_a_file: bool) -> bool:
    """Whether the float model packs sequences that are padded at their ends: the conditions of `nn.TransformerEncoder.forward`, without a
    function mode's. Traced for a file, it is the model in eager mode that counts."""
    layer, attention = encoder.layers[0], encoder.layers[0].self_attn
    checks = getattr(encoder, "mask_check", True)
    if not (torch.backends.mha.get_fastpath_enabled() and getattr(encoder, "use_nested_tensor", False)):
        return False
    if checks and torch.compiler.is_compiling() and not in_a_file:
        return False
    if layer.training or src.dim() != 3 or src.is_nested or torch.is_autocast_enabled():
        return False
    projections = (attention, attention.out_proj, layer.norm1, layer.norm2, layer.linear1, layer.linear2)
    weights = [p for m in projections for p in m.parameters(recurse=False)]
    return not (torch.is_grad_enabled() and any(t.requires_grad for t in (src, *weights)))


class SimulatedCopier(Simulated):
    """Mixin of a class that copies and pickles itself, as `torch.fx.GraphModule` does: it gets to do so as what it was written as."""

    @contextlib.contextmanager
    def _plain(self) -> Iterator[type[nn.Module]]:
        simulated = type(self)
        self.__class__ = written_as(simulated)  # type: ignore[assignment]
        try:
            yield type(self)
        finally:
            self.__class__ = simulated

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        with self._plain():
            copied: nn.Module = copy.deepcopy(self, memo)
        vars(copied)[PLACE] = copy.deepcopy(vars(self)[PLACE], memo)
        return simulate(copied, *type(self)._made_as)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with self._plain() as original:
            made = original.__reduce_ex__(self, protocol)  # type: ignore[misc]
        return _unpickled, (vars(self)[PLACE], type(self)._made_as, *made)


def _unpickled(place: Any, made_as: tuple[Any, ...], make: Callable[..., nn.Module], args: tuple[Any, ...], state: Any = None) -> nn.Module:
    module = make(*args)
    if state is not None:
        module.__setstate__(state)  # type: ignore[no-untyped-call]
    vars(module)[PLACE] = place
    return simulate(module, *made_as)  # the place itself may not be filled yet


def simulate(module: nn.Module, homes: tuple[str, ...], number: int) -> nn.Module:
    """Have a module simulate, which has its place. `homes` and `number` as in `simulated`."""
    module.__class__ = simulated(type(module), homes, number)  # type: ignore[arg-type]  # Module's __hash__
    link_layers(module)
    return module


def simulated(cls: type[nn.Module], homes: tuple[str, ...] = (), number: int = 0) -> type[nn.Module]:
    """The subclass of a container's class that simulates; `homes`: the stacks of weights that it has. Equal models have equal classes. Each
    of the containers of one class has a `number`: Dynamo gives up at the ninth that is compiled with one code."""
    if is_parametrized(cls):
        return _with_parametrizations(simulated(cls.__base__, homes, number), cls)  # type: ignore[arg-type]
    return _simulated(cls, homes, number)  # type: ignore[arg-type]  # Module's __hash__


@functools.cache
def _simulated(cls: type[nn.Module], homes: tuple[str, ...], number: int) -> type[nn.Module]:
    special = (nn.TransformerEncoderLayer, SimulatedEncoderLayer), (nn.TransformerEncoder, SimulatedEncoder)
    mixin = next((mixin for known, mixin in special if issubclass(cls, known)), Simulated)
    made = subclass(SimulatedCopier if hasattr(cls, "__deepcopy__") else mixin, cls, number)  # type: ignore[arg-type]  # Module's __hash__
    for name, method in methods(cls).items():
        setattr(made, name, method)
    made._made_as = (), number  # type: ignore[attr-defined]
    return _with_homes(made, homes, number)


def _with_parametrizations(base: type[nn.Module], cls: type[nn.Module]) -> type[nn.Module]:
    """What simulates in place of a class that `torch.nn.utils.parametrize` made; `base`: in place of what it made that of. To take a
    parametrization off torch deletes its property from the module's class, and after the last has the module be of the first base: so
    each module has a class of its own, with the properties."""
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "_original": cls}
    return type(cls.__name__, (base, SimulatedCopier), {**_properties(cls), **names})


def _properties(cls: type) -> dict[str, Any]:
    return {name: value for name, value in vars(cls).items() if isinstance(value, property)}


def written_as(cls: type[nn.Module]) -> type[nn.Module]:
    """The class that one of `simulated` stands for, without the parametrizations that were taken off since."""
    original: type[nn.Module] = cls._original  # type: ignore[attr-defined]
    if not is_parametrized(original):
        return original
    rest = {name: value for name, value in vars(original).items() if name in ("__module__", "__getstate__", "__deepcopy__")}
    return type(original.__name__, original.__bases__, {**rest, **_properties(cls)})


def _with_homes(cls: type[nn.Module], homes: tuple[str, ...], number: int) -> type[nn.Module]:
    if not homes:
        return cls
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "_made_as": (homes, number)}
    return type(cls.__name__, (cls,), {**names, **{name: home_property(name) for name in homes}})


def _rebuild(cls: type[nn.Module], homes: tuple[str, ...] = (), number: int = 0) -> nn.Module:
    made = simulated(cls, homes, number)  # type: ignore[arg-type]  # Module's __hash__
    return cls.__new__(made)


def home_property(name: str) -> property:
    """What stands, in the class of a module, before a stack of weights of this name: the stack on its grid. To whoever asks outside of a
    simulated forward (optimizers, state dicts, copies) it hands out the parameter itself."""

    def get(module: nn.Module) -> Any:
        parameter: Any = module._parameters[name]
        place: Place = vars(module)[PLACE][0]
        home, switch = place.homes.get(name), place.switch
        if home is None or parameter is None or not switch.on or (home.falls and switch.falls_back):
            return parameter
        if torch.compiler.is_dynamo_compiling():  # nobody else asks then
            return home.quantized(parameter, switch)
        mode = _simulating()
        if mode is None:
            return parameter
        if mode.container is not module:
            return home.quantized(parameter, switch)
        read: dict[str, Tensor] = vars(mode).setdefault("_stacks", {})
        if name not in read:  # once in a call, though every expert asks
            read[name] = home.quantized(parameter, switch)
        return read[name]

    return property(get)


def _simulating() -> LocalMode | None:
    """The mode of the innermost container that is simulated now; None outside of all, and in a run in float beside a simulated one."""
    stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    mode = next((mode for mode in reversed(stack) if isinstance(mode, LocalMode)), None)
    return mode if mode is not None and mode.simulates else None
