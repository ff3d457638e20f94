"""What happens at the calls of a container: nodes, how they follow each other, and what of their operands is known."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from qsim.graph.execute.inputs import as_it_is
from qsim.graph.execute.links import Link
from qsim.graph.execute.lowered import LiveMaker, Quantize, planned_site
from qsim.graph.execute.shortcuts import DirectOperand, InPlace, Kept, Rectifier
from qsim.graph.plan.actions import Actions, QuantizationPlan, Readers
from qsim.graph.plan.savings import Saving
from qsim.graph.record.containers import ParameterOf
from qsim.graph.record.tape import Slot
from qsim.operations.gates import Gated
from qsim.operations.half import Half
from qsim.quantizers.bias import BiasQuantizer
from qsim.quantizers.quantizer import Quantizer

# In place of the key of a node: a call that the examples did not show; one in a hook; one where nothing is to be done.
STRANGE, HOOK, QUIET = -1, -2, -3
PASSED = -4  # and below: calls that lead nowhere, and whose results are quantized where they are read

WrittenOut = Half | Gated


def is_on(written_out: WrittenOut | None) -> bool:
    """Whether an operation runs in another way than it was written."""
    return written_out is not None and not (isinstance(written_out, Half) and not written_out.is_on)


class Node(NamedTuple):
    """What happens at one call: what quantizes operands, by slot, and outputs, by index; what may take the call's place; where
    it stands in a chain; how it is written out, in half precision or with a quantized gate; whether it may write into its first operand;
    who alone reads its result, where that is in float for it, or what it changed in place, by a name from before."""

    operands: tuple[tuple[Slot, Quantize], ...] = ()
    outputs: tuple[tuple[int, Quantize], ...] = ()
    instead: Rectifier | None = None
    link: Link | None = None
    written_out: WrittenOut | None = None
    overwrites: bool = False
    left: Readers | None = None
    older: Readers | None = None


@dataclass(frozen=True)
class Apart:
    """Quantizes what a function that only moves values is given, and hands it another tensor in any case: `dropout` in evaluation returns
    that, and programs ask ``y is x``, torch's attention among them. A quantizer that observes, or is off, has no other tensor itself."""

    quantize: Quantize

    def __call__(self, x: Tensor) -> Tensor:
        found = self.quantize(x)
        return as_it_is(found) if found is x else found


class Nodes(NamedTuple):
    """The nodes of a container, thrice: what they do by the plan, with what may be saved, and with marks in place of quantizers."""

    plain: list[Node]
    saving: list[Node]
    with_marks: list[Node]


def rename(nodes: Nodes, renaming: Collection[int]) -> None:
    """Where readers know what is changed in place by its older name, the result is another tensor, whether it is quantized or not."""
    for each in nodes:
        for at in renaming:
            each[at] = each[at]._replace(outputs=each[at].outputs or ((0, as_it_is),))


def own_weight(path: str, plan: QuantizationPlan, actions: Actions) -> tuple[Slot, ParameterOf] | None:
    """Where a site takes a parameter or buffer of its container as a constant, and how to get that from the container."""
    prefix = f"{path}." if path else ""
    for slot, use in actions.operands.items():
        planned = plan.quantizers[use.key]
        if planned.role in ("weight", "constant") and planned.parameter is not None and planned.parameter.startswith(prefix):
            return slot, ParameterOf(planned.parameter.removeprefix(prefix))
    return None


def weights_read(plan: QuantizationPlan, actions: Sequence[Actions]) -> list[tuple[tuple[Slot, str], ...]]:
    """Where each site reads quantized weights, and the keys of their quantizers."""
    weights = set(plan.weights.values())
    return [tuple((slot, use.key) for slot, use in found.operands.items() if use.key in weights) for found in actions]


def own_weights(path: str, plan: QuantizationPlan, quantizers: Mapping[str, Quantizer]) -> list[tuple[ParameterOf, str, Quantizer, bool]]:
    """How to get the weights inside a container from it, and what is rounded with them; what quantizes each, with its key; and whether it
    is a weight."""
    prefix = f"{path}." if path else ""
    own = {name: key for name, key in {**plan.weights, **plan.rounded}.items() if name.startswith(prefix)}
    return [(ParameterOf(name.removeprefix(prefix)), key, quantizers[key], name in plan.weights) for name, key in own.items()]


def saving_node(actions: Actions, saving: Saving, quantizers: Mapping[str, Quantizer], kept: dict[tuple[str, ...], Kept]) -> Node:
    """What stands at a site as planned, with what may be saved. `kept`: what all sites keep: those that read one parameter keep it once."""
    planned, outputs = planned_site(actions, LiveMaker(quantizers))
    operands, instead = dict(planned), None
    for slot, use in actions.operands.items():
        if not quantizers[use.key].spec.learnable:
            operands[slot] = DirectOperand(quantizers[use.key], use.observes)
    for slot in saving.kept & actions.operands.keys():
        use = actions.operands[slot]
        parameter = kept.setdefault((use.key,), Kept(quantizers[use.key]))
        operands[slot] = parameter if use.observes else parameter.unobserved
    if (bias := actions.bias) is not None and bias.slot in saving.kept:
        shared = Kept(BiasQuantizer(quantizers[bias.input], quantizers[bias.weight]))
        operands[bias.slot] = kept.setdefault((bias.parameter, bias.input, bias.weight), shared)
    if saving.in_place:
        outputs = tuple((index, InPlace(quantizers[key])) for index, key in actions.outputs.items())
    if saving.rectifier is not None:
        instead = Rectifier(quantizers[actions.outputs[0]], saving.rectifier, saving.changes)
    return Node(tuple(operands.items()), outputs, instead, overwrites=saving.overwrites)
