from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from qsim._library import eager

_observe_fake_quantize = torch.ops.qsim.observe_fake_quantize.default  # what a compiler sees


def observe_fake_quantize(
    x: Tensor,
    observing: Tensor,
    quantizing: Tensor,
    lowest: Tensor,
    highest: Tensor,
    counts: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    quant_min: int,
    quant_max: int,
    *,
    averaging: float = 0.01,
    axis: int | None = None,
    block_size: int | None = None,
    symmetric: bool = False,
    min_scale: float = 0.0,
    rounding: str = "divide",
) -> Tensor:
    """Move a running range towards that of a batch, choose scale and zero point from it, and fake-quantize the batch with them.

    The whole observer of quantization-aware training in one call, without host synchronisation: what is switched on, the range and
    the scale are read and written on the device, so it can be captured in a CUDA graph.

    Parameters
    ----------
    x : Tensor, any shape and strides, float16, bfloat16, float32 or float64
    observing : Tensor, one element, bool or uint8
        Whether the range, `counts`, `scale` and `zero_point` are updated.
    quantizing : Tensor, one element, bool or uint8
        Whether the result is quantized, or a copy of `x`.
    lowest, highest : Tensor, float32
        Ends of the running range; shapes as for `observe_range_`. At +inf and -inf (nothing seen yet) the first batch becomes the
        range. Then ``new = (1 - averaging) * old + averaging * batch``, in float64 and rounded once. NaN and infinities never
        enter. A batch that has no finite element leaves the range, scale and zero point as they are; so does a batch for each
        channel or block of which it has none.
    counts : Tensor, shape (4,), int64
        Elements, NaNs, +infs, -infs of all batches observed.
    scale : Tensor, float32, shape of `lowest`
        As `choose_qparams` gives it for the running range. What it holds is what quantizes, also while not observing: NaN gives NaN.
    zero_point : Tensor, int32, shape of `lowest`
    quant_min, quant_max : int
        Ends of the grid, as for `fake_quantize`.
    averaging : float, 0 to 1
        Weight of the batch.
    axis, block_size : int, optional
        One range per tensor, channel or block, as for `observe_range_` and `fake_quantize`.
    symmetric, min_scale
        As for `choose_qparams`.
    rounding : {"divide", "reciprocal"}
        As for `fake_quantize`.

    Returns
    -------
    Tensor, shape and dtype of `x`
        A new tensor, also when not quantizing.

    Raises
    ------
    ValueError, TypeError, IndexError
        Shapes, dtypes or options that do not fit, saying what was expected.

    Examples
    --------
    >>> on = torch.tensor(True)
    >>> lowest, highest, counts = torch.tensor(torch.inf), torch.tensor(-torch.inf), torch.zeros(4, dtype=torch.int64)
    >>> scale, zero_point = torch.tensor(torch.nan), torch.tensor(0, dtype=torch.int32)
    >>> for batch in (torch.tensor([-1.0, 1.0]), torch.tensor([-1.0, 3.0, torch.nan])):
    ...     y = observe_fake_quantize(batch, on, on, lowest, highest, counts, scale, zero_point, -8, 7, averaging=0.5)
    >>> lowest.item(), highest.item(), counts.tolist()
    (-1.0, 2.0, [5, 1, 0, 0])
    >>> y
    tensor([-1.,  2., nan])

    Notes
    -----
    Jacob et al. 2018, "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference", section 3.1.
    Differentiable in `x` like `fake_quantize` (all of it passes when not quantizing), from one saved bit per element. The
    version counters of the state are bumped.
    """
    operator = _observe_fake_quantize if is_dynamo_compiling() else eager.observe_fake_quantize
    return operator(
        x,
        observing,
        quantizing,
        lowest,
        highest,
        counts,
        scale,
        zero_point,
        quant_min,
        quant_max,
        averaging=averaging,
        axis=axis,
        block_size=block_size,
        symmetric=symmetric,
        min_scale=min_scale,
        rounding=rounding,
    )
