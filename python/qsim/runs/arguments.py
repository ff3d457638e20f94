"""Arguments of a model: example calls as users give them, and tensors in nested arguments."""

from __future__ import annotations

import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def example_calls(example_inputs: Any) -> list[Arguments]:
    """The calls that `example_inputs` stand for, each as positional and keyword arguments.

    Parameters
    ----------
    example_inputs : Tensor, tuple, mapping, or list of these
        One argument, positional arguments, keyword arguments; a list has one entry for each call.

    Examples
    --------
    >>> example_calls((1, 2)), example_calls({"x": 1})
    ([((1, 2), {})], [((), {'x': 1})])
    >>> example_calls([1, (2, 3)])
    [((1,), {}), ((2, 3), {})]
    """
    if not isinstance(example_inputs, list):
        return [_arguments(example_inputs)]
    if not example_inputs:
        raise ValueError("qsim: got an empty list of example calls; expected at least one: a tensor, a tuple or a dict of arguments")
    return [_arguments(call) for call in example_inputs]


def _arguments(call: Any) -> Arguments:
    if isinstance(call, Mapping):
        return (), dict(call)
    return (tuple(call) if isinstance(call, tuple) and not isinstance(call, PackedSequence) else (call,)), {}


def refuse_numbers(value: Any, caller: str, what: str) -> None:
    """Raise a TypeError where `value`, or an entry of it, is an array of NumPy, or is nested lists of numbers, in place of tensors.

    Examples
    --------
    >>> refuse_numbers([[0.5, 1.0]], "QuantSim.calibrate", "a batch")
    Traceback (most recent call last):
        ...
    TypeError: QuantSim.calibrate: got nested lists of numbers as a batch; expected tensors: torch.tensor(lists)
    """
    if are_numbers(value):
        raise TypeError(f"{caller}: got nested lists of numbers as {what}; expected tensors: torch.tensor(lists)")
    entries = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else [value]
    for entry in entries:
        if is_array(entry):
            raise TypeError(
                f"{caller}: got a NumPy {type(entry).__name__} ({entry.dtype}, shape {tuple(entry.shape)}) as {what}; expected tensors: "
                "torch.from_numpy(array), or a DataLoader, which makes tensors of arrays"
            )
        if isinstance(entry, (list, tuple, Mapping)):
            refuse_numbers(entry, caller, what)


def are_numbers(value: Any) -> bool:
    """Whether a value is nested lists of numbers, as `Tensor.tolist` makes them of more than one dimension."""
    depth = 0
    while isinstance(value, (list, tuple)) and value:
        depth, value = depth + 1, value[0]
    return depth > 1 and isinstance(value, (int, float))


def is_array(value: Any) -> bool:
    """Whether a value is NumPy's: an array, or a number of an array."""
    return type(value).__module__.partition(".")[0] == "numpy" and hasattr(value, "dtype")


def is_dense(t: Tensor) -> bool:
    """Whether a tensor is one block of numbers: neither sparse, nor nested, nor of another layout."""
    return t.layout is torch.strided and not t.is_nested


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of a value: in tuples, lists and dicts, and in the attributes of objects such as dataclasses and distributions."""
    return (t for _, t in paths_in(value))


def paths_in(value: Any) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """The tensors of a value, each with the keys, indices and names of attributes that lead to it. Not those in modules."""
    seen: dict[int, Any] = {}  # holds what it names: properties make objects anew
    left: list[tuple[tuple[Any, ...], Any]] = [((), value)]
    while left:
        path, value = left.pop()
        if isinstance(value, Tensor):
            yield path, value
        elif id(value) not in seen and len(path) < _DEEPEST and not isinstance(value, _OPAQUE):
            seen[id(value)] = value
            left += [((*path, key), inner) for key, inner in reversed(_entries(value))]


_DEEPEST = 8
_OPAQUE = (nn.Module, type, str, bytes, int, float, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType)


def _entries(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        entries: list[tuple[Any, Any]] = list(value.items())
    elif names := _fields(value):
        return list(zip(names, value, strict=True))
    elif isinstance(value, (tuple, list, set, frozenset, deque)):
        return list(enumerate(value))
    else:
        entries = []
    held = {id(inner) for _, inner in entries}  # dicts that have their entries as attributes too, as Hugging Face's outputs
    named = {name: inner for name, inner in vars(value).items() if id(inner) not in held} if hasattr(value, "__dict__") else {}
    slots = [name for name in slots_of(value) if name not in named]
    return [*entries, *named.items(), *((name, getattr(value, name)) for name in slots)]


def slots_of(value: Any) -> dict[str, None]:
    """The names of the slots of an object in which something lies, in their order."""
    return {name: None for cls in type(value).__mro__ for name in _slots(cls) if name not in _NO_STATE and hasattr(value, name)}


_NO_STATE = "__dict__", "__weakref__"


def _slots(cls: type) -> tuple[str, ...]:
    names = vars(cls).get("__slots__", ())
    return (names,) if isinstance(names, str) else tuple(names)


def is_replaceable(tree: Any, path: tuple[Any, ...]) -> bool:
    """Whether the entry of `tree` at `path` can be exchanged in a copy of the containers that lead to it: no object is ever copied."""
    for key in path:
        if type(tree) in (dict, OrderedDict, list, tuple) or _fields(tree):
            tree = getattr(tree, key) if _fields(tree) else tree[key]
        else:
            return False
    return True


def _fields(tree: Any) -> tuple[str, ...]:
    """Of a named tuple."""
    return getattr(tree, "_fields", ()) if isinstance(tree, tuple) else ()


def replaced(tree: Any, path: list[Any], change: Callable[[Any], Any], copied: Callable[[Any, Any, Any, Any], None] | None = None) -> Any:
    """A copy of `tree` with what lies at `path` changed; `tree` where nothing lies there that could be exchanged.

    `copied`: gets each list, dict and tuple that is copied, with its copy, and what was exchanged for what in it.
    """
    if not path:
        return change(tree)
    key, *rest = path
    is_dict, is_named = type(tree) in (dict, OrderedDict), bool(_fields(tree))
    if is_named or is_dict:
        if key not in (_fields(tree) if is_named else tree):
            return tree
    elif not (type(tree) in (tuple, list) and isinstance(key, int) and key < len(tree)):
        return tree
    entry = getattr(tree, key) if is_named else tree[key]
    found = replaced(entry, rest, change, copied)
    if is_named:
        copy = type(tree)._make([found if name == key else inner for name, inner in zip(tree._fields, tree, strict=True)])
    else:
        copy = type(tree)({**tree, key: found} if is_dict else [*tree[:key], found, *tree[key + 1 :]])
    if copied is not None:
        copied(tree, copy, entry, found)
    return copy


def are_same(one: Any, other: Any) -> bool:
    """Whether two lists, or two dicts, hold the same objects in the same order. Which of two tuples an entry is Dynamo does not know, but
    of which things it is.

    Examples
    --------
    >>> held = [1.5, (2.5,)]
    >>> are_same(held, list(held)), are_same({"a": held}, {"a": list(held)})
    (True, False)
    """
    if isinstance(one, dict):
        return are_same([*one, *one.values()], [*other, *other.values()])
    if len(one) != len(other):
        return False
    return all(are_same(a, b) if type(a) is tuple and type(b) is tuple else a is b for a, b in zip(one, other, strict=True))
