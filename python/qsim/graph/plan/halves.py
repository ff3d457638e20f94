"""Which operations run in half precision."""

from __future__ import annotations

from collections.abc import Mapping

from qsim.graph.plan.actions import Actions
from qsim.graph.plan.dataflow import Dataflow
from qsim.graph.plan.specs import Specs, is_half
from qsim.graph.record.routes import Site
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
    flow = specs.flow
    found = {site: specs.of(site, "activation") for site in flow.sites if not flow.is_constant(site) or site.moves}
    return {
        site: Half(
            site.op,
            spec.dtype,
            narrow=accumulator == spec.dtype,
            writes=any(0 in step.changed for step in site.steps),
            keys=_keys(site, flow, actions),
        )
        for site, spec in found.items()
        if spec is not None and is_half(spec) and (not site.moves or all(is_half(found.get(other)) for other in _beside(site, flow)))
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


def _beside(site: Site, flow: Dataflow) -> set[Site]:
    """Whose precision a site has that only moves values: of what it reads, or of who reads the numbers that it makes."""
    origins = {origin for found in site.operands().values() for origin in found if origin.kind in ("step", "stale")}
    makers = {flow.site_of[origin.source] for origin in origins}
    made = {tensor for step in site.steps for tensor in step.made}
    return makers or {flow.site_of[step] for step in flow.tape.steps if not made.isdisjoint(step.same.values())}
