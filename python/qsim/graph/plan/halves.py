"""Which operations run in half precision."""

from __future__ import annotations

from qsim.graph.plan.dataflow import Dataflow
from qsim.graph.plan.specs import Specs, is_half
from qsim.graph.record.routes import Site
from qsim.operations.half import Half


def find_halves(specs: Specs, accumulator: str) -> dict[Site, Half]:
    """What runs operations in half precision, those that only move values too: numbers that they take are rounded.

    Parameters
    ----------
    specs : Specs
    accumulator : str
        As `Profile.half_accumulator`.
    """
    flow = specs.flow
    found = {site: specs.of(site, "activation") for site in flow.sites if not flow.is_constant(site) or site.moves}
    return {
        site: Half(site.op, spec.dtype, narrow=accumulator == spec.dtype)
        for site, spec in found.items()
        if spec is not None and is_half(spec) and (not site.moves or all(is_half(found.get(other)) for other in _beside(site, flow)))
    }


def _beside(site: Site, flow: Dataflow) -> set[Site]:
    """Whose precision a site has that only moves values: of what it reads, or of who reads the numbers that it makes."""
    origins = {origin for found in site.operands().values() for origin in found if origin.kind in ("step", "stale")}
    makers = {flow.site_of[origin.source] for origin in origins}
    made = {tensor for step in site.steps for tensor in step.made}
    return makers or {flow.site_of[step] for step in flow.tape.steps if not made.isdisjoint(step.same.values())}
