"""Which modules of a model are containers, and which are leaves.

A *container* is a module whose forward is Python of its own: the root, anything from outside torch.nn, anything with children.
Its forward runs under a function mode. A `torch.nn` leaf is no container: it stays as it is, and the function it calls is an
operation of the container above it.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils import parametrize


def full_name(path: str, name: str) -> str:
    """The path of what is called `name` in the module at `path`, "" for the model itself."""
    return f"{path}.{name}" if path else name


def containers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Path and module of each container. Not scripted modules, nor those with a `forward` set on the instance: their class is not used."""
    for path, m in model.named_modules():
        if isinstance(m, torch.jit.ScriptModule) or "forward" in vars(m) or type(m).forward is nn.Module.forward:  # as in ModuleList
            continue
        if path == "" or not is_leaf(m):
            yield path, m


def settle_forwards(model: nn.Module) -> None:
    """Have the forward of the root's class run where one was set on the instance: of a compiled one, what was compiled."""
    for m in model.modules():
        if _is_compiled_forward(vars(m).get("forward"), type(m)):
            del vars(m)["forward"]  # it would run the model that this one was copied from
    own = vars(model).pop("forward", None)
    if own is not None:
        vars(model)["_qsim_forward"] = own
        model.__class__ = _with_own_forward(type(model))  # type: ignore[assignment, arg-type]  # Module's __hash__ is annotated out of line


def _is_compiled_forward(forward: Any, cls: type[nn.Module]) -> bool:
    """Whether it is what `torch.compile` made of the forward of a class."""
    if not hasattr(forward, "_torchdynamo_orig_callable"):
        return False
    while not isinstance(forward, types.MethodType) and hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    return isinstance(forward, types.MethodType) and forward.__func__ is cls.forward


@functools.cache
def _with_own_forward(cls: type[nn.Module]) -> type[nn.Module]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return vars(self)["_qsim_forward"](*args, **kwargs)

    return type(cls.__name__, (cls,), {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "forward": forward})


def leaves(container: nn.Module) -> Iterator[nn.Module]:
    """The `torch.nn` leaves that are operations of a container, not of one inside it."""
    for m in children(container):
        if is_leaf(m):
            yield m
        elif not isinstance(m, torch.jit.ScriptModule) and type(m).forward is nn.Module.forward:  # as in ModuleList
            yield from leaves(m)


def is_leaf(m: nn.Module) -> bool:
    """Whether a module is a `torch.nn` leaf."""
    return type(m).__module__.startswith("torch.nn.modules") and not children(m)


def children(m: nn.Module) -> list[nn.Module]:
    """Also of a module that is being copied, which has none yet."""
    return [child for child in vars(m).get("_modules", {}).values() if child is not None]


class LayerKind(NamedTuple):
    """Which layer of torch.nn a module is, or is made of: the class; whether it is a leaf; whether nothing runs when it is called but that
    class's own forward, and what computes its parameters."""

    name: str
    leaf: bool
    plain: bool


def layer_kind(m: nn.Module) -> LayerKind:
    """Which layer a module is; one of complex numbers, which no grid holds, is none that has a weight: a `Module`."""
    cls: type[nn.Module] = next(c for c in type(m).__mro__ if c.__module__.startswith("torch.nn.modules"))
    if any(p.is_complex() for p in m.parameters(recurse=False)):
        return LayerKind("Module", is_leaf(m), False)
    own = isinstance(m, torch.jit.ScriptModule) or type(m).forward is not cls.forward or "forward" in vars(m)
    plain = not own and all(map(_computes_parameter, m._forward_pre_hooks.values()))
    return LayerKind(cls.__name__, is_leaf(m), plain)


def _computes_parameter(hook: Any) -> bool:
    """Whether a hook is one of those that `torch.nn.utils` computes parameters by: for weight norm, spectral norm, pruning."""
    return type(hook).__module__.startswith("torch.nn.utils.")


def compute_parameters(m: nn.Module) -> None:
    """Have the hooks of `torch.nn.utils` compute the parameters of a layer, as they do before each call."""
    for hook in m._forward_pre_hooks.values():
        if _computes_parameter(hook):
            hook(m, ())


def parametrizing(model: nn.Module) -> tuple[str, ...]:
    """Beginnings of the paths of what `torch.nn.utils.parametrize` has compute parameters."""
    return tuple(f"{path}." for path, m in model.named_modules() if isinstance(m, parametrize.ParametrizationList))


class Swapped(nn.Module):
    """Mixin of a class that a container has in place of its own. Copies of the container have that class too."""

    @classmethod
    def made_of(cls) -> None:
        """Asked where another module is made of the class. In a forward it belongs to the container that makes it, which sees what its
        layers do."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        make, *rest = reduced
        return (_copied if make is copyreg.__newobj__ else make, *rest)  # type: ignore[attr-defined]


def _copied(cls: Any, *args: Any) -> nn.Module:
    """What a copy begins with."""
    made: nn.Module = cls._original.__new__(cls, *args)
    return made


@functools.cache
def subclass(mixin: type[Swapped], cls: type[nn.Module], number: int = 0) -> type[nn.Module]:
    """`cls` with the forward of `mixin` before its own; `_original` is `cls`. Cached, so that equal models have equal classes; there are as
    many as there are numbers. What is made of it, as ``layers[:2]`` makes one, is one of `cls`."""

    def __new__(made: type[Swapped], *args: Any, **kwargs: Any) -> nn.Module:
        made.made_of()
        return cls(*args, **kwargs)

    before: types.FunctionType = mixin.forward  # type: ignore[assignment]
    # Dynamo keeps what it knows of a code with it: each class has one of its own.
    forward = types.FunctionType(before.__code__.replace(), before.__globals__, "forward", before.__defaults__, before.__closure__)
    forward.__signature__ = inspect.signature(cls.forward)  # type: ignore[attr-defined]  # trainers and torch.export ask for it
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (mixin, cls), {**names, "_original": cls, "forward": forward, "__new__": __new__})


def is_parametrized(cls: type) -> bool:
    """Whether `torch.nn.utils.parametrize` made the class, for one module: it has a property for each parameter that is computed."""
    return getattr(vars(cls).get("__getstate__"), "__module__", "") == parametrize.__name__


def leaf_paths(model: nn.Module) -> dict[nn.Module, str]:
    """The `torch.nn` leaves of a model, with their paths."""
    return {m: path for path, m in model.named_modules() if path and is_leaf(m)}


class ParameterOf:
    """Gets a parameter from its container by its name there, None if that has none by now.

    (`operator.attrgetter` does nearly the same, and Dynamo does not know how.)"""

    def __init__(self, name: str) -> None:
        self.path = tuple(name.split("."))

    def __call__(self, container: nn.Module) -> Any:
        found: Any = container
        for name in self.path:
            found = getattr(found, name, None)
        return found
