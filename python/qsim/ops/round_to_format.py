from __future__ import annotations

import torch
from torch import Tensor

_round_to_format = torch.ops.qsim.round_to_format.default
_round_to_format_out = torch.ops.qsim.round_to_format.out
_round_to_format_inplace = torch.ops.qsim.round_to_format_.default


def round_to_format(x: Tensor, format: str, *, saturate: bool | None = None, out: Tensor | None = None) -> Tensor:
    """The nearest number of a float format, as a tensor of the input's dtype.

    Parameters
    ----------
    x : Tensor, any shape and strides, float16, bfloat16, float32 or float64
        Rounded once, also from float64.
    format : str
        "float16", "bfloat16", "float8_e4m3fn" or "float8_e5m2".
    saturate : bool, optional
        Whether what overflows, Inf included, becomes the largest finite number; otherwise it becomes Inf (NaN in float8_e4m3fn,
        which has no Inf). By default float8 saturates, float16 and bfloat16 do not.
    out : Tensor, shape, dtype and device of `x`, optional
        Receives the result; may be `x`. No gradient then.

    Returns
    -------
    Tensor, shape and dtype of `x`
        Half to even, subnormals kept, NaN stays NaN, the sign of zero is kept. Strides of `x` if its elements are dense in memory.

    Raises
    ------
    ValueError, TypeError
        An unknown format, or tensors that do not fit.

    Examples
    --------
    >>> round_to_format(torch.tensor([0.3, 1000.0]), "float8_e4m3fn").tolist()
    [0.3125, 448.0]
    >>> round_to_format(torch.tensor([2049.0, 70000.0]), "float16").tolist()
    [2048.0, inf]

    Notes
    -----
    Straight-through: the gradient passes, except that it is 0 where `x` is NaN, Inf or overflows; one bit per element is saved for
    that. IEEE 754-2019, section 4.3.1; Micikevicius et al. 2022, "FP8 Formats for Deep Learning".

    A float16 `x` rounds to the bfloat16 65536 from 65408 on, which float16 itself holds as Inf.
    """
    if out is not None:
        written: Tensor = _round_to_format_out(x, format, saturate=saturate, out=out)
        return written
    rounded: Tensor = _round_to_format(x, format) if saturate is None else _round_to_format(x, format, saturate=saturate)
    return rounded


def round_to_format_(x: Tensor, format: str, *, saturate: bool | None = None) -> Tensor:
    """`round_to_format` in place: half of the memory traffic. Returns `x`.

    Differentiable under the rules of in-place operations: not on a leaf that requires grad, nor on a tensor that another operation
    saved.

    Examples
    --------
    >>> round_to_format_(torch.tensor([0.3, 1000.0]), "float8_e5m2").tolist()
    [0.3125, 1024.0]
    """
    rounded: Tensor = _round_to_format_inplace(x, format, saturate=saturate)
    return rounded


def round_to_format_counted(
    x: Tensor, format: str, counts: Tensor, squares: Tensor | None = None, *, saturate: bool | None = None
) -> Tensor:
    """`round_to_format`, and what it did to the elements, in the same pass.

    Parameters
    ----------
    x, format, saturate
        As for `round_to_format`.
    counts : Tensor, shape (6,), int64
        The numbers of these are added to it: elements; NaNs; Infs; overflows (finite, but beyond the largest number once
        rounded); underflows (not zero, but zero once rounded); subnormals (subnormal once rounded, and not zero).
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
    rounded: Tensor = torch.ops.qsim.round_to_format_counted(x, format, counts, squares, saturate=saturate)
    return rounded


def count_format_(x: Tensor, format: str, counts: Tensor, squares: Tensor | None = None, *, saturate: bool | None = None) -> None:
    """The state of `round_to_format_counted` alone: what rounding would do, at the price of reading `x`.

    Examples
    --------
    >>> counts = torch.zeros(6, dtype=torch.int64)
    >>> count_format_(torch.tensor([3.0, 70000.0, torch.nan]), "float16", counts)
    >>> counts.tolist()
    [3, 1, 0, 1, 0, 0]
    """
    torch.ops.qsim.count_format_(x, format, counts, squares, saturate=saturate)
