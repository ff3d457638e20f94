"""Slices of everything, casts to the type that a tensor has, additions of zero: dropped, so that what is around them are neighbours."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Graph, Node

from qsim.operations.functions import adds_nothing
from qsim.trace.fx_nodes import arguments

_aten = torch.ops.aten
CASTS = (_aten.to.dtype, _aten.to.dtype_layout, _aten.to.device, _aten.to.other, _aten.type_as.default)
SUMS = (_aten.add.Tensor, _aten.add.Scalar)


def drop_idle_nodes(graph: Graph) -> None:
    """Have readers of what is a whole tensor as it is, as ``x[:, :x.shape[1]]``, ``x.float()`` and ``0 + x`` are, read the tensor.
    Results of the model stay."""
    for node in list(graph.nodes):
        if any(user.op == "output" for user in node.users) or not (_is_whole_slice(node) or _is_idle_cast(node) or _is_idle_sum(node)):
            continue
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)


def _is_whole_slice(node: Node) -> bool:
    if node.target is not _aten.slice.Tensor or (node.args[4] if len(node.args) > 4 else 1) != 1:
        return False
    shapes = [value.meta["val"].shape for value in (node.args[0], node) if isinstance(value.meta.get("val"), Tensor)]  # type: ignore[union-attr]
    return len(shapes) == 2 and _equal(*shapes)


def _is_idle_cast(node: Node) -> bool:
    """Whether a cast returns the very tensor that it is given."""
    if node.target not in CASTS:
        return False
    given, x, made = arguments(node), node.args[0].meta.get("val"), node.meta["val"]  # type: ignore[union-attr]
    as_it_is = not given.get("copy") and given.get("memory_format") is None
    return as_it_is and isinstance(x, Tensor) and (x.dtype, x.device, x.layout) == (made.dtype, made.device, made.layout)


def _is_idle_sum(node: Node) -> bool:
    """Whether a number is added that changes none of a tensor's, nor their type: ``sum([a, b])`` begins so."""
    if node.target not in SUMS or not isinstance(node.args[0], Node) or not adds_nothing("add", dict(enumerate(node.args))):
        return False
    return bool(node.args[0].meta["val"].dtype == node.meta["val"].dtype)


def _equal(whole: torch.Size, part: torch.Size) -> bool:
    """Whether shapes are the same for every size that is open: those are asked for nothing, which would fix them."""
    return all(str(a) == str(b) for a, b in zip(whole, part, strict=True))
