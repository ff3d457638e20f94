"""Marks in front of rectifiers that no grid absorbs, so that the operation before them runs on integers."""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import Graph, Node

from qsim.deploy.carry import key_of, operation
from qsim.encoding import Encoding
from qsim.graph.marks import QUANTIZED

_CLAMPS = frozenset({"relu", "relu_", "relu6", "hardtanh", "hardtanh_", "clamp", "clamp_", "clamp_min", "clamp_max", "clip"})


def hoist_marks(graph: Graph, encodings: Mapping[str, Encoding]) -> None:
    """Quantize also before a rectifier whose result is quantized, where the grid does not end as the rectifier does.

    Kernels take a rectifier over only if clamping to the grid does the same: a symmetric grid goes on below 0. Rounding to a grid
    and clamping are both monotone, and the first is idempotent, so ``q(clamp(x)) == q(clamp(q(x)))`` for every x: a second quantizer,
    the same one, in front changes no result.
    """
    for mark in list(graph.nodes):
        key = key_of(mark)
        clamp = mark.args[0] if key in encodings else None
        if not isinstance(clamp, Node) or operation(clamp) not in _CLAMPS or len(clamp.users) > 1 or len(clamp.all_input_nodes) > 1:
            continue
        before = clamp.args[0]
        if not isinstance(before, Node) or key_of(before) is not None or len(before.users) > 1 or absorbs(encodings[str(key)], clamp):
            continue
        with graph.inserting_before(clamp):
            made = graph.call_function(QUANTIZED, (before, key))
        made.meta = dict(before.meta)
        clamp.replace_input_with(before, made)


def limits(clamp: Node) -> tuple[float, float]:
    """The numbers between which a rectifier's results lie; infinite where it has no such end."""
    name, given = operation(clamp), [*clamp.args[1:], None, None]
    low, high = clamp.kwargs.get("min", given[0]), clamp.kwargs.get("max", given[1])
    if name.startswith("relu"):
        low, high = 0.0, 6.0 if name == "relu6" else None
    elif name.startswith("hardtanh"):
        low, high = (-1.0 if low is None else low), (1.0 if high is None else high)
    elif name == "clamp_max":
        low, high = None, clamp.kwargs.get("max", given[0])
    return float("-inf") if low is None else float(low), float("inf") if high is None else float(high)  # type: ignore[arg-type]


def absorbs(encoding: Encoding, clamp: Node) -> bool:
    """Whether quantizing to a grid does what the rectifier before it does: the grid lies between its limits."""
    low, high = limits(clamp)
    return bool((encoding.min >= low).all()) and bool((encoding.max <= high).all())
