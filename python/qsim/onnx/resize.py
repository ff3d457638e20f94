"""Linear and cubic interpolation by factors that give no whole sizes. Where 6 elements become ``F.interpolate(x, scale_factor=1.7)``, torch
goes in steps of 1 / 1.7. PyTorch's exporter writes the size, 10, and a runtime goes in steps of 6 / 10, without a word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onnxscript.function_libs.torch_lib.ops import nn


def resizes(op: Any) -> dict[str, Callable[..., Any]]:
    """Translations by the names of ATen's operators; `op`: an opset of onnxscript."""

    def of(mode: str, others: Callable[..., Any]) -> Callable[..., Any]:
        def translated(x: Any, output_size: Any, align_corners: bool, *factors: float | None) -> Any:
            lengths = list(x.shape)[2:]
            known = all(isinstance(n, int) for n in lengths) and None not in factors and len(factors) == len(lengths)
            if align_corners or not known or all((n * f).is_integer() for n, f in zip(lengths, factors, strict=True)):  # type: ignore[operator]
                return others(x, output_size, align_corners, *factors)
            scales = op.Constant(value_floats=[1.0, 1.0, *factors])
            half = "pytorch_half_pixel"
            return op.Resize(x, None, scales, None, mode=mode, coordinate_transformation_mode=half, cubic_coeff_a=-0.75)

        return translated

    linear, cubic = of("linear", nn.aten_upsample_bilinear2d), of("cubic", nn.aten_upsample_bicubic2d)
    return {"upsample_bilinear2d": linear, "upsample_bicubic2d": cubic}
