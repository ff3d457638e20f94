from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from qsim._library import eager
from qsim.numbers.blocks import Axes, along_one_axis


def fake_quantize(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    quant_min: int,
    quant_max: int,
    # No asterisk: to hand on what may be given by name alone, Python looks each up in a dict, a tenth of a small call.
    axis: Axes = None,
    block_size: Axes = None,
    rounding: str = "divide",
    grad_factor: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """Move every element to the nearest point of its integer grid: quantize and dequantize in one pass.

    ``q = clamp(rint(x / scale) + zero_point, quant_min, quant_max)`` and ``y = (q - zero_point) * scale``, ties to even.

    Parameters
    ----------
    x : Tensor, any shape and strides, float16, bfloat16, float32 or float64
        float16 and bfloat16 are computed in float32 and rounded once. NaN stays NaN, infinities go to the ends of the grid.
    scale : Tensor, float32 (float64 for float64 `x`), positive
        One element without `axis`; shape ``[C]`` with `axis`; with `block_size` the shape of `x` with ``ceil(n / block_size)``
        along `axis` (the last block may be short). Values are not checked (that would wait for the device): NaN gives NaN.
    zero_point : Tensor, shape of `scale`, int32, or dtype of `scale` when it is learned
        Rounded half to even and clamped to the grid.
    quant_min, quant_max : int
        Ends of the grid: int32, and for all but float64 `x` within ``-2**24 .. 2**24`` and at most ``2**24`` wide, where float32
        arithmetic is exact.
    axis : int or sequence of int, optional
        Dimension of `x` that the channels or blocks lie along; negative counts from the end.
    block_size : int or sequence of int, optional
        Elements along `axis` that share a scale. With a sequence of axes and of block sizes tiles share one: ``axis=(0, 1),
        block_size=(128, 128)``; `scale` then has ``ceil(n / block_size)`` along each of them.
    rounding : {"divide", "reciprocal"}
        ``x / scale`` as ONNX QuantizeLinear, or ``x * (1 / scale)`` as torch core and TensorRT; they differ at ties.
    grad_factor : float
        Multiplies the gradients of `scale` and `zero_point`; LSQ uses ``1 / sqrt(n * quant_max)``.
    out : Tensor, shape, dtype and device of `x`, optional
        Receives the result; may be `x`, or lie in its memory, but not in that of `scale` or `zero_point`. No gradient then.

    Returns
    -------
    Tensor, shape and dtype of `x`
        Strides of `x` if its elements are dense in memory. A zero is +0.0.

    Raises
    ------
    ValueError, TypeError, IndexError
        Shapes, dtypes or options that do not fit, saying what was expected.

    Examples
    --------
    >>> x = torch.tensor([-1.0, 0.24, 0.25, 0.75, 9.0])
    >>> fake_quantize(x, torch.tensor(0.5), torch.tensor(0, dtype=torch.int32), -8, 7)
    tensor([-1.0000,  0.0000,  0.0000,  1.0000,  3.5000])

    Notes
    -----
    Gradients, straight-through (docs/numerics.md, section 1): that of `x` passes where the rounded value lies inside the grid; those of
    `scale` and of a floating-point `zero_point` follow Esser et al. 2020, "Learned Step Size Quantization", eq. 3, and are summed
    in an order that does not depend on the number of threads; NaN elements take no part. For a leaf `x` nothing but `x` is saved,
    otherwise one bit per element. ``torch.func`` transforms and forward-mode differentiation are not supported.
    """
    if axis is not None or block_size is not None:
        axis, block_size, (scale, zero_point) = along_one_axis(x, axis, block_size, scale, zero_point)
    if is_dynamo_compiling():
        given = {} if out is None else {"out": out}
        options = {"axis": axis, "block_size": block_size, "rounding": rounding, "grad_factor": grad_factor, **given}
        result: Tensor = torch.ops.qsim.fake_quantize(x, scale, zero_point, quant_min, quant_max, **options)
        return result
    if out is not None:
        return eager.fake_quantize_out(x, scale, zero_point, quant_min, quant_max, axis, block_size, rounding, grad_factor, out)
    return eager.fake_quantize(x, scale, zero_point, quant_min, quant_max, axis, block_size, rounding, grad_factor)


def fake_quantize_(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    quant_min: int,
    quant_max: int,
    axis: Axes = None,
    block_size: Axes = None,
    rounding: str = "divide",
    grad_factor: float = 1.0,
) -> Tensor:
    """`fake_quantize` in place: half of the memory traffic. Returns `x`.

    Differentiable like `fake_quantize`, under the rules of in-place operations: not on a leaf that requires grad, nor on a tensor
    that another operation saved. With a learned `scale` or `zero_point` the elements are copied for the backward pass.

    Examples
    --------
    >>> fake_quantize_(torch.tensor([0.3, -7.0]), torch.tensor(0.5), torch.tensor(0, dtype=torch.int32), -8, 7)
    tensor([ 0.5000, -4.0000])
    """
    if axis is not None or block_size is not None:
        axis, block_size, (scale, zero_point) = along_one_axis(x, axis, block_size, scale, zero_point)
    if is_dynamo_compiling():
        options = {"axis": axis, "block_size": block_size, "rounding": rounding, "grad_factor": grad_factor}
        result: Tensor = torch.ops.qsim.fake_quantize_(x, scale, zero_point, quant_min, quant_max, **options)
        return result
    return eager.fake_quantize_(x, scale, zero_point, quant_min, quant_max, axis, block_size, rounding, grad_factor)
