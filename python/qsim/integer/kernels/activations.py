"""QLinearSigmoid and QLinearSoftmax. (QLinearLeakyRelu, QLinearConcat and QLinearWhere dequantize, compute and quantize.)"""

from __future__ import annotations

import torch
from torch import Tensor

from qsim.integer.kernels.fma import fma
from qsim.integer.kernels.quantized import QuantizedTensor, quantize, saturated
from qsim.numbers.encoding import Encoding

# The rational minimax approximation on [-18, 18] that ONNX Runtime takes from Eigen (generic_fast_logistic): x * p(x**2) / q(x**2) + 0.5.
_P = (4.37031012579801e-11, 1.15627324459942e-07, 6.08574864600143e-05, 8.51377133304701e-03, 2.48287947061529e-01)
_Q = (6.10247389755681e-13, 5.76102136993427e-09, 6.29106785017040e-06, 1.70198817374094e-03, 1.16817656904453e-01, 9.93151921023180e-01)


def logistic(x: Tensor) -> Tensor:
    """The sigmoid of float32 as ONNX Runtime computes it, with FMA."""
    x = x.clamp(-18.0, 18.0)
    squared = x * x
    p, q = _polynomial(squared, _P), _polynomial(squared, _Q)
    return (x * p / q + 0.5).clamp_min(0.0)


def _polynomial(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    value = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        value = fma(value, x, torch.full_like(x, coefficient))
    return value


def sigmoid(x: QuantizedTensor, y: Encoding) -> QuantizedTensor:
    """QLinearSigmoid: dequantize, `logistic`, quantize; by a table in the runtime."""
    return quantize(logistic(x.dequantized()), y)


def softmax(x: QuantizedTensor, y: Encoding, axis: int) -> QuantizedTensor:
    """QLinearSoftmax along `axis`.

    Exponentials of ``s_x * (x - max)``, times a constant that keeps their sum large, are float32 and added one after the other; then
    ``clip(rint(e * floor(1 / s_y) / sum) + z_y)``, the quotient in float64. (Before ONNX Runtime 1.32 it was float32, so that ties fell
    elsewhere, and with a grid that ends far below 1 the product could leave the range.)
    """
    q = x.integers.movedim(axis, -1).double()
    scale = float(x.encoding.scale.float())
    reserve = torch.tensor(torch.finfo(torch.float32).max / q.shape[-1]).log()  # in float32
    shift = max(0.0, float(reserve) - 5) / scale
    exponentials = torch.exp((q - q.amax(-1, keepdim=True) + shift) * scale).float()
    total = torch.zeros_like(exponentials[..., 0])
    for element in exponentials.unbind(-1):
        total = total + element
    steps = (exponentials.double() * (1.0 / y.scale.float()).floor() / total[..., None]).round()
    return saturated(steps.movedim(-1, axis) + y.zero_point, y)
