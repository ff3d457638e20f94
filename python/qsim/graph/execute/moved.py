"""What a person may have moved in a model after it was simulated: a layer keeps the quantizers that it was given, and its weight gets
its range by the path where it was."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from qsim.graph.execute.methods import PLACE
from qsim.graph.record.call_sites import LEAF


def moved_on(model: nn.Module, parameter: str) -> str:
    """Which module on the way to a parameter was elsewhere when the model was simulated: a sentence, "" if none was."""
    found: Any = model
    names = parameter.split(".")
    for at, name in enumerate(names[:-1], 1):
        found = getattr(found, name)
        was, path = _path_of(found), ".".join(names[:at])
        if was is not None and was != path:
            return f"what was {was!r} is at {path!r} now"
    return ""


def tied_names(model: nn.Module, parameters: Iterable[str]) -> dict[str, list[str]]:
    """The other names of parameters that have several, by the one in `parameters`."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    found = {name: names.get(id(attrgetter(name)(model)), []) for name in parameters}
    return {name: [other for other in others if other != name] for name, others in found.items() if len(others) > 1}


def untied(model: nn.Module, parameter: str, others: Collection[str]) -> str:
    """Which of its other names a parameter no longer has, the values there being others: a sentence, "" if there is none.

    Only of modules that have quantizers: one that took the place of another is in float, with a warning.
    """
    weight = attrgetter(parameter)(model)
    for name in others:
        owner: Any = model
        for part in name.split(".")[:-1]:
            owner = getattr(owner, part, None)
        other = getattr(owner, name.rpartition(".")[2], None)
        if isinstance(owner, nn.Module) and _path_of(owner) is not None and isinstance(other, Tensor) and not _are_alike(other, weight):
            return f"{name!r} was one with {parameter!r}, whose quantizer it has, and is another tensor now"
    return ""


def _path_of(module: Any) -> str | None:
    """Where a module was when it got its quantizers, None for one that got none."""
    of_module = vars(module) if isinstance(module, nn.Module) else {}
    return of_module[PLACE][0].path if PLACE in of_module else of_module.get(LEAF)


def _are_alike(other: Tensor, weight: Tensor) -> bool:
    if other is weight or other.is_meta or weight.is_meta:
        return True
    return other.shape == weight.shape and other.dtype == weight.dtype and torch.equal(other.to(weight.device), weight)
