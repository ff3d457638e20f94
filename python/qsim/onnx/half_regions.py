"""Regions of a translated model that compute in float16 or bfloat16: Cast at their ends, weights in the format, nothing between.

The model is strongly typed: each operation computes in the type of its operands.
"""

from __future__ import annotations

import onnx_ir as ir

from qsim.onnx.insert import NodeInserter
from qsim.onnx.lower import as_tensor
from qsim.onnx.tensors import ONNX_TYPES
from qsim.onnx.translate import MARK_DOMAIN
from qsim.operations.moves import MOVING_TYPES

_FLOAT = ir.DataType.FLOAT


class FallbackRegions:
    """Puts types in the places of the marks of a fallback, ``qsim::rounded``.

    Parameters
    ----------
    model : ir.Model
        Changed in place; its other marks are still there.

    Attributes
    ----------
    formats : dict of ir.Node to str
        The operations that compute in a format: "float16" or "bfloat16".
    """

    def __init__(self, model: ir.Model) -> None:
        self.graph = model.graph
        self.formats: dict[ir.Node, str] = {}
        self._insert = NodeInserter(model.graph)
        self._typed: dict[ir.Value, str] = {}  # values in a format, before their types say so
        self._made: dict[tuple[ir.Value, str], ir.Value] = {}

    def run(self) -> None:
        """Replace every mark of a fallback."""
        for node in list(self.graph):
            if _is_mark(node, "in"):
                self._join(node)
        for node in list(self.graph):
            if _is_mark(node):
                self._replace(node)
            elif found := {self._typed[value] for value in node.inputs if value in self._typed}:
                self._compute(node, found.pop())

    def _join(self, node: ir.Node) -> None:
        """Where the operand comes from another such operation, maybe through some that only move it: no casts between them."""
        (value,), format, between = node.inputs, _format(node), list[ir.Node]()
        while value is not None and (made := value.producer()) is not None and not _is_mark(made, "out"):
            readers = value.consumers()
            alone = len(readers) == 1 if between else all(_is_mark(r, "in") and _format(r) == format for r in readers)
            if made.domain or made.op_type not in MOVING_TYPES or not alone or value.is_graph_output():
                return
            between.append(made)
            value = made.inputs[0]
        if value is None or made is None or _format(made) != format:
            return
        (between[-1] if between else node).replace_input_with(0, made.inputs[0])

    def _replace(self, node: ir.Node) -> None:
        (x,), format = node.inputs, _format(node)
        assert x is not None
        value = x if x in self._typed else self._in_format(node, x, format)
        if _is_mark(node, "out"):
            value = self._insert.node(node, "Cast", [value], f"{x.name}_float", _FLOAT, node.outputs[0].shape, to=int(_FLOAT))
        node.outputs[0].replace_all_uses_with(value, replace_graph_outputs=True)
        self.graph.remove(node, safe=True)

    def _in_format(self, node: ir.Node, x: ir.Value, format: str) -> ir.Value:
        """`x` in a format: a constant is stored so, anything else goes through a Cast."""
        if (x, format) not in self._made:
            kind, name = ONNX_TYPES[format].type, f"{x.name}_{format}"
            if x.const_value is not None and (x.is_initializer() or x.producer() is None):
                self._made[x, format] = self._insert.initializer(name, as_tensor(x), format)
            else:
                self._made[x, format] = self._insert.node(node, "Cast", [x], name, kind, x.shape, to=int(kind))
        made = self._made[x, format]
        self._typed[made] = format
        return made

    def _compute(self, node: ir.Node, format: str) -> None:
        """An operation with an operand in the format: all floating-point numbers that it takes and gives are."""
        self.formats[node] = format
        kind = ONNX_TYPES[format].type
        for index, value in enumerate(node.inputs):
            if value is not None and value not in self._typed and value.dtype is _FLOAT:
                node.replace_input_with(index, self._in_format(node, value, format))
        if node.op_type == "Cast" and node.attributes["to"].as_int() == _FLOAT:
            node.attributes["to"] = ir.AttrInt64("to", int(kind))
        for value in node.outputs:
            if value.dtype in (_FLOAT, None):
                value.dtype = kind
                self._typed[value] = format


def _is_mark(node: ir.Node, direction: str | None = None) -> bool:
    rounded = (node.domain, node.op_type) == (MARK_DOMAIN, "rounded")
    return rounded and direction in (None, node.attributes["direction"].as_string())


def _format(node: ir.Node) -> str:
    return str(node.attributes["format"].as_string())
