"""Sums of products of integers, exact in floating point.

A float32 convolution of whole numbers is exact, in whatever order it adds, while no sum of magnitudes reaches 2**24; one in float64
below 2**53, which no layer reaches. Float32 is several times as fast, so an operand that is too large for it is split in two first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_FLOAT32 = 2.0**24
_SPLIT = 32.0
INT32_MAX = torch.iinfo(torch.int32).max


class AccumulatorOverflow(ArithmeticError):
    """A sum of products left the range of int32, in which the integer kernels of every runtime add."""

    def __init__(self, largest: float) -> None:
        super().__init__(f"an accumulator holds {largest:.0f}; expected at most {INT32_MAX} in magnitude")
        self.largest = largest


@dataclass(frozen=True)
class Weight:
    """An operand that is used many times.

    Attributes
    ----------
    values : Tensor, float32
        Integers minus zero points.
    reach : float
        The largest sum of magnitudes that goes into one result.
    """

    values: Tensor
    reach: float

    @classmethod
    def of(cls, values: Tensor, summed: Sequence[int]) -> Weight:
        """`summed`: the axes of `values` over which a result sums."""
        return cls(values, float(values.double().abs().sum(list(summed)).max()) if values.numel() else 0.0)


@dataclass(frozen=True)
class Addend:
    """What is added to each sum.

    Attributes
    ----------
    values : Tensor, float64
        Whole numbers.
    reach : float
        The largest magnitude.
    """

    values: Tensor
    reach: float

    @classmethod
    def of(cls, values: Tensor) -> Addend:
        return cls(values, float(values.abs().max()) if values.numel() else 0.0)


def sums(x: Tensor, limit: float, weight: Weight, product: Callable[[Tensor, Tensor], Tensor], bias: Addend | None = None) -> Tensor:
    """``product(x, weight) + bias``, exact.

    Parameters
    ----------
    x : Tensor, float32
        Whole numbers of at most `limit` in magnitude, which is at most 2**16.
    weight : Weight
    product : callable
        Linear in both operands; computes in their dtype.
    bias : Addend, optional
        In a shape that broadcasts with the product.

    Returns
    -------
    Tensor, float32 or float64
        Whole numbers.

    Raises
    ------
    AccumulatorOverflow
    """
    largest = weight.reach * limit
    if not _float32_is_exact(x.device) or weight.reach * _SPLIT >= _FLOAT32:
        total = product(x.double(), weight.values.double())
    elif largest < _FLOAT32:
        total = product(x, weight.values)
    else:
        high = (x / _SPLIT).floor()
        total = product(high, weight.values).double() * _SPLIT + product(x - high * _SPLIT, weight.values)
    if bias is not None:
        largest += bias.reach
        total = total + (bias.values.float() if total.dtype is torch.float32 and largest < _FLOAT32 else bias.values)
    if largest > INT32_MAX and total.numel() and (found := float(total.abs().max())) > INT32_MAX:
        raise AccumulatorOverflow(found)
    return total


def _float32_is_exact(device: torch.device) -> bool:
    """Whether float32 products are computed as such: on CUDA there are Winograd and FFT convolutions, and TensorFloat32."""
    backend = torch.backends.mkldnn
    precisions = {getattr(backend, kind).fp32_precision for kind in ("conv", "matmul")}
    return device.type == "cpu" and torch._C._has_mkldnn and bool(backend.enabled) and precisions <= {"none", "ieee"}


def convolution(x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int) -> Tensor:
    """A convolution over one to three axes, zeros around `x`. In float32 never by Winograd, which NNPACK may take."""
    if x.dtype is torch.float64:
        return (F.conv1d, F.conv2d, F.conv3d)[x.dim() - 3](x, weight, None, stride, padding, dilation, groups)
    if x.dim() == 3:  # oneDNN's operator has two axes at least
        flat = convolution(x.unsqueeze(2), weight.unsqueeze(2), (1, *stride), (0, *padding), (1, *dilation), groups)
        return flat.squeeze(2)
    result: Tensor = torch.ops.aten.mkldnn_convolution(x.contiguous(), weight, None, padding, stride, dilation, groups)
    return result
