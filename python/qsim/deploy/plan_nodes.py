"""Operations of a model among the nodes of its ONNX export, by the module that called them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any

from qsim.config.float_plan import FloatPlan, operation_of
from qsim.errors import ExportError
from qsim.operations.onnx_types import onnx_type

if TYPE_CHECKING:
    import onnx

_SCOPES, _FX = "pkg.torch.onnx.name_scopes", "pkg.torch.onnx.fx_node"
_ATEN = re.compile(r"target=torch\.ops\.\w+\.(\w+)")
_FLOATS = frozenset({1, 10, 11, 16})  # onnx.TensorProto: FLOAT, FLOAT16, DOUBLE, BFLOAT16
_SHAPES = frozenset({"Constant", "ConstantOfShape", "Shape", "Size"})


@dataclass(frozen=True)
class _Node:
    name: str
    path: str  # of the module
    call: str  # the same for all nodes that one call became
    type: str  # as `onnx_type` has it for the function that was called


def find(model: str | PathLike[str], plan: FloatPlan) -> dict[str, list[str]]:
    """Names of the nodes that each kept operation of a plan became.

    Reads what ``torch.onnx.export(..., dynamo=True)`` notes with each node (``pkg.torch.onnx.name_scopes``: the modules on the way to
    the call, and its name in the graph; ``pkg.torch.onnx.fx_node``: the call), and the names of nodes in models that
    ``QuantSim.export`` (``layer1.0.Add``) or the older exporter (``/layer1/layer1.0/Add``) wrote.

    An operation that is no module is told by its function and its ordinal in the module. Where the counts differ, because the exporter
    wrote other operations than the model called, all of its kind in the module are kept, and where there are none of its kind, all
    that the module calls itself: more than needed, never less. A plan without ordinals keeps all of a kind.

    Parameters
    ----------
    model : path-like
        An ONNX file. Its weights are not read.
    plan : FloatPlan

    Returns
    -------
    dict of str to list of str
        By the names in `plan.keep`, in the order of the graph.

    Raises
    ------
    ExportError
        No node tells its module, or an operation is not in the model.
    FileFormatError
        The file is no ONNX model.
    """
    try:
        from qsim.onnx.open import open_proto
    except ImportError as error:
        raise ImportError(f"Plan.nodes needs {error.name}: pip install qsim[onnx]") from error

    graph = open_proto(model).graph
    nodes = list(_computing(graph))
    if not nodes:
        raise ExportError(
            f"Plan: no node of '{model}' tells which module called it. Write the model with torch.onnx.export(..., dynamo=True), or with "
            "QuantSim.export"
        )
    found = {name: [node.name for node in _of(name, plan, nodes)] for name in plan.keep}
    if missing := [name for name, kept in found.items() if not kept]:
        raise ExportError(f"Plan: '{model}' has nothing of {', '.join(map(repr, missing))}; is it the model that the plan was made for?")
    return found


def _of(name: str, plan: FloatPlan, nodes: list[_Node]) -> list[_Node]:
    modules = (name, *(norm for norm, layer in plan.folded.items() if layer == name))
    if any(_is_within(node, name) for node in nodes):
        return [node for node in nodes if any(_is_within(node, module) for module in modules)]
    path, function = operation_of(name)
    called = [node for node in nodes if node.path == path]
    alike = [node for node in called if node.type == onnx_type(function)]
    calls = list(dict.fromkeys(node.call for node in alike))
    ordinal = plan.ordinals.get(name)
    if ordinal is not None and len(calls) % ordinal.among == 0:  # a module that is called repeatedly has all its calls in the graph
        meant = {call for i, call in enumerate(calls) if i % ordinal.among == ordinal.nth}
        alike = [node for node in alike if node.call in meant]
    return alike or (called if ordinal is not None else [])


def _is_within(node: _Node, module: str) -> bool:
    return node.path == module or node.path.startswith(f"{module}.")


def _computing(graph: onnx.GraphProto) -> Iterable[_Node]:
    """The nodes with a result of floating-point numbers whose module is known."""
    types = {value.name: value.type.tensor_type.elem_type for value in (*graph.value_info, *graph.output)}
    for node in graph.node:
        floats = any(types.get(name, 1) in _FLOATS for name in node.output)
        if node.op_type not in _SHAPES and floats and (found := _located(node)) is not None:
            yield found


def _located(node: Any) -> _Node | None:
    notes = {entry.key: entry.value for entry in node.metadata_props}
    if _SCOPES in notes:
        *modules, call = ast.literal_eval(notes[_SCOPES])
        path = re.sub(r"@\d+", "", modules[-1]) if modules else ""  # "block@1": its second call
        aten = _ATEN.search(notes.get(_FX, ""))
        return _Node(node.name, path, call, onnx_type(aten[1].rstrip("_")) if aten else node.op_type)
    if node.name.startswith("/"):
        return _Node(node.name, _joined(node.name.split("/")[1:-1]), node.name, node.op_type)
    path, _, last = node.name.rpartition(".")
    if re.fullmatch(rf"{node.op_type}(_\d+)?", last):
        return _Node(node.name, path, node.name, node.op_type)
    return None


def _joined(parts: list[str]) -> str:
    """The path in ``/layer1/layer1.0/conv1``: the older exporter puts the name of a Sequential before those of its entries."""
    path: list[str] = []
    for part in parts:
        if path and part.startswith(f"{path[-1]}."):
            path.pop()
        path.append(part)
    return ".".join(path)
