"""Slices of everything: dropped, so that what is in front of them and behind are neighbours."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Graph

_SLICE = torch.ops.aten.slice.Tensor


def drop_idle_slices(graph: Graph) -> None:
    """Have readers of a slice that is the whole tensor, as in ``x[:, :x.shape[1]]``, read the tensor. Results of the model stay."""
    for node in list(graph.nodes):
        if node.target is not _SLICE or any(user.op == "output" for user in node.users):
            continue
        whole, step = node.args[0], node.args[4] if len(node.args) > 4 else 1
        shapes = [value.meta["val"].shape for value in (whole, node) if isinstance(value.meta.get("val"), Tensor)]
        if step == 1 and len(shapes) == 2 and _equal(*shapes):
            node.replace_all_uses_with(whole)
            graph.erase_node(node)


def _equal(whole: torch.Size, part: torch.Size) -> bool:
    """Whether shapes are the same for every size that is open: those are asked for nothing, which would fix them."""
    return all(str(a) == str(b) for a, b in zip(whole, part, strict=True))
