"""Operands that no quantizer makes and that are integers all the same, so that integer kernels take them.

A number is the integer one, or minus one, with the number for its scale. HardSigmoid, ``clip(x / 6 + 1 / 2, 0, 1)``, is the sum of the
integers of x with a sixth of their scale and of one half, where the grid of the result ends at 0 and 1: quantizing to it clips.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from qsim.numbers.encoding import Encoding
from qsim.trace.marks_before_rectifiers import clips_to, limits_of
from qsim.trace.marks_behind_moves import key_of, readers_of, shared_meta

torch.library.define("qsim_graph::scaled", "(Tensor x, str key, float factor) -> Tensor")
torch.library.define("qsim_graph::number", "(Tensor x, str key, float value) -> Tensor")
torch.library.register_fake("qsim_graph::scaled", lambda x, *_: torch.empty_like(x))
torch.library.register_fake("qsim_graph::number", lambda x, *_: x.new_empty(()))
SCALED = torch.ops.qsim_graph.scaled.default  # the integers that the mark `key` makes, with its scale multiplied
NUMBER = torch.ops.qsim_graph.number.default  # a number as an integer of the type that `key` has

_aten = torch.ops.aten
_SMALLEST = torch.finfo(torch.float32).tiny
_TAKING = {
    **dict.fromkeys((_aten.mul.Tensor, _aten.mul_.Tensor, _aten.add.Tensor, _aten.add_.Tensor), 1.0),
    _aten.sub.Tensor: -1.0,  # becomes an addition
}


def scaled(encoding: Encoding, factor: float) -> Encoding:
    """The grid of `SCALED`: the scale is multiplied in float32."""
    return dataclasses.replace(
        encoding, scale=encoding.scale.float() * torch.tensor(factor, dtype=torch.float32, device=encoding.scale.device)
    )


def number(value: float, beside: Encoding) -> tuple[int, Encoding]:
    """A number as an integer, and its grid, whose integers have the type of those `beside` it.

    Examples
    --------
    >>> uint8 = qsim.Encoding(torch.tensor(0.1), torch.tensor(7, dtype=torch.int32), 0, 255, dtype="uint8")
    >>> [(q, int(grid.zero_point), float(grid.scale)) for q, grid in (number(0.5, uint8), number(-3, uint8))]
    [(1, 0, 0.5), (0, 1, 3.0)]
    """
    unsigned = beside.quant_min >= 0
    integer, zero = (int(value > 0), int(value < 0)) if unsigned else (1 if value > 0 else -1, 0)
    pair = ((abs(value), torch.float32), (zero, torch.int32))
    scale, zero_point = (torch.tensor(held, dtype=dtype, device=beside.scale.device) for held, dtype in pair)
    return integer, dataclasses.replace(beside, scale=scale, zero_point=zero_point)


def use_integer_forms(graph: Graph, encodings: Mapping[str, Encoding]) -> None:
    """Put them where an operation between marks of eight bits would run in float for want of them. `encodings`: of marks, by key."""
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        x = node.args[0] if node.args else None
        key, result = key_of(x), _result(node, encodings)
        if key is None or key not in encodings or result is None or not (_is_whole(encodings[key]) and _is_whole(result)):
            continue
        if node.target is _aten.hardsigmoid.default and clips_to(result, 0.0, 1.0):
            with graph.inserting_before(node):
                operands = _made(graph, SCALED, x, key, 1 / 6), _made(graph, NUMBER, x, key, 0.5)
            node.target, node.args = _aten.add.Tensor, operands
        elif node.target in _TAKING and _is_number(value := node.args[1]) and not node.kwargs:
            with graph.inserting_before(node):
                other = _made(graph, NUMBER, x, key, float(value) * _TAKING[node.target])  # type: ignore[arg-type, index]
            node.args = x, other
            node.target = _aten.add.Tensor if node.target is _aten.sub.Tensor else node.target


def _result(node: Node, encodings: Mapping[str, Encoding]) -> Encoding | None:
    """The grid that all readers of a node quantize it to, behind a rectifier too."""
    (reader, *others) = readers_of(node) or (node,)
    if not others and reader.op == "call_function" and reader is not node and limits_of(reader) is not None:
        node = reader
    keys = {key_of(reader) for reader in readers_of(node)}
    key = keys.pop() if len(keys) == 1 else None
    return None if key is None else encodings.get(key)


def _is_whole(encoding: Encoding) -> bool:
    """Whether integer kernels take it for an activation: all integers of eight bits, with one scale."""
    return encoding.axis is None and encoding.quant_max - encoding.quant_min == 255


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and abs(value) >= _SMALLEST


def _made(graph: Graph, op: Any, x: Any, key: str, number: float) -> Node:
    node = graph.call_function(op, (x, key, number))
    held: Tensor = x.meta["val"]
    node.meta = {**shared_meta(x), "val": held.new_empty(()) if op is NUMBER else held}
    return node
