"""Constants of a traced graph: a weight that the model computes from parameters is computed once, as the simulation computes it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.fx import Node
from torch.fx.node import map_arg

from qsim.graph.execute.marks import BIAS, QUANTIZED, ROUNDED


def fold_marked(exported: ExportedProgram) -> None:
    """Make a constant of each operand of a mark that is computed from parameters, buffers and constants alone."""
    graph, known = exported.graph, _stored(exported)
    marks = [node for node in graph.nodes if node.op == "call_function" and node.target in (QUANTIZED, BIAS)]
    for mark in marks:
        operand = mark.args[0]
        if operand.op != "placeholder" and (value := _evaluate(operand, known)) is not None:
            mark.replace_input_with(operand, _add_constant(exported, f"folded_{mark.name}", value))
    graph.eliminate_dead_code()
    exported.graph_module.recompile()


def _stored(exported: ExportedProgram) -> dict[Node, Tensor]:
    """What the program holds, by its placeholders."""
    held: dict[str, Any] = {**exported.state_dict, **exported.constants}
    inputs = {spec.arg.name: spec.target for spec in exported.graph_signature.input_specs if spec.target is not None}
    found = {node: held.get(inputs.get(node.name, "")) for node in exported.graph.nodes if node.op == "placeholder"}
    return {node: value.detach() for node, value in found.items() if isinstance(value, Tensor)}


def _evaluate(node: Node, known: dict[Node, Tensor]) -> Any:
    """The value of a node that no input of the model reaches; None for others."""
    if node in known:
        return known[node]
    if node.op != "call_function" or node.target in (QUANTIZED, BIAS, ROUNDED) or _is_random(node):
        return None
    if any(_evaluate(operand, known) is None for operand in node.all_input_nodes):
        return None
    args, kwargs = map_arg((node.args, node.kwargs), lambda operand: known[operand])
    with torch.no_grad():
        known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return known[node]


def _is_random(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _add_constant(exported: ExportedProgram, name: str, value: Tensor) -> Node:
    first = next(iter(exported.graph.nodes))
    with exported.graph.inserting_before(first):
        node: Node = exported.graph.placeholder(name)
    node.meta["val"] = first.meta["val"].fake_mode.from_tensor(value) if hasattr(first.meta["val"], "fake_mode") else value
    exported.constants[name] = value
    spec = InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(node.name), name)
    exported.graph_signature.input_specs.insert(0, spec)
    return node
