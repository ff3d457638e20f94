"""The multiplications of a simulation, and the quantizers of their operands."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from torch import SymInt
from torch.fx import Node
from torch.utils._pytree import tree_map_only

from qsim.simulation.simulation import Simulation
from qsim.trace.capture import capture
from qsim.trace.fx_nodes import function, shape
from qsim.trace.marks_behind_moves import key_of, mark_behind_moves


@dataclass(frozen=True)
class Sized:
    """A tensor of these sizes, whatever is in it."""

    shape: tuple[int, ...]


@dataclass(frozen=True)
class Product:
    """A sum of products in one call of the model.

    Attributes
    ----------
    name : str
        Of the ATen function: "conv2d", "matmul".
    multiplications : int
        For the first example input.
    operands : (str or None, str or None)
        Keys of the quantizers whose grids the factors lie on; None: it is in float.
    args : tuple
        Of the ATen function, with a `Sized` in the place of each tensor; () where another product is of the same call.
    """

    name: str
    multiplications: int
    operands: tuple[str | None, str | None]
    args: tuple[Any, ...] = ()

    @property
    def first(self) -> int:
        """Which of the tensors among `args` is the first factor; the second follows it."""
        return int(self.name in _ADDING_MATRIX)

    @property
    def is_attention(self) -> bool:
        return self.name == "scaled_dot_product_attention"


class UncountedError(Exception):
    """An operation multiplies, and nobody knows how often."""


_MATRIX = frozenset({"linear", "matmul", "mm", "bmm", "mv"})
_ADDING_MATRIX = frozenset({"addmm", "baddbmm", "addmv"})
_CONVOLUTION = frozenset({"conv1d", "conv2d", "conv3d"})
_TRANSPOSED = frozenset({"conv_transpose1d", "conv_transpose2d", "conv_transpose3d"})
_UNCOUNTED = frozenset(
    {"bilinear", "addbmm", "grouped_mm", "_grouped_mm", "lstm", "gru", "rnn_tanh", "rnn_relu", "convolution", "dot", "vdot"}
)


def products_of(sim: Simulation) -> list[Product]:
    """All products of a model, counted from the shapes of its traced graph.

    Raises
    ------
    CaptureError
        The model cannot be traced into one graph.
    UncountedError
        It holds an operation whose multiplications are not counted here, or depend on values: the message names it.
    """
    program = capture(sim, *sim.calls[0])
    mark_behind_moves(program.exported.graph)
    found = []
    for node in program.exported.graph.nodes:
        if node.op == "call_function":
            of_one = _products(node, function(node))
            if of_one:
                args = tree_map_only(Node, lambda given: Sized(_sizes(given)), node.args)
                found += [replace(of_one[0], args=args), *of_one[1:]]
    return found


def _products(node: Node, name: str) -> list[Product]:
    args: Any = node.args
    if name in _UNCOUNTED:
        raise UncountedError(f"the multiplications of {name} are not counted")
    if name in _MATRIX or name in _ADDING_MATRIX:
        left, right = args[1:3] if name in _ADDING_MATRIX else args[:2]
        return [_product(name, math.prod(_sizes(node)) * _sizes(left)[-1], left, right)]
    if name in _CONVOLUTION or name in _TRANSPOSED:
        ends = _sizes(node) if name in _CONVOLUTION else _sizes(args[0])
        return [_product(name, math.prod(ends) * math.prod(_sizes(args[1])[1:]), args[0], args[1])]
    if name == "einsum":
        return [_einsum(args[0], args[1])]
    if name == "scaled_dot_product_attention":
        query, key, value = args[:3]
        scores = math.prod(_sizes(query)[:-1]) * _sizes(key)[-2]
        shares = _product(name, scores * _sizes(value)[-1], None, value)  # what the softmax returns stays in float
        return [_product(name, scores * _sizes(query)[-1], query, key), shares]
    return []


def _einsum(equation: str, operands: Any) -> Product:
    terms = equation.replace(" ", "").split("->")[0].split(",")
    if len(operands) != 2 or "." in equation:
        raise UncountedError(f"the multiplications of einsum({equation!r}) are not counted")
    sizes = {label: size for term, operand in zip(terms, operands, strict=True) for label, size in zip(term, _sizes(operand), strict=True)}
    return _product("einsum", math.prod(sizes.values()), *operands)


def _product(name: str, multiplications: int, left: Node | None, right: Node | None) -> Product:
    return Product(name, multiplications, (key_of(left), key_of(right)))


def _sizes(node: Node) -> tuple[int, ...]:
    """Of a tensor, with the sizes of the example inputs where they may vary."""
    sizes = [size.node.hint if isinstance(size, SymInt) else size for size in shape(node)]
    if None in sizes:
        raise UncountedError(f"how large the operand '{node.name}' is depends on values, as what a mask selects does")
    return tuple(map(int, sizes))
