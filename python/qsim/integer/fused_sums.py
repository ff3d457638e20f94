"""Products of two matrices with a vector added, which ONNX Runtime's optimiser makes Gemm (``MatMulAddFusion``, onnxruntime 1.32).

Of other than two axes it does so where all sizes are known; a file is written so that it does not (`qsim.onnx.held_sums`).
"""

from __future__ import annotations

from collections.abc import Container, Iterator

import torch
from torch.fx import Graph, Node

from qsim.trace.fx_nodes import arguments, function, shape
from qsim.trace.marks_behind_moves import key_of


def fuse_sums(graph: Graph, encodings: Container[str]) -> None:
    """Write them as ``addmm``, where the first matrix is quantized and the sum alone reads the product. `encodings`: quantizers that are
    on."""
    for node in list(graph.nodes):
        for product, bias in _summands(node):
            operands = product.all_input_nodes
            if function(product) not in ("matmul", "mm") or len(product.users) > 1 or len(operands) < 2:
                continue
            x, weight = operands
            sizes = shape(x), shape(weight), shape(bias)
            if key_of(x) in encodings and [len(size) for size in sizes] == [2, 2, 1] and sizes[2][0] == sizes[1][1]:
                node.target, node.args, node.kwargs = torch.ops.aten.addmm.default, (bias, x, weight), {}
                graph.erase_node(product)
                break


def _summands(node: Node) -> Iterator[tuple[Node, Node]]:
    """The two tensors that a node adds, in both orders."""
    if function(node) == "add" and node.op == "call_function" and arguments(node).get("alpha", 1) == 1:
        a, b = (arguments(node)[name] for name in ("self", "other"))
        if isinstance(a, Node) and isinstance(b, Node):
            yield from ((a, b), (b, a))
