"""Marks in front of rectifiers that no grid absorbs, so that the operation before them runs on integers."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch.fx import Graph, Node

from qsim.numbers.encoding import Encoding
from qsim.trace.fx_nodes import arguments, function, is_float
from qsim.trace.marks_behind_moves import key_of, marked


def mark_before_rectifiers(graph: Graph, encodings: Mapping[str, Encoding]) -> None:
    """Quantize also before a rectifier whose result is quantized, where the grid does not end as the rectifier does.

    Kernels take a rectifier over only if clamping to the grid does the same: a symmetric grid goes on below 0. Rounding to a grid
    and clamping are both monotone, and the first is idempotent, so ``q(clamp(x)) == q(clamp(q(x)))`` for every x: a second quantizer,
    the same one, in front changes no result.
    """
    for mark in list(graph.nodes):
        key = key_of(mark)
        clamp = mark.args[0] if key in encodings else None
        if not isinstance(clamp, Node) or len(clamp.users) > 1 or limits_of(clamp) is None or absorbs(encodings[str(key)], clamp):
            continue
        before = clamp.args[0]
        if not isinstance(before, Node) or not is_float(before) or key_of(before) is not None or len(before.users) > 1:
            continue
        with graph.inserting_before(clamp):
            clamp.replace_input_with(before, marked(graph, before, str(key)))


def limits_of(node: Node) -> tuple[float, float] | None:
    """What a rectifier clips to, infinite where it has no such end; None if the node is none, or clips to tensors."""
    name = function(node)
    if name == "relu":
        return 0.0, math.inf
    if name == "relu6":
        return 0.0, 6.0
    if name not in ("hardtanh", "clamp", "clamp_min", "clamp_max", "clip"):
        return None
    given = arguments(node)
    low, high = given.get("min_val", given.get("min")), given.get("max_val", given.get("max"))
    if isinstance(low, Node) or isinstance(high, Node):
        return None
    return -math.inf if low is None else float(low), math.inf if high is None else float(high)


def absorbs(encoding: Encoding, clamp: Node) -> bool:
    """Whether quantizing to a grid of one scale does what the rectifier before it does, because it clips no more than the grid does.

    A ReLU does not if the zero point is the smallest integer. So decide runtimes as well, on limits that are rounded to the grid.
    """
    limits = limits_of(clamp)
    assert limits is not None
    return clips_to(encoding, *limits)


def clips_to(encoding: Encoding, lowest: float, highest: float) -> bool:
    """Whether quantizing to a grid of one scale clips all that lies outside of [lowest, highest]."""
    low, high = (torch.tensor(limit) / encoding.scale.float().cpu() for limit in (lowest, highest))
    zero_point = encoding.zero_point.cpu()
    first, last = float(encoding.quant_min), float(encoding.quant_max)  # of bfloat16 beyond all integer types
    return bool((low.round() + zero_point <= first).all()) and bool((high.round() + zero_point >= last).all())
