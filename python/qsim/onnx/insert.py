"""New nodes and initializers in a graph, with names of their own."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from torch import Tensor

from qsim.onnx.tensors import stored

OWN = "qsim"  # in the `meta` of what is inserted


class NodeInserter:
    """Adds to a graph; a name that is taken gets a number behind it."""

    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph
        self._taken = {value.name for node in graph.all_nodes() for value in node.outputs}
        self._taken |= {value.name for value in graph.inputs} | set(graph.initializers)
        self.used_domains: set[str] = set()  # but ONNX's own
        self._initializers: dict[tuple[str, str], tuple[Tensor, ir.Value]] = {}

    def free(self, name: str) -> str:
        """`name`, or the first of ``name_1``, ``name_2`` ... that nothing has."""
        chosen, number = name, 0
        while chosen in self._taken:
            number += 1
            chosen = f"{name}_{number}"
        self._taken.add(chosen)
        return chosen

    def node(
        self,
        before: ir.Node | None,
        op: str,
        inputs: list[ir.Value],
        name: str,
        dtype: ir.DataType,
        shape: ir.Shape | None,
        **attributes: Any,
    ) -> ir.Value:
        """The result, `name`, of a new node that stands before another, or at the end. `op` has its domain before a dot, if not ONNX's."""
        domain, _, op = op.rpartition(".")
        self.used_domains |= {domain} - {""}
        node = ir.Node(domain, op, inputs, ir.convenience.convert_attributes(attributes), num_outputs=1)
        node.meta[OWN] = True
        (result,) = node.outputs
        result.name, result.dtype, result.shape = self.free(name), dtype, shape
        if before is None:
            self.graph.append(node)
        else:
            node.metadata_props.update(before.metadata_props)
            self.graph.insert_before(before, node)
        return result

    def initializer(self, name: str, values: Tensor, dtype: str) -> ir.Value:
        """An initializer: the one of this name if its values are the same. `dtype` is one of `onnx_tensors.ONNX_TYPES`."""
        values = values.detach()
        known = self._initializers.get((name, dtype))
        if known is not None and known[0].shape == values.shape and bool((known[0] == values).all()):
            return known[1]
        value = ir.Value(name=self.free(name))
        value.const_value = stored(str(value.name), values, dtype)
        value.dtype, value.shape = value.const_value.dtype, ir.Shape(values.shape)
        self.graph.register_initializer(value)
        self._initializers.setdefault((name, dtype), (values, value))
        return value
