"""Quantization by the range of each tensor itself, as a spec says."""

from __future__ import annotations

from torch import Tensor

from qsim import ops
from qsim.numbers.spec import TensorSpec


def quantize_dynamically(x: Tensor, spec: TensorSpec) -> Tensor:
    """`x` with scales from itself, a new tensor; differentiable (straight-through, the scales held fixed).

    Parameters
    ----------
    x : Tensor, float16/bfloat16/float32/float64
    spec : TensorSpec
        With ``method="dynamic"``; one axis at most.
    """
    assert isinstance(spec.axis, int | None)
    assert isinstance(spec.block_size, int | None)
    axis = spec.axis if x.dim() else None  # a number is a line of one
    block_size = spec.block_size if axis is not None else None
    if spec.is_float:
        return ops.round_to_format_dynamic(
            x,
            spec.dtype,
            axis=axis,
            block_size=block_size,
            saturate=spec.saturate,
            min_scale=spec.min_scale,
            scale_format=spec.scale_format,
            scale_rounding=spec.scale_rounding,
        )
    return ops.fake_quantize_dynamic(
        x,
        spec.quant_min,
        spec.quant_max,
        axis=axis,
        block_size=block_size,
        symmetric=spec.symmetric,
        rounding=spec.rounding,
        min_scale=spec.min_scale,
        scale_format=spec.scale_format,
        scale_rounding=spec.scale_rounding,
    )
