"""Savings: work that the recorded graph shows to be superfluous. They change no bit of a result and no gradient.

Pure, as the plan is: from the tape and the plan to what may be saved at each site. What the record cannot know (is a gradient needed,
which zero point was calibrated) `qsim.graph.frugal` asks when the model runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from qsim.graph.actions import Plan
from qsim.graph.functions import name_of
from qsim.graph.routes import Site
from qsim.graph.tape import Slot, Step, Tape


def _table(names: str) -> frozenset[str]:
    return frozenset(names.split())


# Functions, by `name_of`, whose result lies in memory that they allocated for it, and whose backward pass does not read it.
_UNREAD = _table(
    """
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d linear bilinear matmul rmatmul bmm mm mv addmm baddbmm
    addbmm addmv embedding add radd sub rsub mul rmul div truediv batch_norm layer_norm group_norm avg_pool1d avg_pool2d avg_pool3d
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d mean cat concat concatenate stack interpolate gelu silu mish softplus
    leaky_relu hardtanh relu6
    """
)
_UNREAD_IN_PLACE = _table("add sub")  # those of them that do not read it either when they overwrite an operand
# The same, but their backward pass reads the result.
_READ = _table("relu sigmoid tanh softmax log_softmax exp sqrt rsqrt elu selu celu")
# With a clamp of numbers in them; what they compute is not altered by a quantizer that clamps as tightly.
RECTIFIERS = _table("relu relu6 hardtanh")


@dataclass(frozen=True)
class Saving:
    """What may be saved at one site.

    Attributes
    ----------
    kept : frozenset of Slot
        Operands that are parameters or buffers: quantized once, not in each call, while nothing needs a gradient.
    fresh : bool
        The outputs lie in memory that only their reader will see: they may be quantized in place while nothing needs a gradient.
    unread : bool
        So they may where a gradient is needed: no backward pass reads them.
    rectifier : str or None
        The function's name, if it may be left to a quantizer that clamps as tightly: "relu", "relu6" or "hardtanh".
    consumes : bool
        The operand that comes first is fresh in this sense, and the step is its only reader: it may be overwritten.
    consumes_unread : bool
        So it may where a gradient is needed.
    """

    kept: frozenset[Slot] = frozenset()
    fresh: bool = False
    unread: bool = False
    rectifier: str | None = None
    consumes: bool = False
    consumes_unread: bool = False


def find_savings(tape: Tape, plan: Plan) -> dict[Site, Saving]:
    """What may be saved at the sites of a plan.

    Parameters
    ----------
    tape : Tape
        From which `plan` was made.
    plan : Plan

    Returns
    -------
    dict of Site to Saving
        Sites at which nothing is saved are not in it.
    """
    quantized = {(step, i) for site, actions in plan.actions.items() for step in site.steps for i in actions.outputs}
    found = {}
    for site, actions in plan.actions.items():
        if any(step.transformed for step in site.steps):
            continue
        kept = {slot for slot, use in actions.operands.items() if plan.quantizers[use.key].parameter is not None}
        if actions.bias is not None and all(actions.bias.slot in step.constants for step in site.steps):
            kept.add(actions.bias.slot)
        outputs = set(actions.outputs)
        fresh = bool(outputs) and all(_is_fresh(tape, step) for step in site.steps)
        unread = fresh and all(_is_fresh(tape, step, unread=True) for step in site.steps)
        saving = Saving(frozenset(kept), fresh, unread)
        if fresh and outputs == {0} and site.op in RECTIFIERS:
            unseen = all(step.changed or not _sources(step) & quantized for step in site.steps)  # hooks of quantizers look at tensors too
            consumes, consumes_unread = (unseen and all(_is_handed_over(tape, step, u) for step in site.steps) for u in (False, True))
            saving = replace(saving, rectifier=site.op, consumes=consumes, consumes_unread=consumes_unread)
        if saving != Saving():
            found[site] = saving
    return found


def _sources(step: Step) -> set[tuple[Step, int]]:
    return {(o.source, o.output) for found in step.operands.values() for o in found if o.kind == "step"}


def _is_fresh(tape: Tape, step: Step, *, unread: bool = False) -> bool:
    """Whether the results of `step` lie in memory that nobody else sees: it allocated them, or the sole producer of what it overwrites.

    `unread`: and no backward pass reads them either.
    """
    name = name_of(step.func)
    if name not in _UNREAD | _READ or (unread and name not in (_UNREAD_IN_PLACE if step.changed else _UNREAD)):
        return False
    if not step.changed:
        return True
    if any(reader.origin.kind == "stale" for i in range(step.outputs) for reader in tape.readers(step, i)):
        return False  # read under its old name
    return _is_handed_over(tape, step, unread)


def _is_handed_over(tape: Tape, step: Step, unread: bool) -> bool:
    """Whether the first operand may be overwritten, and no other is: the fresh result of a step of the same container with one reader."""
    slot = next(iter(step.operands), None)
    if slot not in (0, "input") or not step.changed <= {slot} or len(step.operands[slot]) != 1:
        return False
    (origin,) = step.operands[slot]
    if origin.kind != "step" or not origin.direct or origin.source.path != step.path:
        return False
    alone = all(reader.step is step and reader.slot == slot for reader in tape.readers(origin.source, origin.output))
    return alone and _is_fresh(tape, origin.source, unread=unread)
