from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from qsim._library import eager
from qsim.numbers.blocks import Axes, along_one_axis

Options = tuple[bool | None, Tensor | None, int | None, int | None]


def _options(x: Tensor, saturate: bool | None, scale: Tensor | None, axis: Axes, block_size: Axes) -> Options:
    """The options as the operators take them: blocks lie along one axis."""
    if scale is not None:
        axis, block_size, (scale,) = along_one_axis(x, axis, block_size, scale)
    return saturate, scale, axis, block_size  # type: ignore[return-value]  # without a scale the operators refuse several axes


def _named(options: Options) -> dict[str, Any]:
    return dict(zip(("saturate", "scale", "axis", "block_size"), options, strict=True))


def round_to_format(
    x: Tensor,
    format: str,
    *,
    saturate: bool | None = None,
    scale: Tensor | None = None,
    axis: Axes = None,
    block_size: Axes = None,
    out: Tensor | None = None,
) -> Tensor:
    """The nearest number of a float format, as a tensor of the input's dtype: of `x`, or of ``x / scale``, times `scale` again.

    Parameters
    ----------
    x : Tensor, any shape and strides, float16, bfloat16, float32 or float64
        Rounded once, also from float64.
    format : str
        "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float6_e3m2fn", "float6_e2m3fn" or "float4_e2m1fn".
    saturate : bool, optional
        Whether what overflows, Inf included, becomes the largest finite number; otherwise it becomes Inf (NaN in float8_e4m3fn and
        narrower formats, which have no Inf). By default float16 and bfloat16 do not saturate, all others do.
    scale : Tensor, float32 (float64 for float64 `x`), positive, optional
        What deployed numbers of 8 bits and fewer are stored with: usually the largest magnitude over the format's largest number. Shape
        ``()`` or ``(1,)``; with `axis` ``(x.shape[axis],)``; with `block_size` too, the shape of `x` with ``ceil(n / block_size)`` along
        `axis`. It has no gradient.
    axis : int or sequence of int, optional
        Of `x`, the axis that several scales lie along.
    block_size : int or sequence of int, optional
        So many elements along `axis` share a scale; the last block may be shorter. With several axes, one size for each.
    out : Tensor, shape, dtype and device of `x`, optional
        Receives the result; may be `x`. No gradient then.

    Returns
    -------
    Tensor, shape and dtype of `x`
        Half to even, subnormals kept, NaN stays NaN, the sign of zero is kept. Strides of `x` if its elements are dense in memory.

    Raises
    ------
    ValueError, TypeError, IndexError
        An unknown format, or tensors, axes or block sizes that do not fit.

    Examples
    --------
    >>> round_to_format(torch.tensor([0.3, 1000.0]), "float8_e4m3fn").tolist()
    [0.3125, 448.0]
    >>> round_to_format(torch.tensor([2049.0, 70000.0]), "float16").tolist()
    [2048.0, inf]
    >>> weight = torch.tensor([[0.001, -0.0035], [0.2, 0.7]])  # as it is, the smaller row is left two bits
    >>> round_to_format(weight, "float8_e4m3fn", scale=weight.abs().amax(1) / 448, axis=0)
    tensor([[ 0.0010, -0.0035],
            [ 0.2000,  0.7000]])

    Notes
    -----
    ``x / scale`` is a true division, as in ONNX QuantizeLinear, and of float64 in float64. The product is rounded once to the dtype.

    Straight-through: the gradient passes, except that it is 0 where `x` is NaN, Inf or overflows; one bit per element is saved for
    that. IEEE 754-2019, section 4.3.1; Micikevicius et al. 2022, "FP8 Formats for Deep Learning".

    A float16 `x` rounds to the bfloat16 65536 from 65408 on, which float16 itself holds as Inf.
    """
    options = _options(x, saturate, scale, axis, block_size)
    if is_dynamo_compiling():
        given = {} if out is None else {"out": out}
        rounded: Tensor = torch.ops.qsim.round_to_format(x, format, **_named(options), **given)
        return rounded
    if out is not None:
        return eager.round_to_format_out(x, format, *options, out)
    return eager.round_to_format(x, format, *options)


