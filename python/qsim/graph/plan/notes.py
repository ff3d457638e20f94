"""What a plan has to say about the config that it follows."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

import torch

from qsim.close_names import close_names
from qsim.config.config import Config
from qsim.config.override import EXPERT, Override, SiteInfo
from qsim.graph.plan.actions import LeftFloat, PlannedQuantizer
from qsim.graph.plan.reasons import NOT_REACHED
from qsim.graph.record.telling import Telling
from qsim.numbers.range_methods import READ_BY
from qsim.numbers.spec import TensorSpec
from qsim.operations.onnx_types import onnx_type

_CLOSE = 0.75  # of 1: how like a name a pattern is that was mistyped
_SHOWN = 4  # names of operations in a sentence
_EXPERTS = ".experts"
_PARTS = ("weight", "output", "input")  # what keys of quantizers end in, and names of operations do not


def _idle(config: Config, sites: Sequence[SiteInfo]) -> list[Override]:
    """The overrides that are for none of the sites."""
    return [override for override in config.overrides if not any(map(override.matches, sites))]


def notes_of(config: Config, sites: Sequence[SiteInfo], quantizers: Mapping[str, PlannedQuantizer], left: Iterable[LeftFloat]) -> list[str]:
    """Sentences on overrides that are for no operation, on those that the target would not have, and on what no example reached."""
    idle = _idle(config, sites)
    told = [Telling(f"the config's override {override} matches no operation") for override in idle]
    if any(isinstance(override.pattern, str) for override in idle):
        shown, more = ", ".join(repr(site.name) for site in sites[:_SHOWN]), len(sites) - _SHOWN
        told.append(Telling(f"operations are called {shown}{f' and {more} more, as in sim.summary()' if more > 0 else ''}"))
    return [
        *told,
        *_unread(quantizers.values()),
        *_objections(config, sites, quantizers),
        *_not_reached([entry.name for entry in left if entry.reason == NOT_REACHED]),
    ]


def mistyped(config: Config, sites: Sequence[SiteInfo], modules: Collection[str]) -> list[str]:
    """A sentence for each override that is for no operation, and whose pattern is nearly the name of one; what to write instead.

    Parameters
    ----------
    config : Config
    sites : sequence of SiteInfo
        All operations.
    modules : collection of str
        Paths of all modules. Their names are not mistyped, though nothing may be quantized there.
    """
    names = list(dict.fromkeys(site.name for site in sites))
    parts = {name[:i] for name in names for i, letter in enumerate(name) if letter == "."}
    found, experts = [], []
    stacked = next((part for part in parts if part.endswith(_EXPERTS)), "")
    for override in _idle(config, sites):
        pattern = override.pattern
        if stacked and isinstance(pattern, str) and EXPERT.search(pattern) and "*" not in pattern:
            experts.append(pattern)
            continue
        if not isinstance(pattern, str) or any(fnmatchcase(name, pattern) for name in names):
            if close := _close_type(override, sites):
                found.append(f"the override {override} matches no operation; close to its type: {close!r}")
            continue
        if pattern in parts:
            found.append(f"the override {pattern!r} names a part of the model, no operation; for all in it write {pattern + '.*'!r}")
        elif pattern.rpartition(".")[0] in names and pattern.rpartition(".")[2].partition("[")[0] in _PARTS:
            operation, _, part = pattern.rpartition(".")
            role = "weight" if part == "weight" else "activation"
            found.append(f"the override {pattern!r} names a quantizer; write its operation and role: override({operation!r}, {role}=...)")
        elif not any(fnmatchcase(module, pattern) for module in modules):
            near = close_names(pattern, [*names, *(f"{part}.*" for part in parts)], _CLOSE)
            if near:
                found.append(f"the override {pattern!r} matches no operation; close to it: {', '.join(map(repr, near))}")
    if experts:
        found.append(
            f"{len(experts)} overrides of single experts ({experts[0]!r}, ...) match no operation: the model has all of a layer in one "
            f"parameter, {stacked + '.*'!r}. Of a checkpoint that has them one by one, checkpoint.for_model(model).config() is the config"
        )
    return found


def _close_type(override: Override, sites: Sequence[SiteInfo]) -> str | None:
    """The type of an operation that the override's is like, and that is none by itself; None without one."""
    types = dict.fromkeys(name for site in sites for name in (site.op, site.type, site.module) if name is not None)
    known = {*types, *dir(torch), *dir(torch.nn), *dir(torch.nn.functional), *map(onnx_type, dir(torch.nn.functional))}
    if override.op_type is None or any(fnmatchcase(name, override.op_type) for name in known):
        return None
    return next(iter(close_names(override.op_type, types, _CLOSE)), None)


def _unread(quantizers: Iterable[PlannedQuantizer]) -> list[str]:
    """A sentence for each field that some specs set and their method does not read."""
    found: dict[tuple[str, float, str, str], list[str]] = {}
    for planned in quantizers:
        for name, method in READ_BY.items():
            value = getattr(planned.spec, name)
            if value != getattr(TensorSpec, name) and planned.spec.method != method and planned.spec.has_scale:
                found.setdefault((name, value, planned.spec.method, method), []).append(planned.key)
    return [
        Telling(
            f"{name}={value} of {', '.join(map(repr, keys[:2]))}{f' and {len(keys) - 2} more' if len(keys) > 2 else ''} is not read: their "
            f"method is {own!r}; write method={method!r} too"
        )
        for (name, value, own, method), keys in found.items()
    ]


def _objections(config: Config, sites: Iterable[SiteInfo], quantizers: Mapping[str, PlannedQuantizer]) -> list[str]:
    """A sentence for each field of a spec that an override gave another value than the target takes."""
    profile, unchanged, named = config.profile, replace(config, overrides=()), {site.name: site for site in sites}

    def is_overridden(planned: PlannedQuantizer, field: str) -> bool:  # not by a rule of the target itself, as for tables
        site = named.get(planned.reader or "") if planned.role == "weight" else None
        if site is None:
            return True
        before, after = (getattr(given.spec_of(site, "weight"), field, None) for given in (unchanged, config))
        return bool(before != after)

    return [
        f"{key!r} has {name}={got} by an override; target {profile.name!r} takes {name}={value}"
        for key, planned in quantizers.items()
        if not planned.spec.is_float
        for name, value in profile.decided("weight" if planned.role == "weight" else "activation").items()
        if (got := getattr(planned.spec, name)) != value and is_overridden(planned, name)
    ]


def _not_reached(names: Collection[str]) -> list[str]:
    """A sentence on layers that no example call reached; none without any."""
    if not names:
        return []
    shown = [name.removesuffix(".output") for name in [*names][:4]]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return [
        Telling(
            f"no example input reaches {', '.join(map(repr, shown))}{more}: only weights are quantized there, and nothing in a "
            "thread that a forward starts. Give a call that does reach them as an example too, QuantSim(model, [example, other])"
        )
    ]
