"""Quantization by the range of each tensor, token or block itself, and the scales of block formats."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qsim.numbers.float_format import FLOAT_FORMATS
from qsim.reference.choose_qparams import choose_qparams
from qsim.reference.fake_quantize import fake_quantize
from qsim.reference.layout import blocks_of
from qsim.reference.observe import observe_range_
from qsim.reference.round_to_format import round_to_format

_E4M3 = FLOAT_FORMATS["float8_e4m3fn"]
_TINY = torch.finfo(torch.float32).tiny


def _element(name: str) -> tuple[float, float, float]:
    """Largest number, distance from 1 to the next, and the unit that integers count in."""
    if name in FLOAT_FORMATS:
        form = FLOAT_FORMATS[name]
        return form.largest, form.eps, 1.0
    unit = 2.0 ** (2 - int(name.removeprefix("int")))
    return 2 - unit, unit, unit


def _floor_log2(x: Tensor) -> Tensor:
    return torch.frexp(x).exponent.double() - 1


def _power_of_two(magnitude: Tensor, element: str, rounding: str) -> Tensor:
    largest, eps, unit = _element(element)
    top = math.frexp(largest)[1] - 1
    if rounding == "even":
        mantissa = torch.frexp(magnitude).mantissa * 2  # 1 <= mantissa < 2
        exponent = _floor_log2(magnitude) + ((mantissa / eps + 0.5).floor() * eps >= 2) - top
    elif rounding == "rceil":
        quotient = torch.frexp(magnitude / largest)
        exponent = quotient.exponent.double() - (quotient.mantissa == 0.5).double()
    else:
        power = torch.pow(2.0, _floor_log2(magnitude))
        exponent = _floor_log2(magnitude) + ((magnitude > power) if rounding == "ceil" else 0) - top
    return torch.pow(2.0, exponent.clamp(-127, 127)) * unit


def _two_levels(magnitude: Tensor, usable: Tensor, element: str) -> Tensor:
    """E4M3 times float32; every product and quotient rounded to float32."""
    largest, _, _ = _element(element)
    whole = torch.where(usable, magnitude, 0).float().max() if magnitude.numel() else magnitude.new_zeros(()).float()
    of_tensor = torch.where(whole == 0, 1.0, (whole / (_E4M3.largest * largest)).clamp(min=_TINY))
    stored = (magnitude.float() / (largest * of_tensor)).clamp(2**-9, _E4M3.largest)
    stored = round_to_format(stored, "float8_e4m3fn")
    return torch.where(magnitude == 0, 1.0, stored) * of_tensor


def choose_block_scale(lowest: Tensor, highest: Tensor, element: str, scale_format: str, *, scale_rounding: str = "floor") -> Tensor:
    """Twin of `qsim.ops.choose_block_scale` (docs/numerics.md, section 9).

    Examples
    --------
    >>> low, high = torch.tensor([-5.0]), torch.tensor([7.0])
    >>> choose_block_scale(low, high, "float4_e2m1fn", "float8_e8m0fnu").item()  # 4 / 4: powers of two
    1.0
    """
    magnitude = torch.maximum(-lowest, highest).double()
    usable = (lowest <= highest) & magnitude.isfinite()
    if scale_format == "float8_e4m3fn":
        scale = _two_levels(magnitude, usable, element)
    else:
        scale = torch.where(
            magnitude == 0, 1.0, _power_of_two(torch.where(usable & (magnitude > 0), magnitude, 1.0), element, scale_rounding)
        )
    return torch.where(usable, scale, torch.nan).float()


def _ranges(x: Tensor, axis: int | None, block_size: int | None) -> tuple[Tensor, Tensor]:
    _, shape = blocks_of(x, axis, block_size)
    lowest, highest = torch.full(shape, torch.inf), torch.full(shape, -torch.inf)
    observe_range_(x, lowest, highest, torch.zeros(4, dtype=torch.int64), axis, block_size=block_size)
    return lowest, highest


def _block(x: Tensor, axis: int | None, block_size: int | None) -> int | None:
    """Length of a block; without a block size as long as the axis."""
    return max(x.shape[axis], 1) if axis is not None and block_size is None else block_size


def fake_quantize_dynamic(
    x: Tensor,
    quant_min: int,
    quant_max: int,
    *,
    axis: int | None = None,
    block_size: int | None = None,
    symmetric: bool = False,
    rounding: str = "divide",
    min_scale: float = 0.0,
    scale_format: str | None = None,
    scale_rounding: str = "floor",
) -> Tensor:
    """Twin of `qsim.ops.fake_quantize_dynamic` (docs/numerics.md, section 9).

    Examples
    --------
    >>> x = torch.tensor([[1.0, 0.3], [100.0, 30.0]])  # two tokens
    >>> torch.equal(fake_quantize_dynamic(x, -8, 7, axis=-1), qsim.ops.fake_quantize_dynamic(x, -8, 7, axis=-1))
    True
    """
    block = _block(x, axis, block_size)
    low, high = _ranges(x, axis, block)
    if scale_format is None:
        scale, zero_point = choose_qparams(low, high, quant_min, quant_max, symmetric, min_scale=min_scale)
    else:
        element = f"int{quant_max.bit_length() + 1}"
        scale = choose_block_scale(low, high, element, scale_format, scale_rounding=scale_rounding)
        zero_point = torch.zeros_like(scale, dtype=torch.int32)
    scale = scale.double() if x.dtype == torch.float64 else scale
    return fake_quantize(x, scale, zero_point, quant_min, quant_max, axis=axis, block_size=block, rounding=rounding)


def round_to_format_dynamic(
    x: Tensor,
    format: str,
    *,
    axis: int | None = None,
    block_size: int | None = None,
    saturate: bool | None = None,
    min_scale: float = 0.0,
    scale_format: str | None = None,
    scale_rounding: str = "floor",
) -> Tensor:
    """Twin of `qsim.ops.round_to_format_dynamic` (docs/numerics.md, section 9).

    Examples
    --------
    >>> x = torch.tensor([[1.0, 0.3], [100.0, 30.0]])
    >>> rounded = round_to_format_dynamic(x, "float8_e4m3fn", axis=-1)
    >>> torch.equal(rounded, qsim.ops.round_to_format_dynamic(x, "float8_e4m3fn", axis=-1))
    True
    """
    block = _block(x, axis, block_size)
    low, high = _ranges(x, axis, block)
    if scale_format is None:
        if FLOAT_FORMATS[format].has_fraction:
            raise ValueError(f"round_to_format_dynamic: {format} has no scale in float32; expected scale_format='float8_e8m0fnu'")
        largest = int(FLOAT_FORMATS[format].largest)
        scale, _ = choose_qparams(low, high, -largest, largest, True, min_scale=min_scale)
    else:
        scale = choose_block_scale(low, high, format, scale_format, scale_rounding=scale_rounding)
    scale = scale.double() if x.dtype == torch.float64 else scale
    return round_to_format(x, format, saturate=saturate, scale=scale, axis=axis, block_size=block)
