"""What the plan knows of operations whatever the target: where weights and biases stand, and the limits that a clip has."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from qsim.graph.record.tape import Slot, Step
from qsim.numbers.spec import TensorSpec
from qsim.operations.functions import BIAS_POSITION, WEIGHT, name_of


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
    "grouped_mm": {1: _RIGHT},
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
    return op in BIAS_POSITION and slot in (BIAS_POSITION[op], "bias")


def is_multiplied(op: str, slot: Slot, dims: int) -> bool:
    """Whether an operand of a multiply-accumulate is a factor of its products, not added to them."""
    mask = op == "scaled_dot_product_attention" and slot in (3, "attn_mask")
    return not mask and not is_bias(op, slot, dims)


def stays_float(kind: str, dims: int) -> str | None:
    """Why a constant operand has no quantizer of its own, or None when it has one."""
    if kind in ("norm", "batch_norm"):
        return "affine parameters and statistics of a normalization stay in float"
    return "a single number" if dims == 0 else None


# operation -> where it has an operand that must not be zero, neither for the result nor for its gradient
_DIVISORS: dict[str, tuple[Slot, ...]] = {
    **dict.fromkeys(("div", "divide", "true_divide"), (1, "other")),
    **dict.fromkeys(("rdiv", "rtruediv", "reciprocal", "sqrt", "rsqrt", "log", "log2", "log10"), (0, "input")),
    "addcdiv": (2, "tensor2"),
}
# operations whose result is zero only if their one operand is: `w.sum()`, `variance + eps`
_HANDING_ON = frozenset({"sum", "mean", "add", "radd", "clamp", "clamp_min"})


def weight_spec(spec: TensorSpec, axes: WeightAxes | None, dims: int) -> TensorSpec:
    """A config's spec for a weight with so many dimensions, with its axes 0 and 1 (output and input channels) where the weight has them."""
    if axes is None or dims < 2:
        return replace(spec, axis=None, block_size=None)  # a vector is summed over: it has no output channels
    if isinstance(spec.axis, tuple):
        return replace(spec, axis=tuple(axes[a] % dims if a in (0, 1) else a for a in spec.axis))
    along_sums = spec.axis == -1 and spec.scale_format is not None  # blocks of the formats that store their scales lie there
    axis = 1 if along_sums else spec.axis
    return replace(spec, axis=axes[axis] % dims) if axis in (0, 1) else spec


def computed_spec(spec: TensorSpec) -> TensorSpec:
    """A config's spec for a tensor that is computed from parameters. It is observed, and per channel that gives minimum and maximum."""
    return spec if spec.axis is None or spec.is_running else replace(spec, method="minmax")


def is_divisor(step: Step, slot: Slot) -> bool:
    """Whether an operand must not be zero, as a small one rounded to a grid is."""
    op = name_of(step.func)
    if op == "pow":
        exponent = step.options.get(1, step.options.get("exponent"))
        return slot in (0, "input") and isinstance(exponent, (int, float)) and exponent < 1
    return slot in _DIVISORS.get(op, ())


def hands_on(step: Step) -> bool:
    """Whether the result of a step is as far from zero as its operand is, as sums of positive numbers are."""
    return name_of(step.func) in _HANDING_ON and len(step.operands) == 1
