"""Quantization whose scales come from the tensor itself: no calibration, and nothing to keep."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from qsim._library import eager


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
    """Fake-quantize on the grid that the elements themselves span: range, scale and rounding in one call.

    Parameters
    ----------
    x : Tensor, any shape and strides, float16, bfloat16, float32 or float64
    quant_min, quant_max : int
        Ends of the grid, as for `fake_quantize`.
    axis : int, optional
        One scale for each line along this axis: ``axis=-1`` is one per token, a scale for every index of all the other axes. None:
        one for the tensor.
    block_size : int, optional
        One scale for every so many elements of a line; the last block may be short.
    symmetric, min_scale
        As for `choose_qparams`.
    rounding : str
        "divide" or "reciprocal", as for `fake_quantize`.
    scale_format, scale_rounding : str, optional
        As for `choose_block_scale`: scales as a block format stores them, of a symmetric signed grid. None: float32.

    Returns
    -------
    Tensor, shape and dtype of `x`
        The bits of `observe_range_`, then `choose_qparams` (or `choose_block_scale`), then `fake_quantize`. NaN and Inf are left out of
        a range: NaN stays NaN, Inf goes to the end of the grid, and what shares a scale with no finite element becomes NaN.

    Raises
    ------
    ValueError, TypeError, IndexError
        A grid, axis, block size, format or dtype that is not one of the above.

    Examples
    --------
    >>> x = torch.tensor([[0.1, -1.0, 0.4], [100.0, 30.0, -7.0]])
    >>> fake_quantize_dynamic(x, -128, 127, axis=-1, symmetric=True)  # a scale per row
    tensor([[  0.1016,  -1.0000,   0.3984],
            [100.0000,  29.9213,  -7.0866]])
    >>> fake_quantize_dynamic(x, -128, 127, symmetric=True)[0]  # one for all
    tensor([ 0.0000, -0.7874,  0.7874])

    Notes
    -----
    Straight-through: the gradient is that of `fake_quantize` with the scale held fixed. It passes at the ends of a range as anywhere
    in it, and is 0 where an element was clipped, infinite or NaN. How the scale moves with the elements at its ends is left out
    (docs/numerics.md, section 9).
    """
    operator = torch.ops.qsim.fake_quantize_dynamic if is_dynamo_compiling() else eager.fake_quantize_dynamic
    y: Tensor = operator(
        x,
        quant_min,
        quant_max,
        axis=axis,
        block_size=block_size,
        symmetric=symmetric,
        rounding=rounding,
        min_scale=min_scale,
        scale_format=scale_format,
        scale_rounding=scale_rounding,
    )
    return y


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
    """Round to a float format with the scales that the elements themselves give: FP8 per token, MX formats, NVFP4.

    Parameters
    ----------
    x : Tensor, any shape and strides, float16, bfloat16, float32 or float64
    format : str
        "float8_e4m3fn", "float8_e5m2", "float6_e3m2fn", "float6_e2m3fn" or "float4_e2m1fn". float6_e2m3fn, whose largest number is
        7.5, needs a `scale_format`.
    axis, block_size : int, optional
        Which elements share a scale, as for `fake_quantize_dynamic`.
    saturate : bool, optional
        As for `round_to_format`.
    min_scale, scale_format, scale_rounding
        As for `fake_quantize_dynamic`. In float32 a scale is the largest magnitude over the format's largest number.

    Returns
    -------
    Tensor, shape and dtype of `x`
        The bits of `observe_range_`, then the scale, then `round_to_format`.

    Examples
    --------
    >>> x = torch.tensor([0.3, -1.0, 4.0, 5.2])
    >>> round_to_format_dynamic(x, "float4_e2m1fn", axis=-1, block_size=4, scale_format="float8_e8m0fnu").tolist()
    [0.5, -1.0, 4.0, 6.0]

    Notes
    -----
    Straight-through with the scale held fixed, as `fake_quantize_dynamic`.
    """
    operator = torch.ops.qsim.round_to_format_dynamic if is_dynamo_compiling() else eager.round_to_format_dynamic
    y: Tensor = operator(
        x,
        format,
        axis=axis,
        block_size=block_size,
        saturate=saturate,
        min_scale=min_scale,
        scale_format=scale_format,
        scale_rounding=scale_rounding,
    )
    return y


def choose_block_scale(lowest: Tensor, highest: Tensor, element: str, scale_format: str, *, scale_rounding: str = "floor") -> Tensor:
    """Scales as block formats store them: powers of two (OCP MX), or E4M3 numbers beside one float32 for the tensor (NVFP4).

    Parameters
    ----------
    lowest, highest : Tensor, any shape, float32
        Ends of the ranges, of all blocks of one tensor.
    element : str
        What elements are stored as: a float format ("float4_e2m1fn"), or "int2" to "int16": fractions ``q * 2**(2 - bits)``, as MXINT8's.
    scale_format : str
        "float8_e8m0fnu": ``2**-127`` to ``2**127``. "float8_e4m3fn": the largest range of the tensor gets 448, times the float32
        ``largest magnitude / (448 * largest element)``.
    scale_rounding : str
        Which power of two. "floor", as the OCP specification says: the largest power of two in the range over the largest power of two
        among the elements; up to a quarter of the range is clipped. "ceil" rounds that power up. "even" takes it after the magnitude was
        rounded to the mantissa of the elements. "rceil" is the least power with which nothing is clipped.

    Returns
    -------
    Tensor, shape of `lowest`, float32
        What an element's number is multiplied by; for integers with the ``2**(2 - bits)`` in it, for E4M3 with the float32. 1 for an
        all-zero range (of E4M3: the float32); NaN for one that is empty or not finite.

    Examples
    --------
    >>> ends = torch.tensor([5.0, 7.5, 0.3])
    >>> choose_block_scale(-ends, ends, "float4_e2m1fn", "float8_e8m0fnu").tolist()
    [1.0, 1.0, 0.0625]
    >>> choose_block_scale(-ends, ends, "float4_e2m1fn", "float8_e8m0fnu", scale_rounding="rceil").tolist()
    [1.0, 2.0, 0.0625]

    Notes
    -----
    OCP Microscaling Formats (MX) Specification v1.0, section 6.3; the other roundings by torchao's names: "even" as AMD Quark's, "rceil"
    as NVIDIA's ``cvt.rp.satfinite.ue8m0x2``. NVFP4: NVIDIA 2025, "Pretraining Large Language Models with NVFP4", appendix C. No gradient.
    """
    scale: Tensor = torch.ops.qsim.choose_block_scale(lowest, highest, element, scale_format, scale_rounding=scale_rounding)
    return scale
