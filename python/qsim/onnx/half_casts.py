"""A float32 ONNX model in half precision but for some of its nodes, with Cast where a tensor goes from the one to the other.

What a strongly typed builder needs (TensorRT 10 ``--stronglyTyped``; the only way from TensorRT 11 on, which took the flags for the
precision of layers out): every operation computes in the type of its operands.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx
import onnx_ir as ir
import torch
from onnx_ir.passes import common

from qsim.errors import ExportError
from qsim.onnx.float_region import float_region
from qsim.onnx.insert import NodeInserter
from qsim.onnx.tensors import ONNX_TYPES

_FLOAT = ir.DataType.FLOAT


def to_half(model: ir.Model, keep: Collection[str], format: str = "float16") -> None:
    """Have all nodes but those in `keep` compute in half precision. Inputs and results of the model stay float32.

    Stay in float32 besides: what only moves values between nodes in `keep` (`qsim.onnx.float_region`), what ONNX does not define in the
    format, and what makes floating-point numbers of none. Constants are rounded: what overflows becomes Inf, as it does in the simulation.

    Parameters
    ----------
    model : ir.Model
        Changed in place.
    keep : collection of str
        Names of nodes.
    format : "float16" or "bfloat16"

    Raises
    ------
    ExportError
        A node in `keep` is not in the model, or the model has branches or loops.
    """
    common.InlinePass()(model)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    common.ShapeInferencePass()(model)
    names = {node.name for node in model.graph}
    if missing := [name for name in keep if name not in names]:
        raise ExportError(f"to_half: the model has no node {', '.join(map(repr, missing[:5]))}")
    if nested := [node.name for node in model.graph if any(_is_graph(attribute) for attribute in node.attributes.values())]:
        raise ExportError(f"to_half: {', '.join(map(repr, nested[:5]))} holds a graph of its own, which is not divided; unroll it")
    _Half(model, float_region(model.graph, keep), format).run()
    common.RemoveUnusedNodesPass()(model)


def _is_graph(attribute: ir.Attr) -> bool:
    return attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)


class _Half:
    def __init__(self, model: ir.Model, keep: Collection[str], format: str) -> None:
        self.graph, self.opsets = model.graph, model.opset_imports
        self.keep, self.format, self.kind = keep, format, ONNX_TYPES[format].type
        self.insert = NodeInserter(model.graph)
        self.made: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}

    def run(self) -> None:
        for node in list(self.graph):
            slots, results = self._halved(node)
            for index, value in enumerate(node.inputs):
                if value is not None and value.dtype in (_FLOAT, self.kind):
                    node.replace_input_with(index, self._as(node, value, self.kind if index in slots else _FLOAT))
            for index in results:
                node.outputs[index].dtype = self.kind
            if slots and node.op_type == "Cast":  # of a float to float32: rounding it is all that is left
                node.attributes["to"] = ir.AttrInt64("to", int(self.kind))
        self._restore_results()

    def _halved(self, node: ir.Node) -> tuple[list[int], list[int]]:
        """Which operands and results of a node are in half precision: all of those types of its schema that can be and are float32."""
        floats = [i for i, value in enumerate(node.inputs) if value is not None and value.dtype in (_FLOAT, self.kind)]
        if node.name in self.keep or not floats or any(value.dtype is ir.DataType.DOUBLE for value in node.inputs if value is not None):
            return [], []
        if node.op_type == "Cast":
            return (floats, [0]) if node.attributes["to"].as_int() == _FLOAT else ([], [])
        schema = onnx.defs.get_schema(node.op_type, self.opsets[node.domain], node.domain)
        name = f"tensor({'bfloat16' if self.kind is ir.DataType.BFLOAT16 else 'float16'})"
        able = {constraint.type_param_str for constraint in schema.type_constraints if name in constraint.allowed_type_strs}
        takes = [schema.inputs[min(i, len(schema.inputs) - 1)].type_str for i in range(len(node.inputs))]
        gives = [schema.outputs[min(i, len(schema.outputs) - 1)].type_str for i in range(len(node.outputs))]
        slots = [i for i in floats if takes[i] in able]
        taken = {takes[i] for i in slots}
        return slots, [i for i, value in enumerate(node.outputs) if gives[i] in taken and value.dtype in (_FLOAT, None)]

    def _as(self, before: ir.Node, value: ir.Value, kind: ir.DataType) -> ir.Value:
        if value.dtype is kind:
            return value
        if (value, kind) not in self.made:
            name = f"{value.name}_{self.format if kind is self.kind else 'float32'}"
            if value.is_initializer() and value.const_value is not None:
                self.made[value, kind] = self.insert.initializer(name, torch.tensor(value.const_value.numpy()), self.format)
            else:
                self.made[value, kind] = self.insert.node(before, "Cast", [value], name, kind, value.shape, to=int(kind))
                self._name_cast(self.made[value, kind])
        return self.made[value, kind]

    def _name_cast(self, value: ir.Value) -> None:
        node = value.producer()
        assert node is not None
        node.name = f"{value.name}_cast"

    def _restore_results(self) -> None:
        """Give results of the model their type back, under their names."""
        for index, value in enumerate(self.graph.outputs):
            producer = value.producer()
            if value.dtype is not self.kind or producer is None:
                continue
            name = value.name
            value.name = self.insert.free(f"{name}_{self.format}")
            cast = ir.Node("", "Cast", [value], {"to": ir.AttrInt64("to", int(_FLOAT))}, num_outputs=1, name=f"{name}_cast")
            cast.outputs[0].name, cast.outputs[0].dtype, cast.outputs[0].shape = name, _FLOAT, value.shape
            self.graph.append(cast)
            self.graph.outputs[index] = cast.outputs[0]


def round_in_float32(model: ir.Model) -> None:
    """Have a model with half precision compute in float32, with each result that was in half precision rounded by two Casts behind it.

    The same numbers on any runtime, whatever it has kernels for; sums inside an operation are in float32. Changed in place.
    """
    halves = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    for value in model.graph.initializers.values():
        if value.dtype in halves and value.const_value is not None:
            value.const_value = ir.tensor(value.const_value.numpy().astype("float32"), name=value.name)
            value.dtype = _FLOAT
    for node in list(model.graph):
        if node.op_type == "Cast" and node.attributes["to"].as_int() in halves:
            node.attributes["to"] = ir.AttrInt64("to", int(_FLOAT))
        for value in node.outputs:
            if value.dtype in halves:
                _round(model.graph, node, value)


def _round(graph: ir.Graph, node: ir.Node, value: ir.Value) -> None:
    assert value.dtype is not None
    uses, kind, value.dtype = list(value.uses()), value.dtype, _FLOAT
    for to in (kind, _FLOAT):
        cast = ir.Node("", "Cast", [value], {"to": ir.AttrInt64("to", int(to))}, num_outputs=1)
        cast.outputs[0].name, cast.outputs[0].dtype, cast.outputs[0].shape = f"{value.name}_{to.name}", to, value.shape
        graph.insert_after(node, cast)
        node, value = cast, cast.outputs[0]
    for user, index in uses:
        user.replace_input_with(index, value)
