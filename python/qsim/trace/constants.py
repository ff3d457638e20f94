"""Constants of a traced graph: a weight that the model computes from parameters is computed once, as the simulation computes it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from qsim.graph.execute.marks import BIAS, QUANTIZED, ROUNDED
from qsim.trace.fx_nodes import ancestors
from qsim.trace.in_place import writes

_MARKS = (QUANTIZED, BIAS, ROUNDED)


def fold_marked(exported: ExportedProgram) -> None:
    """Make a constant of each operand of a mark that is computed from parameters, buffers and constants alone."""
    graph = exported.graph
    marks = [node for node in graph.nodes if node.op == "call_function" and node.target in (QUANTIZED, BIAS)]
    changed = {node.args[0] for node in graph.nodes if writes(node)}  # in each run
    computed = {mark.args[0] for mark in marks if mark.args[0].op != "placeholder"}
    held = {node: value for node, value in _stored(exported).items() if node not in changed}
    values = _evaluated(graph, held, marks, computed) if computed else {}
    for mark, value in values.items():
        mark.replace_input_with(mark.args[0], _add_constant(exported, f"folded_{mark.name}", value))  # type: ignore[arg-type]
    graph.eliminate_dead_code()
    exported.graph_module.recompile()


def _stored(exported: ExportedProgram) -> dict[Node, Tensor]:
    """What the program holds, by its placeholders."""
    held: dict[str, Any] = {**exported.state_dict, **exported.constants}
    inputs = {spec.arg.name: spec.target for spec in exported.graph_signature.input_specs if spec.target is not None}
    found = {node: held.get(inputs.get(node.name, "")) for node in exported.graph.nodes if node.op == "placeholder"}
    return {node: value.detach() for node, value in found.items() if isinstance(value, Tensor)}


def _evaluated(graph: Graph, held: dict[Node, Tensor], marks: list[Node], computed: set[Node]) -> dict[Node, Tensor]:
    """What each mark of a computed tensor reads, where no input of the model reaches it."""
    needed = ancestors(computed)
    known: dict[Node, Any] = dict(held)
    found: dict[Node, Tensor] = {}
    for node in graph.nodes:
        if node in marks:
            if node.args[0] in computed and isinstance(known.get(node.args[0]), Tensor):
                found[node] = known[node.args[0]].clone()
        elif node in needed and node.op == "call_function" and _is_fixed(node, known):
            args, kwargs = map_arg((node.args, node.kwargs), lambda operand: known[operand])
            with torch.no_grad():
                known[node] = node.target(*args, **kwargs)
    return found


def _is_fixed(node: Node, known: dict[Node, Any]) -> bool:
    """Whether a node gives the same in each run: it computes with nothing but what is known."""
    return node.target not in _MARKS and not _is_random(node) and all(operand in known for operand in node.all_input_nodes)


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
