"""What the float formats are: their widths, largest numbers and habits (docs/numerics.md, section 7)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class FloatFormat:
    """The numbers of a binary float format.

    Attributes
    ----------
    bits : int
        Width in memory.
    largest, smallest_normal, eps : float
        Largest finite number, smallest normal number, distance from 1 to the next number.
    infinite : bool
        Whether the format has Inf. Without it (float8_e4m3fn) an overflow is NaN; formats of 6 and 4 bits have no NaN either.
    saturates : bool
        What hardware does with an overflow unless told otherwise: units of 8 bits and fewer saturate, as ONNX's QuantizeLinear;
        float16 and bfloat16 arithmetic goes to Inf.
    scaled : bool
        Whether tensors are deployed as numbers of the format times a scale: formats of 8 bits and fewer, whose range is narrow.
    """

    bits: int
    largest: float
    smallest_normal: float
    eps: float
    infinite: bool
    saturates: bool
    scaled: bool

    @property
    def has_fraction(self) -> bool:
        """Whether the largest number is no integer: then it has no scale in float32, which is chosen as for integers up to it."""
        return self.largest != int(self.largest)


def are_powers_of_two(numbers: Tensor) -> bool:
    """Whether all of some positive numbers are, as E8M0 stores them."""
    return bool((numbers.float().frexp().mantissa == 0.5).all())


def _format(dtype: torch.dtype, *, infinite: bool = True) -> FloatFormat:
    info = torch.finfo(dtype)
    narrow = info.bits == 8
    return FloatFormat(info.bits, info.max, info.smallest_normal, info.eps, infinite, saturates=narrow, scaled=narrow)


FLOAT_FORMATS = {
    "float16": _format(torch.float16),
    "bfloat16": _format(torch.bfloat16),
    "float8_e4m3fn": _format(torch.float8_e4m3fn, infinite=False),
    "float8_e5m2": _format(torch.float8_e5m2),
    # OCP Microscaling Formats (MX) Specification v1.0, section 5.3; torch has no dtypes for them.
    "float6_e3m2fn": FloatFormat(6, 28.0, 0.25, 0.25, infinite=False, saturates=True, scaled=True),
    "float6_e2m3fn": FloatFormat(6, 7.5, 1.0, 0.125, infinite=False, saturates=True, scaled=True),
    "float4_e2m1fn": FloatFormat(4, 6.0, 1.0, 0.5, infinite=False, saturates=True, scaled=True),
}
HALF_FORMATS = ("float16", "bfloat16")
# What people, and TensorRT's flags, call types of numbers.
SHORT_NAMES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float8_e4m3fn": "fp8"}
