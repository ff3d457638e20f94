"""Tensors that share one scale because an operation, a concatenation as a rule, takes them together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qsim.graph.plan.dataflow import Dataflow
from qsim.graph.record.routes import Site
from qsim.graph.record.tape import Origin

Made = tuple[Site | str, Any]  # a tensor: the site that makes it and which of its results, or "input" and its slot


def made(flow: Dataflow, origin: Origin) -> Made | None:
    """Which tensor an origin is, whichever call made it; None for what belongs to no one place."""
    if origin.kind in ("step", "stale"):
        return flow.site_of[origin.source], origin.output
    return ("input", origin.source) if origin.kind == "input" else None


def shared_scales(flow: Dataflow, sites: Sequence[Site]) -> dict[Made, Site]:
    """For each tensor that shares its scale, the last of the operations (`sites`, in order) that it shares it through.

    Operands and result of an operation share one scale, so operations that read each other's results, and those that have an
    operand in common, do. What only moves values between them changes nothing: a recording looks through it.
    """
    last: dict[Made, Site] = {}
    members: dict[Site, set[Made]] = {}
    for site in sites:
        tensors = {made(flow, origin) for origins in site.operands().values() for origin in origins if flow.kind(origin) != "const"}
        joined: set[Made] = {tensor for tensor in tensors if tensor is not None} | {(site, 0)}
        for earlier in {last[tensor] for tensor in joined if tensor in last}:
            joined |= members.pop(earlier)
        members[site] = joined
        last.update(dict.fromkeys(joined, site))
    return last
