from __future__ import annotations

import torch
from torch import Tensor


def fake_quantize_bias(bias: Tensor, input_scale: Tensor, weight_scale: Tensor) -> Tensor:
    """A bias as it is read once it is held as int32, on the grid of the products that it is added to.

    Element ``c`` becomes ``clip(rint(bias[c] / s), -2**31, 2**31 - 1) * s`` with ``s = input_scale * weight_scale[c]``, a product in
    float32; all else is computed in float64, in which an int32 grid is exact, and rounded to the type of the bias, to 16 bits by way of
    float32.

    Parameters
    ----------
    bias : Tensor, shape [C], float16/bfloat16/float32/float64
    input_scale : Tensor, one element, float32
        Of what is multiplied with the weight.
    weight_scale : Tensor, one element or one per output channel, float32
        Repeated over the channels where C is a multiple of them, as that of a transposed convolution in groups.

    Returns
    -------
    Tensor
        Of the shape and type of `bias`, contiguous. The gradient passes straight through where nothing was clipped; scales get none.

    Raises
    ------
    TypeError
        Another type of `bias` or of a scale.
    ValueError
        Other shapes, or tensors on several devices.

    Examples
    --------
    >>> bias, input_scale, weight_scale = torch.tensor([0.5, -1.3]), torch.tensor(0.5), torch.tensor([0.25, 0.5])
    >>> fake_quantize_bias(bias, input_scale, weight_scale).tolist()
    [0.5, -1.25]

    Notes
    -----
    Jacob et al. 2018, "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference", section 2.4.
    """
    result: Tensor = torch.ops.qsim.fake_quantize_bias(bias, input_scale, weight_scale)
    return result
