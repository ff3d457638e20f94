"""Marks in front of moves whose result is quantized, so that a quantizer stands right behind what computed the tensor.

ONNX Runtime's optimiser puts such quantizers there, behind some moves and in some opsets (``QDQPropagationTransformer``); here they are
in the file, and integer-exact evaluation has them too.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import Graph, Node

from qsim.numbers.encoding import Encoding
from qsim.numbers.float_format import FLOAT_FORMATS
from qsim.trace.fx_nodes import is_float
from qsim.trace.marks_before_rectifiers import limits_of
from qsim.trace.marks_behind_moves import is_moving, key_of, marked, operation

_SEVERAL = ("getitem", "embedding")  # one of several results, rows of a table


def mark_before_moves(graph: Graph, encodings: Mapping[str, Encoding]) -> None:
    """Quantize what a move alone reads, with one scale and on integers, in front of it too: moves change no number, so no result changes.

    Parameters
    ----------
    graph : Graph
        With marks; changed in place.
    encodings : mapping of str to Encoding
        Of the quantizers that are on, by key. Marks of others are looked through.
    """
    for mark in list(graph.nodes):
        key = key_of(mark)
        if key is None or key not in encodings or encodings[key].axis is not None or encodings[key].dtype in FLOAT_FORMATS:
            continue
        first = _first_move(mark, encodings)
        made = None if first is None else first.args[0]
        if first is None or not isinstance(made, Node) or made.op != "call_function" or key_of(made) is not None or not is_float(made):
            continue
        with graph.inserting_before(first):
            first.replace_input_with(made, marked(graph, made, key))


def _first_move(mark: Node, encodings: Mapping[str, Encoding]) -> Node | None:
    """The first of the moves that end at a mark, where each alone reads the one before it, and the first alone what was computed.

    Rectifiers may stand between: see `qsim.trace.marks_before_rectifiers` for why quantizing in front of one changes nothing.
    """
    first, node = None, mark.args[0]
    while isinstance(node, Node) and len(node.users) == 1:
        if is_moving(node) and operation(node) not in _SEVERAL:
            first = node
        elif limits_of(node) is None and (key_of(node) is None or key_of(node) in encodings):
            return first
        node = node.args[0]
    return None
