"""compressed-tensors' ``config_groups``: which layers are quantized in which way.

Source: github.com/vllm-project/compressed-tensors, quantization/quant_config and utils/match: a target is the name of a module, a regular
expression that names begin with ("re:..."), or a class, and counts in that order.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qsim.checkpoints.folder import config_names
from qsim.config.override import EXPERT
from qsim.files.file_place import FilePlace

_REGEX = "re:"
_LONGEST = 1000  # characters of a regular expression


@dataclass(frozen=True, eq=False)
class Group:
    """One of config_groups. `activations` is None where what its weights are multiplied with is in float."""

    targets: Sequence[str]
    layout: str
    weights: Mapping[str, Any]
    activations: Mapping[str, Any] | None
    place: FilePlace


def read_groups(quantization: Mapping[str, Any], usual: str, several: str, place: FilePlace) -> list[Group]:
    """The groups of a ``quantization_config``. Layouts are `usual` where none is named; `several`: each group has to name its own."""
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise place.wanted("config_groups", groups, "an object that is not empty")
    general = quantization.get("format") or usual
    found = []
    for name, group in groups.items():
        at = place.at(name)
        if not isinstance(group, dict):
            raise place.wanted(name, group, "an object")
        weights, activations = group.get("weights"), group.get("input_activations")
        if not isinstance(weights, dict):
            raise at.wanted("weights of config_groups", weights, "an object that says how they are quantized")
        if activations is not None and not isinstance(activations, dict):
            raise at.wanted("input_activations", activations, "an object or null")
        if group.get("output_activations") is not None:
            raise at.wanted("output_activations", group["output_activations"], "null: nothing of that kind is read")
        layout = group.get("format") or general
        if layout == several or not isinstance(layout, str):
            raise at.wanted("format", group.get("format"), f"that of the group, where all together are {several!r}")
        found.append(Group(read_names(group, "targets", at), layout, weights, activations, at))
    return found


def read_names(found: Mapping[str, Any], key: str, place: FilePlace) -> list[str]:
    """The names, patterns and classes under a key."""
    targets = config_names(found, key, place)
    for target in targets:
        if not target.startswith(_REGEX):
            continue
        try:
            if len(target) > _LONGEST:
                raise ValueError(f"it has {len(target)} characters")
            re.compile(target.removeprefix(_REGEX))
        except (re.error, ValueError, OverflowError, RecursionError) as error:
            raise place.wanted(f"one of {key}", target, f"a regular expression behind {_REGEX!r}: {error}") from None
    return targets


def matches(module: str, targets: Sequence[str]) -> bool:
    """Whether a pattern among targets begins the name of a module."""
    return any(re.match(target.removeprefix(_REGEX), module) for target in targets if target.startswith(_REGEX))


def by_pattern(groups: Iterable[Sequence[str]], others: Iterable[str]) -> list[list[str]]:
    """The targets of groups of modules: one pattern for all experts of a layer where none is of another group or of `others`. transformers
    knows the group of experts by it.

    Examples
    --------
    >>> by_pattern([["fc", "mlp.experts.0.up", "mlp.experts.1.up"], ["mlp.experts.0.down"]], ["mlp.experts.1.down"])
    [['fc', 're:mlp\\\\.experts\\\\.\\\\d+\\\\.up$'], ['mlp.experts.0.down']]
    """
    groups = list(groups)
    of_groups: dict[str, set[int]] = {}
    for i, names in enumerate([*groups, list(others)]):
        for name in names:
            of_groups.setdefault(_pattern(name), set()).add(i)
    return [list(dict.fromkeys(p if len(of_groups[p := _pattern(name)]) == 1 else name for name in names)) for names in groups]


def is_expert(name: str) -> bool:
    """Whether a module is one of numbered experts.

    Examples
    --------
    >>> is_expert("layers.3.mlp.experts.0.up"), is_expert("layers.3.mlp.shared_experts.up")
    (True, False)
    """
    return EXPERT.search(name) is not None


def _pattern(name: str) -> str:
    """Of the experts of a layer; the name itself where it is of none."""
    parts = EXPERT.split(name)
    return name if len(parts) == 1 else _REGEX + EXPERT.pattern.join(map(re.escape, parts)) + "$"


def choose(module: str, groups: Sequence[Group], modules: Collection[str]) -> Sequence[Group]:
    """The groups that a module may be of, out of all names of modules: more than one where only its class decides, which a file does
    not say."""
    if len(groups) == 1:
        return groups
    exact = [group for group in groups if module in group.targets]
    matching = [group for group in groups if matches(module, group.targets)]
    classes = [group for group in groups if any(not target.startswith(_REGEX) and target not in modules for target in group.targets)]
    return exact or matching or classes or groups
