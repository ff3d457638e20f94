"""Chains whose results are quantized at their ends, as one container sees them: what has to have run before an end has its quantizer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple, TypeVar

from qsim.graph.plan.actions import QuantizationPlan
from qsim.graph.record.routes import Route, Site
from qsim.graph.record.tape import Slot

T = TypeVar("T")


Passage = tuple[str, bool]  # a module by its path, and whether it is entered there: left otherwise


class Link(NamedTuple):
    """A node's place in a chain, whose result is quantized at its end.

    Attributes
    ----------
    before : tuple of int or str, or None
        What was before it there: nodes, and operations of other containers by name. None: nothing, or what is taken may be anything.
    goes_on : bool
        Whether one of the same container comes next.
    name : str
        By which another container knows it, if one there comes next, or another call of this one, which reads what is kept for it.
    between : frozenset of (str, bool)
        Paths of the modules that are left between what was before it and it (False), and that are entered (True): hooks on what those
        return and on what these take come between the two.
    remembered : str
        By which those know it that read the memory of its result, and quantize it there; "": there are none.
    """

    before: tuple[int | str, ...] | None
    goes_on: bool
    name: str
    between: frozenset[Passage] = frozenset()
    remembered: str = ""


class NodeCall(NamedTuple):
    """A call of a node: the number of its key, which of the calls with that key, and the node."""

    key: int
    ordinal: int
    node: int


def links_of(route: Route, plan: QuantizationPlan, kept: Collection[Site]) -> dict[int, Link]:
    """The links of chains that run as one, by node. A chain may begin in more than one way. `kept`: see `kept_for_others`."""
    nodes: dict[Site, list[int]] = {}
    for at, site in enumerate(route.sites):
        nodes.setdefault(site, []).append(at)
    before: dict[int, list[int | str]] = {}
    between: dict[int, frozenset[Passage]] = {}
    names: dict[int, str] = {}
    for following, first in plan.runs_as_one.items():
        if not any(site in nodes for site in (following, *first)):
            continue
        for site in first:
            for at in nodes.get(following, ()):
                before.setdefault(at, []).extend(nodes.get(site, [site.name]))
                between[at] = between.get(at, frozenset()) | _passed(site, following)
            names.update({} if following in nodes else dict.fromkeys(nodes.get(site, ()), site.name))
    for maker in kept:
        names.update(dict.fromkeys(nodes[maker], maker.name))
    goes_on = {at for found in before.values() for at in found}
    remembered = {at: site.name for site in frozenset().union(*plan.memory.values()) for at in nodes.get(site, ())}
    at_all = [at for at in range(len(route.sites)) if at in before or at in goes_on or at in names or at in remembered]
    ends = {at: tuple(found) for at, found in before.items()}
    return {at: Link(ends.get(at), at in goes_on, names.get(at, ""), between.get(at, frozenset()), remembered.get(at, "")) for at in at_all}


def calls_before(route: Route, plan: QuantizationPlan, kept: Collection[Site]) -> dict[int, dict[Slot, list[NodeCall | str]]]:
    """Operands of nodes that are quantized where they are read, with what makes them: the calls of the same container; of others those by
    name whose chain goes on with what no mode meets, and by name what another call of this one keeps (`kept`, of `kept_for_others`)."""
    calls = _calls(route)
    named = {site for following, first in plan.runs_as_one.items() if not following.visible for site in first}
    found: dict[int, dict[Slot, list[NodeCall | str]]] = {}
    for (site, slot), makers in plan.after.items():
        if all(maker in calls or maker in named for maker in makers):
            by_maker = [[maker.name] if maker in kept or maker not in calls else calls[maker].values() for maker in makers]
            for node in calls.get(site, ()):
                found.setdefault(node, {})[slot] = [call for found_by in by_maker for call in found_by]
    return found


def kept_for_others(route: Route, plan: QuantizationPlan) -> set[Site]:
    """What a container makes in one call and reads in another, as a normalization keeps what takes it back: no counts of a call tell it."""
    calls, keys = _calls(route), list(route.nodes)
    recorded = [call for found in route.calls.values() for call in found]
    kept = set()
    for (site, _), makers in plan.after.items():
        for maker in makers & calls.keys() if site in calls else ():
            both = [(keys[a.key], keys[b.key]) for a in calls[site].values() for b in calls[maker].values()]
            if not any(call[a] and call[b] for call in recorded for a, b in both):
                kept.add(maker)
    return kept


def _calls(route: Route) -> dict[Site, dict[int, NodeCall]]:
    """The calls of each operation of a container, by node."""
    calls: dict[Site, dict[int, NodeCall]] = {}
    for key, nodes in enumerate(route.nodes.values()):
        for ordinal, node in enumerate(nodes):
            if node is not None:
                calls.setdefault(route.sites[node], {})[node] = NodeCall(key, ordinal, node)
    return calls


def memory_read(route: Route, plan: QuantizationPlan) -> dict[int, dict[Slot, tuple[str, ...]]]:
    """Operands of nodes that are quantized where they are read, with the names of those whose memory that is."""
    return _at_nodes(route, {where: tuple(maker.name for maker in makers) for where, makers in plan.memory.items()})


def reads_again(route: Route, plan: QuantizationPlan) -> tuple[dict[int, dict[Slot, str]], dict[int, dict[Slot, str]]]:
    """Operands of nodes that others read too, with a name for each such tensor: where it is read first, and where it is read again."""
    names = {where: f"{where[0].name}.input[{where[1]}]" for where in plan.again.values()}
    return _at_nodes(route, names), _at_nodes(route, {where: names[first] for where, first in plan.again.items()})


def _at_nodes(route: Route, found: Mapping[tuple[Site, Slot], T]) -> dict[int, dict[Slot, T]]:
    """What is known of operands of sites, by node."""
    of_sites: dict[Site, dict[Slot, T]] = {}
    for (site, slot), known in found.items():
        of_sites.setdefault(site, {})[slot] = known
    return {at: of_sites[site] for at, site in enumerate(route.sites) if site in of_sites}


def passed_link(site: Site, plan: QuantizationPlan) -> Link | None:
    """The link of what no mode meets, where that ends a chain: what is before it by name."""
    if (first := plan.runs_as_one.get(site)) is None:
        return None
    between = frozenset[Passage]().union(*(_passed(other, site) for other in first))
    return Link(tuple(other.name for other in first), False, site.name, between)


def ends_between(route: Route, plan: QuantizationPlan) -> dict[tuple[int, Slot], list[tuple[Link, str]]]:
    """Operands of nodes that are quantized where they are read, with the ends of chains that make them, which no mode meets: links and
    functions."""
    at: dict[Site, list[int]] = {}
    for node, site in enumerate(route.sites):
        at.setdefault(site, []).append(node)
    ends = {key: [(link, site.op) for site in found if (link := passed_link(site, plan))] for key, found in plan.through.items()}
    return {(node, slot): links for (site, slot), links in ends.items() if links for node in at.get(site, ())}


def _passed(first: Site, then: Site) -> frozenset[Passage]:
    left, entered = _modules_around(first), _modules_around(then)
    return frozenset({*((path, False) for path in left - entered), *((path, True) for path in entered - left)})


def _modules_around(site: Site) -> frozenset[str]:
    """Paths of the modules in which an operation runs."""
    parts = (site.steps[0].leaf or site.steps[0].path).split(".")
    return frozenset(".".join(parts[:end]) for end in range(1, len(parts) + 1))
