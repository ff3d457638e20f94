"""Marks behind operations that only move values: what lies on a grid still does after a reshape or a maximum."""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from qsim.graph.execute.marks import QUANTIZED
from qsim.operations.moves import JOINING, MOVING


def operation(node: Node) -> str:
    """The name of the function that a node calls, without namespace and overload: "conv2d", "getitem"; "" if it calls none."""
    if node.op != "call_function":
        return ""
    return node.target.overloadpacket.__name__ if isinstance(node.target, torch._ops.OpOverload) else getattr(node.target, "__name__", "")


def key_of(node: Any) -> str | None:
    """The quantizer whose mark `node` is; None if it is no mark."""
    return str(node.args[1]) if isinstance(node, Node) and node.target is QUANTIZED else None


def readers_of(node: Node) -> list[Node]:
    """The nodes that read a tensor: all its users but those that ask for sizes."""
    return [user for user in node.users if operation(user) != "sym_size"]


def is_moving(node: Node) -> bool:
    """Whether a node hands on elements of one tensor, and zeros, and computes nothing."""
    name = operation(node)
    return name in MOVING or name == "embedding" or _pads_with_zero(node, name)


def moved_from(node: Node) -> Node | None:
    """The tensor whose elements a moving node hands on; None for a node that computes."""
    tensor = node.args[0] if is_moving(node) else None
    if node.target is operator.getitem and isinstance(tensor, Node) and operation(tensor) in MOVING:
        tensor = tensor.args[0]  # a split's result is a list
    return tensor if isinstance(tensor, Node) else None


def mark_behind_moves(graph: Graph, fixed: Collection[str] = ()) -> None:
    """Put the mark of an operand again behind every operation that only moves its values, or joins values of one grid.

    Those in `fixed` stay where they are: with one scale per channel a tensor whose axes are moved has another grid.

    A quantizer applied twice changes nothing, so neither does this; but afterwards a look at the neighbours of an operation tells
    whether it runs on integers.
    """
    for node in graph.nodes:
        key = _carried(node)
        readers = [user for user in node.users if user.target is not QUANTIZED]
        if key is None or key in fixed or not readers or not isinstance(node.meta.get("val"), Tensor):
            continue
        with graph.inserting_after(node):
            mark = marked(graph, node, key)
        for reader in readers:
            reader.replace_input_with(node, mark)


def marked(graph: Graph, x: Node, key: str) -> Node:
    """A new mark of a tensor, where the graph inserts."""
    mark = graph.call_function(QUANTIZED, (x, key))
    mark.meta = shared_meta(x)
    return mark


def shared_meta(node: Node) -> dict[str, Any]:
    """What is true of a new node beside another one too: not the operator that it came from, nor the sizes that it alone makes."""
    return {name: value for name, value in node.meta.items() if name not in ("original_aten", "unbacked_bindings")}


def _carried(node: Node) -> str | None:
    """The key of the one quantizer whose grid holds all results of `node`, if it only moves values."""
    if is_moving(node):
        return key_of(moved_from(node))
    joined: Any = node.args[0] if operation(node) in JOINING else node.args[1:] if operation(node) == "where" else ()
    keys = {key_of(tensor) for tensor in joined}
    return keys.pop() if len(keys) == 1 else None


def _pads_with_zero(node: Node, name: str) -> bool:
    if name == "constant_pad_nd":
        return not (node.args[2] if len(node.args) > 2 else 0)
    if name != "pad":
        return False
    mode = node.args[2] if len(node.args) > 2 else node.kwargs.get("mode", "constant")
    value = node.args[3] if len(node.args) > 3 else node.kwargs.get("value")
    return mode != "constant" or not value
