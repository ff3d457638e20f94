"""What a traced graph has marks on, and whether a target can express it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from torch import Tensor

from qsim.graph.execute.marks import BIAS, QUANTIZED, ROUNDED
from qsim.quantizers.quantizer import Quantizer
from qsim.trace.capture import Program
from qsim.trace.runtimes import Runtime

_BROKEN = "holds NaN or Inf, which integers cannot: mend it, or leave it in float"


@dataclass(frozen=True)
class MarkUses:
    """The quantizers that a traced graph names.

    Attributes
    ----------
    uses : dict of str to set of bool
        Each quantizer, in the order of the graph: whether it stands at constants (True), at activations (False), or at both.
    biases : list of (str, str, str)
        Each int32 bias: the name of its parameter, and the quantizers of the operands that are multiplied.
    formats : set of str
        The float formats that operations fall back to.
    """

    uses: dict[str, set[bool]]
    biases: list[tuple[str, str, str]]
    formats: set[str]

    @classmethod
    def of(cls, program: Program) -> MarkUses:
        """What the marks of a program say."""
        given = set(program.inputs)
        targets = {spec.arg.name: str(spec.target) for spec in program.exported.graph_signature.input_specs}
        uses: dict[str, set[bool]] = {}
        biases = []
        for node in program.exported.graph.nodes:
            if node.op == "call_function" and node.target is QUANTIZED:
                operand, key = node.args
                uses.setdefault(key, set()).add(operand.op == "placeholder" and operand not in given)
            elif node.op == "call_function" and node.target is BIAS:
                operand, input, weight = node.args
                biases.append((targets.get(operand.name, operand.name), input, weight))
        calls = [node for node in program.exported.graph.nodes if node.op == "call_function"]
        return cls(uses, biases, {node.args[1] for node in calls if node.target is ROUNDED})


def per_channel(quantizers: Mapping[str, Quantizer]) -> set[str]:
    """Quantizers that mean certain axes of the tensors they stand at, or all there is of them."""
    return {key for key, quantizer in quantizers.items() if quantizer.spec.axis is not None or quantizer.spec.is_dynamic}


def not_finite(program: Program, quantizers: Mapping[str, Quantizer], stored: Callable[[str], Tensor]) -> list[str]:
    """What becomes integers, and holds NaN or Inf: quantizers of weights, by their keys, and biases, by the names of their parameters.

    Parameters
    ----------
    program : Program
    quantizers : mapping of str to Quantizer
        All that its marks name.
    stored : callable
        The parameter or buffer at a path in the model.
    """
    held, found = program.held_tensors(stored), dict[str, None]()
    for mark in program.exported.graph.nodes:
        if mark.op != "call_function" or mark.target not in (QUANTIZED, BIAS) or mark.args[0] not in held:
            continue
        (name, values), grids = held[mark.args[0]], [quantizers[key] for key in mark.args[1:]]
        if all(grid.enabled and not grid.spec.is_float for grid in grids) and not bool(values.isfinite().all()):
            found[name if mark.target is BIAS else mark.args[1]] = None
    return list(found)


def objections(mark_uses: MarkUses, quantizers: Mapping[str, Quantizer], broken: Collection[str], target: Runtime) -> dict[str, list[str]]:
    """Each tensor that the target cannot express as it is simulated, and why.

    Parameters
    ----------
    mark_uses : MarkUses
    quantizers : mapping of str to Quantizer
    broken : collection of str
        What `not_finite` finds.
    target : Runtime
    """
    found: dict[str, list[str]] = {}
    for key, constants in mark_uses.uses.items():
        quantizer = quantizers[key]
        if quantizer.enabled:
            reasons = [reason for constant in sorted(constants) for reason in target.objections(quantizer, constant)]
            if reasons:
                found[key] = reasons
    for name in broken:
        found.setdefault(name, []).append(_BROKEN)
    for format in sorted(mark_uses.formats - set(target.activations)):
        found["sim.fallback"] = [f"operations fall back to {format}, which {target.name} does not take: use sim.fallback(..., to='fp16')"]
    if not target.bias:
        for name, input, weight in mark_uses.biases:
            if quantizers[input].enabled and quantizers[weight].enabled:
                found[name] = [f"an int32 bias, which {target.name} adds in float: use Config(bias=False), or its own profile"]
    return found


def refusal(found: Mapping[str, list[str]], target: Runtime) -> str:
    """What is in the way, and what to do."""
    listed = "\n".join(f"  '{name}': {'; '.join(reasons)}" for name, reasons in found.items())
    return (
        f"QuantSim.export: {target.name} cannot express {len(found)} tensors as they are simulated, and nothing was written. "
        f"Simulate with a config for this target, target={target.name!r}, or change these:\n{listed}"
    )
