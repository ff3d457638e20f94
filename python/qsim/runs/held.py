"""What modules hold besides parameters, buffers and children: caches, memories, counters in lists, dicts and objects of their own."""

from __future__ import annotations

import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from qsim.runs.arguments import are_same, is_array, is_dense, slots_of

# Loggers, locks, generators, hooks that bring weights: their state is not a model's.
_FOREIGN = sys.stdlib_module_names | {"torch", "numpy", "qsim", "accelerate"}
_LEAVES = {type(None), bool, int, float, complex, str, bytes, type, types.FunctionType, types.MethodType, types.BuiltinFunctionType}


class HeldValues:
    """The contents of lists, dictionaries, sets, deques, arrays and plain tensors that can be reached from some values, and the attributes
    of objects there whose classes are neither Python's nor torch's. Modules that are in no other's registries are such objects too.

    Parameters
    ----------
    values : iterable
    apart : set of int
        Ids of what others hold: it is not looked into.

    Attributes
    ----------
    tensors : list of Tensor
        Those that were found; their contents are not held here.
    """

    def __init__(self, values: Iterable[Any], apart: set[int]) -> None:
        self.tensors: list[Tensor] = []
        self._held: list[tuple[Any, _Kind, Any]] = []
        seen: dict[int, Any] = {}  # holds what it names
        left = [value for value in values if type(value) not in _LEAVES]
        while left:
            value = left.pop()
            if id(value) not in seen and id(value) not in apart:
                seen[id(value)] = value
                left += [inner for inner in self._look(value) if type(inner) not in _LEAVES]

    def _look(self, value: Any) -> Iterator[Any]:
        """Hold what a value contains, which is returned."""
        if isinstance(value, Tensor):
            if _may_be_written_to(value):
                self.tensors.append(value)
            return
        if isinstance(value, (tuple, frozenset)):
            yield from value
            return
        for kind in _KINDS:
            if kind.holds(value):
                self._held.append((value, kind, contents := kind.contents(value)))
                for part in contents if isinstance(contents, tuple) else (contents,):
                    yield from part.values() if isinstance(part, dict) else () if is_array(part) else part

    def is_changed(self) -> bool:
        """Whether anything was put in, taken out or replaced since, or written into an array; tensors are not looked at."""
        return any(not is_unchanged(kind.contents(value), contents) for value, kind, contents in self._held)

    def restore(self) -> None:
        """Put everything back but the contents of tensors."""
        for value, kind, contents in self._held:
            if not is_unchanged(kind.contents(value), contents):
                kind.put_back(value, contents)


def _may_be_written_to(t: Tensor) -> bool:
    """Whether it is of torch's own kind, has contents, and no two of its elements are one, as those of ``t.expand(4)`` are."""
    is_own = type(t) in (Tensor, nn.Parameter) and is_dense(t) and not t.is_meta and not t.is_inference()
    return is_own and all(stride != 0 or size < 2 for stride, size in zip(t.stride(), t.shape, strict=True))


def is_unchanged(contents: Any, before: Any) -> bool:
    """Of arrays the bytes count, of anything else which objects it holds."""
    if is_array(contents):
        return bool(contents.tobytes() == before.tobytes())
    if isinstance(contents, set):
        return bool(contents == before)
    return all(map(are_same, contents, before)) if isinstance(contents, tuple) else are_same(contents, before)


class _Kind(NamedTuple):
    """Something that holds others: how its contents are looked at, whatever a class of somebody's own does besides, and put back."""

    holds: Callable[[Any], bool]
    contents: Callable[[Any], Any]
    put_back: Callable[[Any, Any], None]


def _is_object(value: Any) -> bool:
    if isinstance(value, (nn.Module, types.SimpleNamespace)):
        return True
    return not isinstance(value, (type, types.ModuleType)) and type(value).__module__.partition(".")[0] not in _FOREIGN


def _attributes(value: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return dict(getattr(value, "__dict__", {})), {name: getattr(value, name) for name in slots_of(value)}


def _put_attributes_back(value: Any, contents: tuple[dict[str, Any], dict[str, Any]]) -> None:
    attributes, slots = contents
    if hasattr(value, "__dict__"):
        _put_entries_back(value.__dict__, attributes)
    for name in slots_of(value).keys() - slots.keys():
        object.__delattr__(value, name)
    for name, inner in slots.items():
        object.__setattr__(value, name, inner)


def _entries(value: dict[Any, Any]) -> dict[Any, Any]:
    return dict(_own(value).items(value))


def _put_entries_back(value: dict[Any, Any], contents: dict[Any, Any]) -> None:
    _own(value).clear(value)
    _own(value).update(value, contents)


def _own(value: dict[Any, Any]) -> type[dict[Any, Any]]:
    return OrderedDict if isinstance(value, OrderedDict) else dict  # which has an order of its own


def _refill(value: Any, contents: Iterable[Any]) -> None:
    value.clear()
    (value.extend if isinstance(value, deque) else value.update)(contents)


_KINDS = (
    _Kind(lambda value: isinstance(value, dict), _entries, _put_entries_back),
    _Kind(
        lambda value: isinstance(value, list),
        lambda value: list(list.__iter__(value)),
        lambda value, contents: list.__setitem__(value, slice(None), contents),
    ),
    _Kind(lambda value: isinstance(value, deque), list, _refill),
    _Kind(lambda value: isinstance(value, set), set, _refill),
    _Kind(
        lambda value: is_array(value) and value.flags.writeable,
        lambda value: value.copy(),
        lambda value, contents: value.__setitem__(..., contents),
    ),
    _Kind(_is_object, _attributes, _put_attributes_back),
)
