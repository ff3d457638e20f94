"""``scatter_reduce`` in ONNX. PyTorch's own translation writes a mean as the last value that is scattered, without a word, and files that
do not run where there are fewer places than values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

# Of each reduction: ONNX's word, and what changes no result.
_REDUCTIONS = {"sum": ("add", 0.0), "mean": ("add", 0.0), "prod": ("mul", 1.0), "amax": ("max", -math.inf), "amin": ("min", math.inf)}


def scatter_reduce(op: Any) -> Callable[..., Any]:
    """The translation, by an opset of onnxscript."""

    def translated(x: Any, dim: int, index: Any, src: Any, reduce: str, *, include_self: bool = True) -> Any:
        reduction, neutral = _REDUCTIONS[reduce]
        if not x.dtype.is_floating_point() and (reduce == "mean" or (not include_self and math.isinf(neutral))):
            raise NotImplementedError(f"scatter_reduce of integers with reduce='{reduce}'")
        if is_single := len(x.shape) == 0:
            x, index, src = (op.Reshape(value, op.Constant(value_ints=[-1])) for value in (x, index, src))
        places = op.Shape(index)
        if list(map(str, src.shape)) != list(map(str, index.shape)):
            src = op.Slice(src, op.Expand(op.Constant(value_ints=[0]), op.Shape(places)), places)

        def scattered(start: Any, number: float, how: str) -> Any:
            value = op.Expand(op.CastLike(op.Constant(value_float=number), x), places)
            return op.ScatterElements(start, index, value, axis=dim, reduction=how)

        start = x if include_self else scattered(x, neutral, "none")
        result = op.ScatterElements(start, index, src, axis=dim, reduction=reduction)
        if reduce == "mean":
            ones = op.Expand(op.CastLike(op.Constant(value_float=1.0), x), op.Shape(x))
            result = op.Div(result, scattered(ones if include_self else scattered(ones, 0.0, "none"), 1.0, "add"))
        return op.Squeeze(result) if is_single else result

    return translated