def round_to_format_(
    x: Tensor, format: str, *, saturate: bool | None = None, scale: Tensor | None = None, axis: Axes = None, block_size: Axes = None
) -> Tensor:
    """`round_to_format` in place: half of the memory traffic. Returns `x`.

    Differentiable under the rules of in-place operations: not on a leaf that requires grad, nor on a tensor that another operation
    saved.

    Examples
    --------
    >>> round_to_format_(torch.tensor([0.3, 1000.0]), "float8_e5m2").tolist()
    [0.3125, 1024.0]
    """
    options = _options(x, saturate, scale, axis, block_size)
    if is_dynamo_compiling():
        rounded: Tensor = torch.ops.qsim.round_to_format_(x, format, **_named(options))
        return rounded
    return eager.round_to_format_(x, format, *options)


def round_to_format_counted(
    x: Tensor,
    format: str,
    counts: Tensor,
    squares: Tensor | None = None,
    *,
    saturate: bool | None = None,
    scale: Tensor | None = None,
    axis: Axes = None,
    block_size: Axes = None,
) -> Tensor:
    """`round_to_format`, and what it did to the elements, in the same pass.

    Parameters
    ----------
    x, format, saturate, scale, axis, block_size
        As for `round_to_format`.
    counts : Tensor, shape (6,), int64
        The numbers of these are added to it: elements; NaNs; Infs; overflows (finite, but beyond the largest number once
        rounded); underflows (not zero, but zero once rounded); subnormals (subnormal once rounded, and not zero). With a scale
        it is ``x / scale`` that is rounded.
    squares : Tensor, shape (2,), float64, optional
        The sums of ``(x - y) ** 2`` and of ``x ** 2`` over the elements that are finite before and after are added to it.

    Returns
    -------
    Tensor, shape and dtype of `x`
        As `round_to_format`, differentiable too.

    Examples
    --------
    >>> counts, squares = torch.zeros(6, dtype=torch.int64), torch.zeros(2, dtype=torch.float64)
    >>> round_to_format_counted(torch.tensor([3.0, 70000.0, 1e-9, 1e-6]), "float16", counts, squares)[:3].tolist()
    [3.0, inf, 0.0]
    >>> counts.tolist()  # one overflow, one underflow, one subnormal
    [4, 0, 0, 1, 1, 1]
    >>> round((10 * (squares[1] / squares[0]).log10()).item(), 1)  # signal to noise in dB of what stayed finite
    167.1

    Notes
    -----
    The state is changed in place without host synchronisation. Counts do not depend on the order of calls; the sums are float64 over
    fixed chunks, joined in order, so neither threads nor instruction sets change a bit.
    """
    options = _options(x, saturate, scale, axis, block_size)
    if is_dynamo_compiling():
        rounded: Tensor = torch.ops.qsim.round_to_format_counted(x, format, counts, squares, **_named(options))
        return rounded
    return eager.round_to_format_counted(x, format, counts, squares, *options)


def count_format_(
    x: Tensor,
    format: str,
    counts: Tensor,
    squares: Tensor | None = None,
    *,
    saturate: bool | None = None,
    scale: Tensor | None = None,
    axis: Axes = None,
    block_size: Axes = None,
) -> None:
    """The state of `round_to_format_counted` alone: what rounding would do, at the price of reading `x`.

    Examples
    --------
    >>> counts = torch.zeros(6, dtype=torch.int64)
    >>> count_format_(torch.tensor([3.0, 70000.0, torch.nan]), "float16", counts)
    >>> counts.tolist()
    [3, 1, 0, 1, 0, 0]
    """
    options = _options(x, saturate, scale, axis, block_size)
    if is_dynamo_compiling():
        torch.ops.qsim.count_format_(x, format, counts, squares, **_named(options))
    else:
        eager.count_format_(x, format, counts, squares, *options)
