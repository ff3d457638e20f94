"""Chains whose results are quantized at their ends, as one container sees them: what has to have run before an end has its quantizer."""

from __future__ import annotations

from typing import NamedTuple

from qsim.graph.plan.actions import QuantizationPlan
from qsim.graph.record.routes import Route, Site


class Link(NamedTuple):
    """A node's place in a chain, whose result is quantized at its end.

    Attributes
    ----------
    before : tuple of int or str, or None
        What was before it there: nodes, and operations of other containers by name. None: nothing, or what is taken may be anything.
    goes_on : bool
        Whether one of the same container comes next.
    name : str
        By which another container knows it, if one there comes next.
    between : frozenset of str
        Paths of the modules in which it is and what was before it is not, or the other way round: their hooks come between the two.
    """

    before: tuple[int | str, ...] | None
    goes_on: bool
    name: str
    between: frozenset[str] = frozenset()


def links_of(route: Route, plan: QuantizationPlan) -> dict[int, Link]:
    """The links of chains that run as one, by node. A chain may begin in more than one way."""
    nodes: dict[Site, list[int]] = {}
    for at, site in enumerate(route.sites):
        nodes.setdefault(site, []).append(at)
    chains: dict[Site, list[Site]] = {}
    for site, following in plan.fused.items():
        chains.setdefault(following, []).append(site)
    before: dict[int, list[int | str]] = {}
    between: dict[int, frozenset[str]] = {}
    names: dict[int, str] = {}
    for following, first in chains.items():
        if not any(site in nodes for site in (following, *first)) or not _follows_these_alone(following, first):
            continue
        for site in first:
            for at in nodes.get(following, ()):
                before.setdefault(at, []).extend(nodes.get(site, [site.name]))
                between[at] = between.get(at, frozenset()) | (_modules_around(site) ^ _modules_around(following))
            names.update({} if following in nodes else dict.fromkeys(nodes.get(site, ()), site.name))
    goes_on = {at for found in before.values() for at in found}
    return {
        at: Link(tuple(before[at]) if at in before else None, at in goes_on, names.get(at, ""), between.get(at, frozenset()))
        for at in range(len(route.sites))
        if at in before or at in goes_on or at in names
    }


def _modules_around(site: Site) -> frozenset[str]:
    """Paths of the modules in which an operation runs."""
    parts = (site.steps[0].leaf or site.steps[0].path).split(".")
    return frozenset(".".join(parts[:end]) for end in range(1, len(parts) + 1))


def _follows_these_alone(following: Site, first: list[Site]) -> bool:
    """Whether all that the examples hand to an operation comes from these, and a mode meets them: it does not in hooks."""
    taken = {origin.source for slot, origins in following.operands().items() if slot in (0, "input") for origin in origins}
    return taken <= {step for site in first for step in site.steps} and all(site.visible for site in first)
