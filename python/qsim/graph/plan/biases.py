"""Biases as integer kernels hold them: in int32, with the scale of the products of input and weight."""

from __future__ import annotations

from qsim.graph.plan.actions import PlannedBias
from qsim.graph.plan.ledger import Ledger
from qsim.graph.plan.placement import Placement
from qsim.graph.plan.rules import is_bias
from qsim.graph.record.routes import Site

FITTING_BITS = 16  # of input and weight together: steps of wider products are so fine that int32 would clip ordinary biases


def plan_bias(site: Site, ledger: Ledger, wanted: bool | None, placement: Placement, *, is_half: bool) -> None:
    """Plan the bias of a site whose operands are planned already, if it has one.

    Parameters
    ----------
    site : Site
    ledger : Ledger
    wanted : bool or None
        `Config.bias`.
    placement : Placement
    is_half : bool
        Whether the site runs in half precision: then its bias is a constant as others are.
    """
    operands = site.operands()
    biases = [slot for slot in operands if is_bias(site.op, slot, site.dims(slot))]
    for slot in biases if not is_half else ():
        origin = operands[slot][0]
        name = origin.source if isinstance(origin.source, str) else f"{site.name}.input[{slot}]"
        if {ledger.flow.kind(found) for found in operands[slot]} != {"const"}:
            continue
        if reason := placement.bias_reason(site, wanted):
            ledger.leave(name, site.op, reason)
            continue
        uses = ledger.actions[site].operands
        weights = [found for found in uses if ledger.quantizers[uses[found].key].role == "weight"]
        others = [found for found in operands if found not in (*weights, *biases)]
        scales = [uses[weights[0]].key, ledger.key_of(site, others[0])] if len(weights) == len(others) == 1 else [None]
        if not isinstance(origin.source, str):
            ledger.leave(name, site.op, "bias in float: computed anew in each call")
            continue
        if len(biases) > 1:
            ledger.leave(name, site.op, f"bias in float: {site.op} adds several biases in one call, each to a sum of its own")
            continue
        if not origin.direct or not all(key and ledger.has_one_scale(key) for key in scales):
            ledger.leave(name, site.op, "bias in float: input and weight have no grids to multiply")
            continue
        bits = [ledger.quantizers[str(key)].spec.bits for key in scales]
        if wanted is None and sum(bits) > FITTING_BITS:
            ledger.leave(name, site.op, f"bias in float: products of {bits[0]} and {bits[1]} bits do not fit into int32 (Config.bias)")
            continue
        ledger.actions[site].bias = PlannedBias(slot, name, site.op, input=str(scales[1]), weight=str(scales[0]))
