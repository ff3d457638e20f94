"""Which operations run in half precision."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping

from qsim.graph.plan.actions import Actions
from qsim.graph.plan.dataflow import Dataflow
from qsim.graph.plan.specs import Specs, is_half
from qsim.graph.record.handing_on import Flags
from qsim.graph.record.routes import Site
from qsim.numbers.spec import TensorSpec
from qsim.operations.functions import CREATION
from qsim.operations.half import Half


def find_halves(specs: Specs, accumulator: str, actions: Mapping[Site, Actions]) -> dict[Site, Half]:
    """What runs operations in half precision, those that only move values too: numbers that they take are rounded.

    Parameters
    ----------
    specs : Specs
    accumulator : str
        As `Profile.half_accumulator`.
    actions : mapping of Site to Actions
    """
    flow, in_float = specs.flow, _sources_in_float(specs)
    found = {site: specs.of(site, "activation") for site in flow.sites if not flow.is_constant(site) or site.moves}
    return {
        site: Half(
            site.op,
            spec.dtype,
            narrow=accumulator == spec.dtype,
            writes=any(0 in step.changed for step in site.steps),
            written_in_float=not site.moves and specs.is_written_in_float(site, 0),
            keys=_keys(site, flow, actions),
        )
        for site, spec in found.items()
        if spec is not None and is_half(spec) and (not site.moves or _rounds_numbers(site, flow, found, in_float))
    }


def _keys(site: Site, flow: Dataflow, actions: Mapping[Site, Actions]) -> tuple[str, ...]:
    """Of the quantizers at a site, or at others of its chain; of those beside it, if it only moves values."""
    left, seen = [site], {site}
    while left:
        there = [each for one in left for each in flow.chain_of(one)]
        found = [key for each in there if each in actions for key in actions[each].standing()]
        if found:
            return tuple(dict.fromkeys(found))
        left = [each for one in left if one.moves for each in _beside(one, flow) if each not in seen]
        seen.update(left)
    return ()


Source = tuple[str, object]  # kind and source of an origin, however it was moved
_CONSTANTS: frozenset[Source] = frozenset({("const", None), ("other", None), ("other", Flags)})


def _rounds_numbers(site: Site, flow: Dataflow, found: Mapping[Site, TensorSpec | None], in_float: Collection[Source]) -> bool:
    """Whether what only moves values rounds the numbers that it puts in: if what it reads was computed in half precision. What no
    operation has computed is rounded by each that reads it, and there as a whole, where one of them is left in float."""
    if makers := _makers(site, flow):
        return all(is_half(found.get(maker)) for maker in makers)
    origins = () if site.op in CREATION else itertools.chain(*site.operands().values())
    handed_on = {(origin.kind, origin.source) for origin in origins} or _CONSTANTS
    return handed_on.isdisjoint(in_float) and all(is_half(found.get(reader)) for reader in _beside(site, flow))


def _makers(site: Site, flow: Dataflow) -> set[Site]:
    """The operations on data that computed what a site hands on, however it was moved on the way."""
    found, seen, left = set[Site](), {site}, [site]
    while left:
        sources = {flow.site_of[o.source] for o in itertools.chain(*left.pop().operands().values()) if o.kind in ("step", "stale")} - seen
        seen |= sources
        left += [source for source in sources if source.moves]
        found |= {source for source in sources if not (source.moves or flow.is_constant(source))}
    return found


def _sources_in_float(specs: Specs) -> set[Source]:
    """What operations on data read that are left in float, where no operation has computed it."""
    readers = [site for site in specs.flow.sites if not (site.moves or specs.flow.is_constant(site))]
    origins = (o for site in readers if specs.of(site, "activation") is None for o in itertools.chain(*site.operands().values()))
    return {(origin.kind, origin.source) for origin in origins if origin.kind not in ("step", "stale")}


def _beside(site: Site, flow: Dataflow) -> set[Site]:
    """Whose precision a site has that only moves values: of what it reads, or of who reads the numbers that it makes."""
    origins = {origin for found in site.operands().values() for origin in found if origin.kind in ("step", "stale")}
    makers = {flow.site_of[origin.source] for origin in origins}
    made = {tensor for step in site.steps for tensor in step.made}
    return makers or {flow.site_of[step] for step in flow.tape.steps if not made.isdisjoint(step.same.values())}
