"""Stacks of weights: the experts of a mixture in one parameter, cut out of it by an index, or multiplied by a kernel that no mode meets.

Each member is a weight of its own, as that of a linear layer is, with scales of its own. It belongs to the module that has the parameter,
and is quantized there, before it is cut: whichever expert comes when, and whatever reads it. Where a target has products of batches of
matrices in integers, with one scale for each output channel, a parameter that one reads as it is stays the weight of that.
"""

from __future__ import annotations

from dataclasses import replace

from qsim.graph.plan.actions import WEIGHTS_LEFT
from qsim.graph.plan.ledger import Ledger
from qsim.graph.plan.reasons import unmet
from qsim.graph.plan.rules import WeightAxes, weight_axes
from qsim.graph.plan.specs import Specs
from qsim.graph.record.routes import Site
from qsim.graph.record.tape import Slot
from qsim.graph.record.telling import Telling
from qsim.numbers.spec import TensorSpec

LINEAR = "Gemm"  # what a product with a member is, whatever function computes it


class Stacks:
    """Quantizers of stacks of weights."""

    def __init__(self, specs: Specs, ledger: Ledger) -> None:
        self._specs, self._ledger = specs, ledger

    def plan(self, site: Site, slot: Slot) -> bool:
        """Plan an operand if it is a member of a stack: whether it is."""
        found, axes = {step.stacks.get(slot) for step in site.steps}, weight_axes(site.op, slot)
        turned = found.pop() if len(found) == 1 else None
        if turned is None or axes is None:  # nearly always: asked first, since a concatenation may have thousands of operands
            return False
        names = {origin.source for origin in site.operands()[slot]}
        as_it_is = site.visible and slot in site.steps[0].constants and self._specs.placement.weighs(self._specs.flow.infos[site])
        if len(names) != 1 or as_it_is:
            return False
        (name,) = names
        placement, ledger = self._specs.placement, self._ledger
        spec = self._specs.of(site, "weight")
        if not placement.weighs(self._specs.flow.infos[site], LINEAR):
            ledger.leave(name, site.op, f"target {placement.profile.name!r} {WEIGHTS_LEFT} {site.type} in float")
        elif spec is None:
            ledger.leave(name, site.op, self._specs.reason([site], "weight"))
        else:
            ledger.add(name, "weight", stack_spec(spec, _axes(axes, turned), self._specs.shape_of(name)), site.op, name, reader=site.name)
            ledger.actions[site].stacks[slot] = name
            self._tell_of_operands(site)
        return True

    def _tell_of_operands(self, site: Site) -> None:
        """Say what is left in float beside them where no mode meets the product."""
        if not site.visible and self._specs.placement.reads(site, 0) and self._specs.of(site, "activation") is not None:
            self._ledger.notes[
                Telling(
                    f"what {site.name!r} reads stays in float beside quantized weights, because {unmet(site)}. Call "
                    "model.set_experts_implementation('batched_mm') of transformers before, if that is its"
                )
            ] = None


def _axes(axes: WeightAxes, turned: bool) -> WeightAxes:
    """Of the parameter, behind the axis that tells its members apart: `axes` are of the operand, whose last two are a member's."""
    output, input = (axis % 2 for axis in axes)
    return WeightAxes(*(2 - axis if turned else 1 + axis for axis in (output, input)))


def stack_spec(spec: TensorSpec, axes: WeightAxes, shape: tuple[int, ...]) -> TensorSpec:
    """A config's spec of a weight, for a stack of them: each member has the scales that it would have by itself.

    Examples
    --------
    >>> per_channel = stack_spec(TensorSpec(axis=0, method="minmax"), WeightAxes(1, 2), (8, 64, 32))
    >>> per_channel.axis, per_channel.block_size  # one block a row: scales of shape [8, 64, 1]
    (2, 32)
    """
    if not spec.has_scale:
        return spec
    if spec.axis is None:
        return replace(spec, axis=0)
    if isinstance(spec.axis, tuple):
        return replace(spec, axis=tuple(axes[a] if a in (0, 1) else a for a in spec.axis))
    along = 1 if spec.axis == -1 else spec.axis
    if along not in (0, 1):
        return spec
    if spec.block_size is not None:
        return replace(spec, axis=axes[along])
    across = axes[1 - along]
    return replace(spec, axis=across, block_size=shape[across])


def operand_spec(spec: TensorSpec | None, site: Site, slot: Slot) -> TensorSpec | None:
    """A config's spec of what a product reads. A token beside a member of a stack lies along the axis that is summed over: a column, where
    the weight comes first."""
    axes = weight_axes(site.op, slot) if any(step.stacks for step in site.steps) else None
    is_column = axes is not None and axes.input == -2 and spec is not None and spec.is_dynamic and spec.axis == -1
    return replace(spec, axis=-2) if is_column and spec is not None else spec
