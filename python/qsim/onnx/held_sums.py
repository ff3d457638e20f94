"""Products of tensors that have other than two axes, with a vector added: ONNX Runtime's optimiser makes Gemm of these where it knows all
sizes (``MatMulAddFusion``, onnxruntime 1.32), and then integers of a weight that the model has in float.

So a file has the difference of the product and the negative vector there, which are the same numbers: it stays a MatMul.
"""

from __future__ import annotations

import onnx_ir as ir

from qsim.onnx.insert import NodeInserter
from qsim.onnx.lint import is_dequantized
from qsim.onnx.lower import as_tensor


def hold_sums(model: ir.Model) -> None:
    """Write them so, where the first operand is dequantized. Sizes are those that the file says."""
    insert = NodeInserter(model.graph)
    for node in model.graph:
        x = node.inputs[0] if node.op_type == "MatMul" else None
        if x is None or not is_dequantized(x) or x.shape is None or len(x.shape) == 2:
            continue
        (add, *others) = (*node.outputs[0].consumers(), node)
        bias = next((value for value in add.inputs if value is not node.outputs[0]), None) if add.op_type == "Add" else None
        if len(others) > 1 or bias is None or bias.const_value is None or bias.shape is None or len(bias.shape) != 1:
            continue
        if all(isinstance(size, int) for size in x.shape):
            negative = insert.initializer(f"{bias.name}_negative", -as_tensor(bias), "float32")
            add.op_type = "Sub"
            add.replace_input_with(0, node.outputs[0])
            add.replace_input_with(1, negative)
            if not bias.uses() and not bias.is_graph_output():
                model.graph.initializers.pop(str(bias.name))
