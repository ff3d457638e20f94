"""Means whose grid is so much finer, or coarser, than that of their elements that ONNX Runtime's integer kernel throws when it runs, though
the session was made: what behind a normalization is nearly zero. They are written as an operation that has no integer kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import onnx_ir as ir

from qsim.integer.averages import is_computed
from qsim.onnx.insert import NodeInserter
from qsim.onnx.lint import scales


def hold_means_in_float(model: ir.Model) -> None:
    """Do so in place."""
    insert = NodeInserter(model.graph)
    for node in list(model.graph):
        x = node.inputs[0] if node.op_type in ("GlobalAveragePool", "AveragePool") else None
        if x is None or x.shape is None or not _is_whole(node, lengths := list(x.shape)[2:]):
            continue
        given, made = scales(x), _results(node.outputs[0])
        if given.size != 1 or all(is_computed(float(given.item()), scale, lengths) for scale in made):
            continue
        axes = ir.Value(name=insert.free("spatial_axes"), const_value=ir.tensor(np.arange(2, len(x.shape), dtype=np.int64)))
        axes.dtype, axes.shape = ir.DataType.INT64, ir.Shape([len(lengths)])
        model.graph.register_initializer(axes)
        mean = ir.Node("", "ReduceMean", [x, axes], [ir.AttrInt64("keepdims", 1)], num_outputs=1)
        mean.metadata_props.update(node.metadata_props)
        old, (new,) = node.outputs[0], mean.outputs
        new.name, new.type, new.shape = insert.free(f"{old.name}_mean"), old.type, old.shape
        model.graph.insert_before(node, mean)
        old.replace_all_uses_with(new)
        model.graph.remove(node, safe=True)


def _is_whole(node: ir.Node, lengths: Sequence[object]) -> bool:
    attributes = node.attributes
    if node.op_type == "GlobalAveragePool":
        return True
    return list(attributes["kernel_shape"].as_ints()) == list(lengths) and not any(attributes.get_ints("pads", []))


def _results(value: ir.Value) -> Iterator[float]:
    """Scales of the quantizers that read a tensor, also behind a rectifier or in another shape."""
    for reader in value.consumers():
        scale = reader.inputs[1] if reader.op_type == "QuantizeLinear" else None
        if scale is not None and scale.const_value is not None:
            yield from scale.const_value.numpy().astype("float64").ravel().tolist()
        elif reader.op_type in ("Relu", "Clip", "Reshape"):
            yield from _results(reader.outputs[0])
