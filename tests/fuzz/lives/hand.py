"""A simulation written out: weights and activations on the grids of its quantizers as they are now, by `qsim.reference` alone."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm

import qsim
from qsim import reference


class Hand:
    """Quantizes by the keys of `QuantSim.quantizers`, from the scales, zero points, switches and specs of the moment."""

    def __init__(self, sim: qsim.QuantSim) -> None:
        self.model: nn.Module = sim.model
        self.quantizers = dict(sim.quantizers())
        self.biases = {(bias.parameter, bias.input): bias.weight for bias in sim.decisions.biases}

    def q(self, key: str, x: Tensor) -> Tensor:
        quantizer = self.quantizers.get(key)
        return x if quantizer is None or not quantizer.enabled else quantized(quantizer, x)

    def product(self, function: Callable[..., Tensor], path: str, x: Tensor, key: str, **options: Any) -> Tensor:
        """A layer with a weight and perhaps a bias; `key`: of what it reads."""
        layer = self.model.get_submodule(path)
        bias: Tensor | None = layer.bias  # type: ignore[assignment]
        of_weight = self.biases.get((f"{path}.bias", key))
        if bias is not None and of_weight is not None:
            input, weight = self.quantizers[key], self.quantizers[of_weight]
            if input.enabled and weight.enabled:
                bias = bias + (reference.fake_quantize_bias(bias.detach(), positive(input), positive(weight)) - bias).detach()
        return function(x, self.q(f"{path}.weight", layer.weight), bias, **options)  # type: ignore[arg-type]

    def module(self, path: str, x: Tensor) -> Tensor:
        """A layer in float."""
        layer = self.model.get_submodule(path)
        return type(layer).forward(layer, x)  # type: ignore[no-any-return]

    def norm(self, path: str, x: Tensor) -> Tensor:
        """A BatchNorm, if it is still there."""
        layer = attrgetter(path)(self.model)
        if not isinstance(layer, nn.BatchNorm2d):
            return x
        return batch_norm(x, layer.running_mean, layer.running_var, layer.weight, layer.bias, False, 0.0, layer.eps)


def positive(quantizer: qsim.Quantizer) -> Tensor:
    scale = quantizer.scale.detach()
    return scale.abs().clamp_min(2.0**-126) if quantizer.spec.learnable else scale


class _OnGrid(torch.autograd.Function):
    """Straight through where rounding stays inside the grid; the scale's gradient is LSQ's."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor, ends: tuple[int, int], layout: dict[str, Any], factor: float
    ) -> Tensor:
        ctx.save_for_backward(x, scale, zero_point)
        ctx.options = ends, layout, factor
        return reference.fake_quantize(x, scale, zero_point, *ends, **layout)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ends, layout, factor = ctx.options
        of_x, of_scale, _ = reference.fake_quantize_backward(*gradients, *ctx.saved_tensors, *ends, **layout, grad_factor=factor)
        return of_x, of_scale.to(ctx.saved_tensors[1].dtype), None, None, None, None


def quantized(quantizer: qsim.Quantizer, x: Tensor) -> Tensor:
    """`x` on a quantizer's grid; nothing is observed."""
    spec = quantizer.spec
    if spec.is_dynamic:
        if spec.is_float:
            return reference.round_to_format_dynamic(x, spec.dtype, axis=spec.axis, block_size=spec.block_size)
        options: dict[str, Any] = {"axis": spec.axis, "block_size": spec.block_size, "symmetric": spec.symmetric}
        return reference.fake_quantize_dynamic(x, spec.quant_min, spec.quant_max, **options)
    if not spec.has_scale:
        return reference.round_to_format(x, spec.dtype, saturate=spec.saturate)
    scale = positive(quantizer)
    scale = scale.double() if str(x.dtype) == "torch.float64" else scale
    if spec.is_float:
        return reference.round_to_format(x, spec.dtype, saturate=spec.saturate, scale=scale, axis=spec.axis, block_size=spec.block_size)
    layout: dict[str, Any] = {"axis": spec.axis, "block_size": spec.block_size, "rounding": spec.rounding}
    factor = 1.0
    if spec.learnable:
        scale = quantizer.scale.abs().clamp_min(2.0**-126)
        counted = x.numel() // x.shape[0] if quantizer.batched and x.dim() > 1 else x.numel()
        factor = (counted / scale.numel() * spec.quant_max) ** -0.5
    on_grid: Tensor = _OnGrid.apply(x, scale, quantizer.zero_point, (spec.quant_min, spec.quant_max), layout, factor)
    return on_grid
