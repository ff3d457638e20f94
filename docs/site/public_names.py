"""What a user can reach: names that the reference documents, and that need an example each (tests/python/house/test_public_names.py)."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import qsim

# Members without an underscore that are there for other packages of qsim, by the class that defines them.
FOR_PACKAGES = {
    "AsTheModel": ("model_method", "show_signature"),
    "Simulation": (
        *("simulate", "fall_back", "needed", "released", "missing", "unread", "no_encoding", "calibrated", "called", "forward_batch"),
        *("unrecorded", "weights", "matching", "runner", "model_method"),
    ),
    "RestoredWeights": ("restored", "note_restored", "bind", "bound_weights", "bound_scales", "told_of_bound", "tell_of_restored"),
    "Encoded": ("is_settled", "grid_tensors", "settings", "turn", "grid_scale", "lacks_encoding", "train", "extra_repr"),
    "RangeState": ("adopt",),
    "Observer": ("check_method", "check", "extra_repr", "adopt"),
    "Quantizer": ("additive", "use", "extra_repr", "adopt"),
    "Profile": ("decided", "applied", "signed", "known_range"),
    "Override": ("matches", "apply"),
    "Kernel": ("saturates",),
    "Diagnosis": ("to_html",),  # the old name of `save`
    "Watch": ("check", "note"),
}


def function_of(member: object) -> FunctionType | None:
    """What is behind a method, class method or property."""
    if isinstance(member, (classmethod, staticmethod)):
        member = member.__func__
    elif isinstance(member, property):
        member = member.fget
    return member if isinstance(member, FunctionType) else None


def is_for_users(name: str, member: object) -> bool:
    function = function_of(member)
    owner = function.__qualname__.rpartition(".")[0] if function else ""
    return name not in (*FOR_PACKAGES.get(owner, ()), "page", "figures")  # of a report: what `save` and `log` write


def is_listed(name: str, member: object) -> bool:
    """Whether the class's docstring documents it, as an attribute."""
    function = function_of(member)
    owner = getattr(sys.modules.get(function.__module__), function.__qualname__.rpartition(".")[0], None) if function else None
    heirs = [owner, *owner.__subclasses__()] if owner else []
    return any(re.search(rf"^(?:\w+, )*{name}(?:, \w+)* : ", inspect.getdoc(cls) or "", re.M) for cls in heirs)


def members(cls: type) -> Iterator[tuple[str, FunctionType]]:
    """The methods and properties that qsim, not torch, gives a class."""
    seen = set()
    for base in cls.__mro__:
        if base.__module__.split(".")[0] == "qsim":
            for name, member in vars(base).items():
                function = function_of(member)
                if function and not name.startswith("_") and name not in seen and is_for_users(name, member):
                    seen.add(name)
                    yield name, function


def public_names() -> Iterator[tuple[str, Any]]:
    """Path and object: everything in `qsim.__all__`, and in that of the modules there."""
    for name in qsim.__all__:
        found = getattr(qsim, name)
        if inspect.ismodule(found):
            yield from ((f"qsim.{name}.{inner}", getattr(found, inner)) for inner in found.__all__)
        elif not name.startswith("__"):
            yield f"qsim.{name}", found
