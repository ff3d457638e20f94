"""What the plan knows of operations beyond their kind: which fuse, and which axes their weights are quantized along."""

from __future__ import annotations

from typing import NamedTuple

from qsim.graph.functions import BIAS, WEIGHT
from qsim.graph.tape import Slot

_RECTIFIERS = frozenset({"relu", "relu6", "hardtanh", "clamp", "clamp_min", "clamp_max", "clip"})


def fuses(producer: str, reader: str, reader_op: str) -> bool:
    """Whether inference engines run the two as one operation, so that nothing is quantized between them.

    Parameters
    ----------
    producer, reader : str
        Kinds, as `qsim.graph.functions.kind_of` gives them.
    reader_op : str
        The reading function's name.
    """
    if producer in ("mac", "batch_norm"):
        return reader == "act" or (producer == "mac" and reader == "batch_norm")
    return producer == "add" and reader_op in _RECTIFIERS


class WeightAxes(NamedTuple):
    """Axes of a weight operand: `output` has one scale a channel, `input` is what the products are summed over (blocks lie along it)."""

    output: int
    input: int


_LEFT = WeightAxes(-2, -1)  # of a matrix product
_RIGHT = WeightAxes(-1, -2)

# operation -> position of the operand -> its axes
_WEIGHTS: dict[str, dict[int, WeightAxes]] = {
    **{op: {position: WeightAxes(axis, 1 - axis)} for op, (position, axis) in WEIGHT.items()},
    **{op: {0: _LEFT, 1: _RIGHT} for op in ("matmul", "mm", "bmm", "mv")},
    "rmatmul": {0: _RIGHT, 1: _LEFT},
    **{op: {1: _LEFT, 2: _RIGHT} for op in ("addmm", "baddbmm", "addbmm", "addmv")},
    "embedding_bag": {1: WeightAxes(0, 1)},
    "bilinear": {2: WeightAxes(0, 1)},
}
_ADDED_FIRST = frozenset({"addmm", "baddbmm", "addbmm", "addmv"})


def weight_axes(op: str, slot: Slot) -> WeightAxes | None:
    """Axes of the weight that `op` takes at `slot`; None: it takes none there."""
    axes = _WEIGHTS.get(op, {})
    return next(iter(axes.values()), None) if slot == "weight" else axes.get(slot) if isinstance(slot, int) else None


def is_bias(op: str, slot: Slot, dims: int) -> bool:
    """Whether a constant operand is added to the products of a multiply-accumulate."""
    if op in _ADDED_FIRST:
        return slot in (0, "input")
    return op in BIAS and slot in (BIAS[op], "bias")


def stays_float(kind: str, dims: int) -> str | None:
    """Why a constant operand has no quantizer of its own, or None when it has one."""
    if kind in ("norm", "batch_norm"):
        return "affine parameters and statistics of a normalization stay in float"
    return "a single number" if dims == 0 else None
