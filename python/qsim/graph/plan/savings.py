"""Savings: work that the recorded graph shows to be superfluous. They change no bit of a result and no gradient.

Pure, as the plan is: from the plan to what may be saved at each site. What no recording can know (whose memory is it, is a gradient
needed, which zero point was calibrated) `qsim.graph.execute.shortcuts` asks when the model runs, in each call.
"""

from __future__ import annotations

from dataclasses import dataclass

from qsim.graph.plan.actions import Actions, QuantizationPlan
from qsim.graph.record.routes import Site
from qsim.graph.record.tape import Slot

# With a clamp of numbers in them; what they compute is not altered by a quantizer that clamps as tightly.
RECTIFIERS = frozenset({"relu", "relu6", "hardtanh"})


@dataclass(frozen=True)
class Saving:
    """What may be saved at one site.

    Attributes
    ----------
    kept : frozenset of Slot
        Operands that are parameters or buffers: quantized once, not in each call, while nothing needs a gradient.
    in_place : bool
        The outputs may be quantized in the memory that they were computed in, if that is nobody else's.
    rectifier : str or None
        The function's name, if it may be left to a quantizer that clamps as tightly: "relu", "relu6" or "hardtanh".
    changes : bool
        The operation writes into its first operand.
    overwrites : bool
        It does, or may be made to: whether somebody reads that operand later has to be asked before.
    """

    kept: frozenset[Slot] = frozenset()
    in_place: bool = False
    rectifier: str | None = None
    changes: bool = False
    overwrites: bool = False


def kept_operands(actions: Actions, plan: QuantizationPlan) -> frozenset[Slot]:
    """Where a site reads parameters, whose grids may be kept. What is computed is another tensor in each call."""
    return frozenset(slot for slot, use in actions.operands.items() if plan.quantizers[use.key].parameter is not None)


def find_savings(plan: QuantizationPlan) -> dict[Site, Saving]:
    """What may be saved at the sites of a plan. Sites at which nothing is saved are not in it."""
    found = {}
    for site, actions in plan.actions.items():
        if any(step.transformed for step in site.steps):
            continue
        kept = set(kept_operands(actions, plan))
        if actions.bias is not None and all(actions.bias.slot in step.constants for step in site.steps):
            kept.add(actions.bias.slot)
        outputs = bool(actions.outputs)
        rectifier = site.op if set(actions.outputs) == {0} and site.op in RECTIFIERS else None
        changes = outputs and any(step.changed for step in site.steps)
        saving = Saving(frozenset(kept), outputs, rectifier, changes, overwrites=changes or rectifier is not None)
        if saving != Saving():
            found[site] = saving
    return found
