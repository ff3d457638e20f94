"""Which gates are quantized: those of activations ``x * gate(x)`` that a runtime computes in two integer kernels."""

from __future__ import annotations

from qsim.config.profile import Profile, selects
from qsim.graph.plan.ledger import Ledger
from qsim.operations.gates import GATES, RANGE

_BITS = 8  # integer kernels take no more, and clip to all of them


def plan_gates(ledger: Ledger, profile: Profile) -> None:
    """Quantize gates where operand and result of their activations have 8 bits and one scale."""
    for site in ledger.flow.sites:
        if site.op not in GATES or not selects(profile.gates, site.type):
            continue
        result = ledger.grids.get((site, 0))
        keys = [*(ledger.key_of(site, slot) for slot in site.operands()), result]
        specs = [ledger.quantizers[key].spec for key in keys if key is not None]
        fit = [spec for spec in specs if not (spec.is_float or spec.is_dynamic) and spec.bits == _BITS and spec.axis is None]
        if result is not None and len(fit) == len(keys) == 2:
            ledger.actions[site].gate = f"{site.name}.gate"
            ledger.add_before(result, f"{site.name}.gate", "gate", fit[-1], site.op, RANGE)
