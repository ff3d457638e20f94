"""Biases as integer kernels hold them: int32 with the scale of the products that they are added to (docs/numerics.md, section 6)."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from qsim import ops
from qsim.quantizers.quantizer import Quantizer

_INT32 = torch.iinfo(torch.int32)


def bias_scale(input: Tensor, weight: Tensor, elements: int) -> Tensor:
    """The scales of a bias with so many elements, from those of the operands that are multiplied."""
    scale = (input.to(weight.device) * weight).reshape(-1)
    if scale.numel() != elements:  # per tensor; or a transposed convolution in groups: its weight's channels once per group
        scale = scale.repeat(elements // scale.numel())
    return scale


def of_products(input: Quantizer, weight: Quantizer, bias: Tensor) -> Tensor:
    """A bias on the grid of the products of two operands: see `BiasQuantizer`."""
    of_input, of_weight = (input.fixed_scale, weight.fixed_scale) if is_dynamo_compiling() else (None, None)
    if of_input is None or of_weight is None:
        if not (_has_grid(input) and _has_grid(weight)):
            return bias
        of_input, of_weight = input.grid_scale.detach(), weight.grid_scale.detach()
    if of_input.device != bias.device:  # the operand was brought here after it was quantized
        of_input = of_input.to(bias.device)
    return ops.fake_quantize_bias(bias, of_input, of_weight)


def _has_grid(operand: Quantizer) -> bool:
    """Whether products of an operand have a grid: one without a range may be passed by, in float, where calls go another way."""
    return operand.enabled and operand.has_encoding


class BiasQuantizer:
    """Quantizes a bias to int32 with scale ``input.scale * weight.scale`` and zero point 0; differentiable (straight-through).

    Parameters
    ----------
    input, weight : Quantizer
        Of the operands that are multiplied: per tensor, and per tensor or output channel. While either is off, or has no range, the bias is
        in float.
    """

    observing = False  # has nothing to observe: its scale is that of others

    def __init__(self, input: Quantizer, weight: Quantizer) -> None:
        self.input, self.weight = input, weight

    @property
    def enabled(self) -> bool:
        """Whether biases are quantized: both operands are."""
        return _has_grid(self.input) and _has_grid(self.weight)

    def scale(self, channels: int) -> Tensor:
        """The scale of each element of a bias, float32 of shape ``[channels]``."""
        return bias_scale(self.input.grid_scale.detach(), self.weight.grid_scale.detach(), channels)

    def integers(self, bias: Tensor) -> Tensor:
        """What is stored for a bias of shape ``[C]``: int32."""
        values = bias.detach().double()
        steps = torch.where(values == 0, 0.0, values / self.scale(bias.numel()).double())  # a product of scales may be too small: 0
        return steps.round().clamp(_INT32.min, _INT32.max).to(torch.int32)

    def __call__(self, bias: Tensor) -> Tensor:
        return of_products(self.input, self.weight, bias)

    def fit(self, bias: Tensor, weight: Tensor | None = None) -> int:
        """Raise the weight's scale where `bias`, and the products that are added to it, would not fit into int32. Returns how many scales.

        ONNX Runtime's own quantizer does it for the bias alone: what is added then wraps around.

        Parameters
        ----------
        bias : Tensor, shape [C]
        weight : Tensor, optional, shape [channels, ...]
            C is a multiple of the channels. Without it the products are taken to be nothing.
        """
        of_weight, of_input = self.weight.encoding, self.input.encoding
        if of_weight is None or of_input is None:
            return 0
        sums, room = bias.detach().abs().nan_to_num(0.0, 0.0).double() / of_input.scale.to(bias.device), float(_INT32.max)
        if weight is not None:
            rows = weight.detach().abs().nan_to_num(0.0, 0.0).flatten(1)
            reach = max(int(of_input.zero_point.max()) - of_input.quant_min, of_input.quant_max - int(of_input.zero_point.min()))
            rounded = reach * rows.shape[1] / 2  # by which the products may grow when weights are rounded
            sums, room = sums + reach * rows.sum(1, dtype=torch.float64).repeat(bias.numel() // len(rows)), max(room - rounded, 1.0)
        needed = (sums / room).float()
        scales = of_weight.scale
        needed = needed.reshape(-1, scales.numel()).amax(0).reshape(scales.shape) if scales.dim() else needed.max()
        raised = int((needed > scales).sum())
        if raised:
            self.weight.set_encoding(dataclasses.replace(of_weight, scale=torch.maximum(scales, needed)))
        return raised
