"""QLinearConv, QGemm, QLinearMatMul and MatMulIntegerToFloat: int32 sums of products, then one multiplication in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qsim.integer.kernels.exact import INT32_MAX, Addend, Weight, convolution, sums
from qsim.integer.kernels.quantized import QuantizedTensor, saturated
from qsim.numbers.encoding import Encoding


@dataclass(frozen=True, eq=False)
class Bias:
    """A bias as int32, one for each output channel, with the scale of the products that it is added to and zero point 0.

    Parameters
    ----------
    integers : Tensor, float64
    scale : Tensor, float32
        As many.
    """

    integers: Tensor
    scale: Tensor

    @classmethod
    def simulated(cls, bias: Tensor, input: Encoding, weight: Encoding) -> Bias:
        """As the simulation and the exported model have it (`qsim.quantizers.bias`): divided in float64."""
        scale = _product_scale(bias, input, weight)
        return cls(_int32(bias.double() / scale.double()), scale)

    @classmethod
    def made_by_runtime(cls, bias: Tensor, input: Encoding, weight: Encoding) -> Bias:
        """As ONNX Runtime's optimiser quantizes a bias that the model has in float (`WeightBiasQuantization`): divided in float32."""
        scale = _product_scale(bias, input, weight)
        return cls(_int32((bias.float() / scale).double()), scale)

    @classmethod
    def of_a_float_operation(cls, bias: Tensor, input: Encoding, weight: Encoding) -> Bias:
        """As made by the runtime, or as a file holds it so that the runtime does not (`qsim.onnx.float_biases`)."""
        return cls.held(bias) if cls.is_held(bias, input, weight) else cls.made_by_runtime(bias, input, weight)

    @classmethod
    def is_held(cls, bias: Tensor, input: Encoding, weight: Encoding) -> bool:
        """Whether a file holds a bias on a grid of its own: beside 16 bits, where int32 ends below it on the grid of the products."""
        wide = any(encoding.quant_max - encoding.quant_min > 255 for encoding in (input, weight))
        return wide and not cls.fits(bias, _product_scale(bias, input, weight).double())

    @classmethod
    def held(cls, bias: Tensor) -> Bias:
        """As a file has one that int32 does not hold on the grid of the products: on a grid of its own, as exact as float32."""
        scale = (bias.abs().max().double() / INT32_MAX).float()
        return cls((bias.double() / scale.double()).round().clamp(-INT32_MAX, INT32_MAX), scale.repeat(bias.numel()))

    @staticmethod
    def fits(bias: Tensor, scale: Tensor) -> bool:
        """Whether int32 holds a bias with this scale (float64)."""
        return not bool((bias.abs() > 2**31 * scale).any())

    def dequantized(self) -> Tensor:
        """What DequantizeLinear makes of it, float32."""
        return self.integers.float() * self.scale


def _int32(quotient: Tensor) -> Tensor:
    return quotient.round().clamp(-INT32_MAX - 1, INT32_MAX)


def _product_scale(bias: Tensor, input: Encoding, weight: Encoding) -> Tensor:
    scale = _products(input, weight).reshape(-1)
    return scale.repeat(bias.numel() // scale.numel())


@dataclass(frozen=True)
class Operator:
    """A weighted operation with its constants: what does not change from batch to batch.

    Parameters
    ----------
    weight : Weight
    encoding : Encoding
        Of the weight.
    bias : Addend, optional
        One for each output channel.
    """

    weight: Weight
    encoding: Encoding
    bias: Addend | None = None

    @classmethod
    def of(cls, weight: QuantizedTensor, bias: Bias | None = None, *, channels: int = 0) -> Operator:
        """Of a convolution, or a product with a matrix; `channels` is the axis of the output channels of `weight`."""
        values = weight.centered
        summed = [i for i in range(values.dim()) if i != channels % values.dim()]
        return cls(Weight.of(values, summed), weight.encoding, None if bias is None else Addend.of(bias.integers))


def conv(
    x: QuantizedTensor,
    operator: Operator,
    y: Encoding,
    *,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int = 1,
) -> QuantizedTensor:
    """QLinearConv over one to three axes.

    Around `x` lies its zero point. ``clip(rint(float32(acc) * (s_x * s_w / s_y)) + z_y)``: the multiplier is formed from left to right
    in float32.

    Raises
    ------
    AccumulatorOverflow
        A sum leaves int32.
    """

    def product(a: Tensor, b: Tensor) -> Tensor:
        return convolution(a, b, stride, padding, dilation, groups)

    dims = (-1,) + (1,) * (x.integers.dim() - 2)
    bias = operator.bias and Addend(operator.bias.values.reshape(dims), operator.bias.reach)
    total = sums(x.centered, _limit(x), operator.weight, product, bias)
    scale = _products(x.encoding, operator.encoding)
    return requantized(total, scale.reshape(dims) if scale.dim() else scale, y)


def gemm(
    x: QuantizedTensor, operator: Operator, y: Encoding | None, *, product: Callable[[Tensor, Tensor], Tensor]
) -> QuantizedTensor | Tensor:
    """QGemm, and QLinearMatMul with a constant: `product` multiplies `x` with the weight, whose channels come last in the result.

    Without `y`, also MatMulIntegerToFloat, the result is float32: ``float32(acc) * (s_x * s_w)``.
    """
    total = sums(x.centered, _limit(x), operator.weight, product, operator.bias)
    scale = _products(x.encoding, operator.encoding)
    return total.float() * scale if y is None else requantized(total, scale, y)


def matmul(a: QuantizedTensor, b: QuantizedTensor, y: Encoding | None) -> QuantizedTensor | Tensor:
    """QLinearMatMul of two activations, each with one scale, in any number of dimensions; without `y` MatMulIntegerToFloat."""
    rows = b.integers.shape[-2] if b.integers.dim() > 1 else b.integers.shape[0]
    total = sums(a.centered, _limit(a), Weight(b.centered, rows * _limit(b)), torch.matmul)
    scale = _products(a.encoding, b.encoding)
    return total.float() * scale if y is None else requantized(total, scale, y)


def requantized(total: Tensor, products: Tensor, y: Encoding) -> QuantizedTensor:
    """Sums of products with the scale `products` on the grid of the result: ``clip(rint(float32(acc) * (products / s_y)) + z_y)``."""
    return saturated((total.float() * (products / y.scale.float())).round_().add_(y.zero_point), y)


def _products(x: Encoding, weight: Encoding) -> Tensor:
    """The scale of products, float32."""
    return x.scale.float() * weight.scale.float()


def _limit(x: QuantizedTensor) -> float:
    """No number on the grid is larger once its zero point is subtracted."""
    return float(x.encoding.quant_max - x.encoding.quant_min)
