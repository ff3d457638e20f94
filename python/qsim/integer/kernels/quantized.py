"""Integers with the grid that they lie on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qsim import ops
from qsim.numbers.encoding import Encoding

_STORAGE = (torch.uint8, torch.int8, torch.uint16, torch.int16)


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A quantized tensor.

    Parameters
    ----------
    integers : Tensor, int8, uint8, int16 or uint16
        The smallest of these types that holds the grid.
    encoding : Encoding
        Integers, per tensor or per channel.
    """

    integers: Tensor
    encoding: Encoding

    @property
    def centered(self) -> Tensor:
        """Integers minus zero points, float32: exact, as a grid has at most 2**16 of them."""
        return self.integers.float() - along(self.encoding.zero_point.float(), self.encoding, self.integers.dim())

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """What DequantizeLinear makes of it."""
        e = self.encoding
        return ops.dequantize(self.integers, e.scale, e.zero_point, axis=e.axis, block_size=e.block_size, dtype=dtype)


def along(values: Tensor, encoding: Encoding, dims: int) -> Tensor:
    """`values`, one per channel of the encoding, in a shape that broadcasts with a tensor of so many dimensions."""
    if not isinstance(encoding.axis, int):
        return values
    return values.reshape([-1 if i == encoding.axis % dims else 1 for i in range(dims)])


def quantize(x: Tensor, encoding: Encoding) -> QuantizedTensor:
    """What QuantizeLinear makes of `x`: ``clip(rint(x / scale) + zero_point)``; NaN becomes the smallest integer."""
    e = encoding
    grid = (e.scale, e.zero_point, e.quant_min, e.quant_max)
    return QuantizedTensor(ops.quantize(x, *grid, axis=e.axis, block_size=e.block_size), encoding)


def saturated(rounded: Tensor, encoding: Encoding) -> QuantizedTensor:
    """Whole numbers in a floating-point tensor, which is overwritten, zero point included: clipped and stored as `quantize` stores them."""
    low, high = encoding.quant_min, encoding.quant_max
    storage = next(t for t in _STORAGE if torch.iinfo(t).min <= low and high <= torch.iinfo(t).max)
    return QuantizedTensor(rounded.clamp_(low, high).to(storage), encoding)
