"""In which form a file has torch's linear. The exporter writes by it, and integer-exact evaluation reads by it what ONNX Runtime does."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum
from typing import Any

from torch.fx import Graph, Node

from qsim.trace.fx_nodes import arguments, function, shape
from qsim.trace.marks_behind_moves import key_of

_FORM = "qsim_linear_form"


class LinearForm(Enum):
    """How one linear is written."""

    GEMM = "Gemm"
    ROWS = "Gemm between two Reshapes, which make a matrix of its input and undo that"
    MATMUL = "MatMul, and Add for a bias"


def linear_form(sizes: Sequence[Any], x: str | None, weight: str | None, movable: Collection[str]) -> LinearForm:
    """The form of a linear.

    Parameters
    ----------
    sizes : sequence
        Of its input; those that are no integers are open.
    x, weight : str, optional
        The quantizers whose marks its operands are, whether these are on or off.
    movable : collection of str
        Quantizers whose marks may be put again behind a Reshape.
    """
    if len(sizes) == 2:
        return LinearForm.GEMM
    unknown = sum(not isinstance(length, int) for length in sizes)
    return LinearForm.ROWS if x in movable and weight is not None and unknown <= 1 else LinearForm.MATMUL


def note_linear_forms(graph: Graph, movable: Collection[str]) -> None:
    """Have each linear of a graph say its form, before marks are taken out of it."""
    for node in graph.nodes:
        if function(node) == "linear":
            given = arguments(node)
            keys = key_of(given["input"]), key_of(given["weight"])
            node.meta[_FORM] = linear_form(shape(given["input"]), *keys, movable)


def noted_form(node: Node) -> LinearForm:
    """The form of a linear, or of another operation that is written as Gemm or Conv."""
    form: LinearForm = node.meta.get(_FORM, LinearForm.GEMM)
    return form
