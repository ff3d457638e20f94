"""What a trace of a model has in it besides tensors: modules, hooks, attributes. Where one is another, the trace is of another model."""

from __future__ import annotations

import types
from collections.abc import Mapping, Set
from functools import partial
from typing import Any

from torch import Tensor, nn

_LARGE = 1000  # what holds more is data, and nothing that forward reads as numbers
_DEPTH = 3  # so many objects within each other are looked into: a config of configs, not all that a logger leads to
_OF_MODULES = frozenset(vars(nn.Module()))
_OF_STATES = {
    "_parameters",
    "_buffers",
    "_modules",
    *(key for key in _OF_MODULES if "state_dict" in key or "persistent" in key),
    "training",
}
_NOT_THE_MODELS = ("torch.", "qsim.", "builtins")
_PLAIN = (bool, int, complex, str, bytes, type(None))
_DATA = (*_PLAIN, float, Tensor, list, tuple, dict)
_ITSELF = (nn.Module, type, types.FunctionType, types.BuiltinFunctionType)


def traced_state(model: nn.Module, constants: Set[int]) -> list[Any]:
    """All that decides on what a trace of the model computes and is no tensor that it reads anew in each call: modules by identity,
    attributes and hooks by value where they have one. Compare two with ``==``; where there is doubt they differ.

    Parameters
    ----------
    model : nn.Module
    constants : set of int
        Addresses of the tensors that the trace holds itself; others in attributes are what a call has left there.
    """
    seen: dict[int, int] = {}
    found: list[Any] = []
    for name, module in model.named_modules(remove_duplicate=False):
        own = vars(module)
        tensors = [(key, None if t is None else (t.shape, t.dtype)) for kind in ("_parameters", "_buffers") for key, t in own[kind].items()]
        found.append((name, _Same(module), type(module), tensors))
        if seen.setdefault(id(module), len(seen)) == len(seen) - 1:
            found.append([(key, _state(value, constants, seen)) for key, value in own.items() if _counts(key, value)])
    for kind in dict.fromkeys(kind for module in model.modules() for kind in type(module).__mro__):
        if not kind.__module__.startswith(_NOT_THE_MODELS):
            found.append([(key, _state(value, constants, seen)) for key, value in vars(kind).items() if _is_data(key, value)])
    return found


def address(tensor: Tensor) -> int:
    """Where a tensor lies; of those without memory, who it is."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return id(tensor)


class _Same:
    """Equal to itself alone. It holds what it stands for, whose address nothing else has meanwhile."""

    def __init__(self, held: object) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.held is self.held

    __hash__ = object.__hash__


def _counts(key: str, value: object) -> bool:
    return bool(value) and key not in _OF_STATES if key in _OF_MODULES else key != "training"  # traced in eval mode


def _is_data(key: str, value: object) -> bool:
    """Of what a class has: numbers, lists and the like, no methods."""
    return not key.startswith("__") and isinstance(value, _DATA)


def _state(value: Any, constants: Set[int], seen: dict[int, int], depth: int = 0) -> Any:
    if (kind := type(value)) in _PLAIN:
        return kind, value
    if kind is float:
        return kind, repr(value)  # NaN equals itself then
    if isinstance(value, Tensor):
        where = address(value)
        return kind, where if where in constants else None
    if isinstance(value, _ITSELF) or type(value).__module__.startswith("qsim."):
        return _Same(value)
    if id(value) in seen:
        return "seen", seen[id(value)]
    seen[id(value)] = len(seen)
    within = partial(_state, constants=constants, seen=seen, depth=depth)
    if isinstance(value, types.MethodType):
        return value.__func__, _Same(value.__self__)
    if isinstance(value, partial):
        return partial, within(value.func), within(value.args), within(value.keywords)
    if isinstance(value, Mapping | list | tuple) and len(value) > _LARGE:
        return _Same(value), len(value)
    if isinstance(value, Mapping):
        return type(value), [(within(key), within(held)) for key, held in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [within(held) for held in value]
    if isinstance(value, Set):
        return type(value), sorted(map(repr, value))
    if depth == _DEPTH or not hasattr(value, "__dict__"):
        return _Same(value)
    return type(value), _state(vars(value), constants, seen, depth + 1)
