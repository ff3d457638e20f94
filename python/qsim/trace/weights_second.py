"""Products whose weight comes first, ``weight @ x``, written the other way round: kernels take one scale per channel of the second operand
alone. ONNX Runtime's optimiser makes such a product one on integers all the same, which then fails when it runs."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch.fx import Graph, Node

from qsim.trace.marks_behind_moves import key_of, marked, moved_from, operation, readers_of, shared_meta

_aten = torch.ops.aten


def put_weights_second(graph: Graph, per_channel: Collection[str]) -> None:
    """Write ``weight @ x`` as the transpose of ``x.mT @ weight.mT``, which multiplies the same numbers.

    Parameters
    ----------
    graph : Graph
        With marks; changed in place.
    per_channel : collection of str
        Keys of the marks that have several scales.
    """
    for node in list(graph.nodes):
        if operation(node) not in ("matmul", "mm", "bmm", "mv"):
            continue
        weight, x = node.args[:2]
        key = _grid_of(x)
        if key is None or key in per_channel or key_of(weight) not in per_channel or weight.meta["val"].dim() < 2:
            continue
        is_vector = x.meta["val"].dim() < 2
        with graph.inserting_before(node):
            operand = x if is_vector else marked(graph, _transposed(graph, x), key)
            product = graph.call_function(_aten.matmul.default, (operand, _transposed(graph, weight)))
        held = node.meta["val"]
        product.meta = {**shared_meta(node), "val": held if is_vector else held.mT}
        _hand_on(graph, node, product, is_turned=not is_vector)


def _grid_of(x: Node) -> str | None:
    """The mark on whose grid a tensor lies, also behind what only moves values."""
    while key_of(x) is None and (before := moved_from(x)) is not None:
        x = before
    return key_of(x)


def _hand_on(graph: Graph, node: Node, product: Node, *, is_turned: bool) -> None:
    """Have `product` in the place of `node`, transposed if it is turned: behind the quantizer, where that alone reads it."""
    last, readers = node, readers_of(node)
    if len(readers) == len(node.users) == 1 and (key := key_of(readers[0])) is not None:
        last = readers[0]
        with graph.inserting_before(last):
            product = marked(graph, product, key)
    # Changed, not replaced: its name may be that of a result.
    operation = (_aten.transpose.int, (product, -2, -1)) if is_turned else (_aten.alias.default, (product,))
    (last.target, last.args), last.kwargs = operation, {}
    if last is not node:
        graph.erase_node(node)


def _transposed(graph: Graph, x: Node) -> Node:
    turned = graph.call_function(_aten.transpose.int, (x, -2, -1))
    turned.meta = {**shared_meta(x), "val": x.meta["val"].mT}
    return turned
