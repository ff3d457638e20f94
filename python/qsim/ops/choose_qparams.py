from __future__ import annotations

import torch
from torch import Tensor


def choose_qparams(
    min: Tensor, max: Tensor, quant_min: int, quant_max: int, symmetric: bool = False, *, min_scale: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Scale and zero point that map ranges to an integer grid.

    Parameters
    ----------
    min, max : Tensor, any shape, float32 or float64
        Ends of the ranges, one range per element. Zero always joins the range.
    quant_min, quant_max : int
        Smallest and largest integer of the grid.
    symmetric : bool
        Fix the zero point in the middle of the grid (0 on ``[-128, 127]``, 128 on ``[0, 255]``).
    min_scale : float
        Raises the smallest scale, which is otherwise the smallest normal float32.

    Returns
    -------
    scale : Tensor, shape and dtype of `min`
        1 for an all-zero range; NaN for a range that is empty (``min > max``: nothing was observed) or not finite. Never so
        large that an end of the grid overflows.
    zero_point : Tensor, shape of `min`, int32

    Examples
    --------
    >>> scale, zero_point = choose_qparams(torch.tensor(-1.0), torch.tensor(3.0), -128, 127)
    >>> zero_point.item(), round(scale.item(), 6)
    (-64, 0.015686)

    Notes
    -----
    Jacob et al. 2018, "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference",
    section 3. Computed in float64 and rounded once. No gradient.
    """
    scale, zero_point = torch.ops.qsim.choose_qparams(min, max, quant_min, quant_max, symmetric=symmetric, min_scale=min_scale)
    return scale, zero_point
