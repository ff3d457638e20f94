"""Constants of a traced graph: a weight that the model computes from parameters is computed once, as the simulation computes it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from qsim.graph.execute.marks import BIAS, QUANTIZED, ROUNDED
from qsim.trace.fx_nodes import ancestors, arguments, function
from qsim.trace.in_place import writes
from qsim.trace.marks_behind_moves import is_moving

_MARKS = (QUANTIZED, BIAS, ROUNDED)


def fold_marked(exported: ExportedProgram) -> None:
    """Make a constant of each operand of a mark, and of each weight, that is computed from parameters, buffers and constants alone."""
    graph = exported.graph
    readers = [(node, node.args[0]) for node in graph.nodes if node.op == "call_function" and node.target in (QUANTIZED, BIAS)]
    readers += [(node, weight) for node in graph.nodes if (weight := _computed_weight(node)) is not None]
    computed = {operand for _, operand in readers if operand.op != "placeholder"}
    changed = written(graph)
    held = {node: value for node, value in _stored(exported).items() if node not in changed}
    values = constant_values(graph, held, computed) if computed else {}
    for reader, operand in readers:
        if operand in values:
            made = _add_constant(exported, f"folded_{reader.name}", values[operand].clone())
            reader.replace_input_with(operand, made)
    graph.eliminate_dead_code()
    exported.graph_module.recompile()


def written(graph: Graph) -> set[Node]:
    """What operations in place write to in each run."""
    return {node.args[0] for node in graph.nodes if writes(node)}  # type: ignore[misc]


def _computed_weight(node: Node) -> Node | None:
    """The weight of a layer, where an operation that is no move computes it and no mark stands at it."""
    name = function(node)
    if name != "linear" and not name.startswith("conv"):
        return None
    weight = arguments(node)["weight"] if isinstance(node.target, torch._ops.OpOverload) else None
    return weight if isinstance(weight, Node) and weight.op == "call_function" and not is_moving(weight) and _is_single(weight) else None


def _is_single(node: Node) -> bool:
    return node.target not in _MARKS and isinstance(node.meta.get("val"), Tensor)


def _stored(exported: ExportedProgram) -> dict[Node, Tensor]:
    """What the program holds, by its placeholders."""
    held: dict[str, Any] = {**exported.state_dict, **exported.constants}
    inputs = {spec.arg.name: spec.target for spec in exported.graph_signature.input_specs if spec.target is not None}
    found = {node: held.get(inputs.get(node.name, "")) for node in exported.graph.nodes if node.op == "placeholder"}
    return {node: value.detach() for node, value in found.items() if isinstance(value, Tensor)}


def constant_values(graph: Graph, held: Mapping[Node, Tensor], wanted: Collection[Node]) -> dict[Node, Tensor]:
    """The tensors among `wanted` that no input of the model reaches, as the simulation computes them.

    Parameters
    ----------
    graph : Graph
    held : mapping of Node to Tensor
        What placeholders stand for, where no run changes it.
    wanted : collection of Node
    """
    needed = ancestors(wanted)
    known: dict[Node, Any] = dict(held)
    for node in graph.nodes:
        if node in needed and node.op == "call_function" and _is_fixed(node, known):
            args, kwargs = map_arg((node.args, node.kwargs), lambda operand: known[operand])
            with torch.no_grad():
                known[node] = node.target(*args, **kwargs)
    return {node: known[node].detach() for node in wanted if isinstance(known.get(node), Tensor)}


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
