from __future__ import annotations

import torch
from torch import Tensor

from qsim.numbers.blocks import Axes, along_one_axis

_quantize = torch.ops.qsim.quantize.default
_dequantize = torch.ops.qsim.dequantize.default


def quantize(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    quant_min: int,
    quant_max: int,
    *,
    axis: Axes = None,
    block_size: Axes = None,
    rounding: str = "divide",
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The integers that `fake_quantize` rounds to: ``clamp(rint(x / scale) + zero_point, quant_min, quant_max)``, ties to even.

    `dequantize` of the result is what `fake_quantize` gives, bit for bit, wherever `x` is not NaN.

    Parameters
    ----------
    x : Tensor, any shape and strides, float16, bfloat16, float32 or float64
        Integers hold no NaN: it becomes `quant_min`, as ONNX Runtime's QuantizeLinear stores it. Infinities go to the ends of
        the grid.
    scale : Tensor, float32 (float64 for float64 `x`), positive
        One element without `axis`; shape ``[C]`` with `axis`; with `block_size` the shape of `x` with ``ceil(n / block_size)``
        along `axis` (the last block may be short).
    zero_point : Tensor, int32, shape of `scale`
        Within the grid. A learned one is rounded first (``zero_point.round().int()``).
    quant_min, quant_max : int
        Ends of the grid.
    axis : int or sequence of int, optional
        Dimension of `x` that the channels or blocks lie along; negative counts from the end.
    block_size : int or sequence of int, optional
        Elements along `axis` that share a scale. With a sequence of axes and of block sizes tiles share one: ``axis=(0, 1),
        block_size=(128, 128)``; `scale` then has ``ceil(n / block_size)`` along each of them.
    rounding : {"divide", "reciprocal"}
        ``x / scale`` as ONNX QuantizeLinear, or ``x * (1 / scale)`` as torch core and TensorRT; they differ at ties.
    dtype : torch.int8, torch.uint8, torch.int16 or torch.uint16, optional
        Storage of the integers. Default: the smallest that holds the grid, an unsigned one where ``quant_min >= 0``. Grids of
        four bits take one byte an integer; `pack_int4` then halves that.

    Returns
    -------
    Tensor, shape of `x`
        Strides of `x` if its elements are dense in memory. Without gradient, as every integer tensor.

    Raises
    ------
    ValueError, TypeError, IndexError
        Shapes, dtypes or options that do not fit, saying what was expected.

    Examples
    --------
    >>> x = torch.tensor([-1.0, 0.25, 0.75, 9.0, torch.nan])
    >>> quantize(x, torch.tensor(0.5), torch.tensor(0, dtype=torch.int32), -8, 7)
    tensor([-2,  0,  2,  7, -8], dtype=torch.int8)

    Notes
    -----
    Source: ONNX operator QuantizeLinear, opset 21; docs/numerics.md, section 1.
    """
    axis, block_size, (scale, zero_point) = along_one_axis(x, axis, block_size, scale, zero_point)
    integers: Tensor = _quantize(
        x, scale, zero_point, quant_min, quant_max, axis=axis, block_size=block_size, rounding=rounding, dtype=dtype
    )
    return integers


def dequantize(
    q: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    *,
    axis: Axes = None,
    block_size: Axes = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """What stored integers stand for: ``(q - zero_point) * scale``, rounded once.

    Parameters
    ----------
    q : Tensor, any shape and strides, int8, uint8, int16 or uint16
        Integers of 4 bits are unpacked first (`unpack_int4`).
    scale : Tensor, float32 or float64
        Granularity as for `quantize`.
    zero_point : Tensor, int32, shape of `scale`
        Within the range of `q`'s dtype.
    axis, block_size : int or sequence of int, optional
        As for `quantize`.
    dtype : torch.dtype, optional
        Of the result: float32 (the default), float16 or bfloat16 for a float32 `scale`; float64 for a float64 `scale`.

    Returns
    -------
    Tensor, shape of `q`
        Strides of `q` if its elements are dense in memory. A zero is +0.0. No gradient reaches `scale`, and asking for one is an
        error: training goes through `fake_quantize`.

    Raises
    ------
    ValueError, TypeError, IndexError
        Shapes, dtypes or options that do not fit, saying what was expected.

    Examples
    --------
    >>> q = torch.tensor([-2, 0, 7], dtype=torch.int8)
    >>> dequantize(q, torch.tensor(0.5), torch.tensor(0, dtype=torch.int32))
    tensor([-1.0000,  0.0000,  3.5000])

    Notes
    -----
    Source: ONNX operator DequantizeLinear, opset 21; docs/numerics.md, section 1.
    """
    axis, block_size, (scale, zero_point) = along_one_axis(q, axis, block_size, scale, zero_point)
    values: Tensor = _dequantize(q, scale, zero_point, axis=axis, block_size=block_size, dtype=dtype)
    return values
