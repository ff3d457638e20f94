"""Simulations written out by hand, in float64: grids from the ranges of float tensors, by `docs/numerics.md` and `qsim.reference` alone."""

import torch
from torch import Tensor, nn

import qsim
from qsim import reference

# Exact ranges and no int32 biases: every grid follows from a range that a test can compute itself.
EXACT = qsim.Config(
    weight=qsim.TensorSpec(symmetric=True, axis=0, method="minmax"), activation=qsim.TensorSpec(method="minmax"), bias=False
)


def simulated(model: nn.Module, *inputs: Tensor, config: qsim.Config = EXACT, **keywords: object) -> qsim.QuantSim:
    """Recorded and calibrated on these inputs."""
    example = inputs or dict(keywords)
    sim = qsim.QuantSim(model, example, config)
    sim.calibrate([example], progress=False)
    return sim


def on_grid(x: Tensor, *seen: Tensor) -> Tensor:
    """An activation on the 8-bit grid of what was seen (by default of itself), with the straight-through gradient."""
    flat = torch.cat([t.detach().flatten() for t in seen or (x,)]).float()
    scale, zero_point = reference.choose_qparams(flat.min(), flat.max(), -128, 127)
    y = reference.fake_quantize(x.detach(), scale.to(x.dtype), zero_point, -128, 127)
    steps = (x.detach() / scale.to(x.dtype)).round() + zero_point
    inside = (steps >= -128) & (steps <= 127)
    return y + (x - x.detach()) * inside


def weight_on_grid(weight: Tensor, bits: int = 8) -> Tensor:
    """A weight on the symmetric grid of each of its output channels (axis 0), with the straight-through gradient."""
    top = 2 ** (bits - 1) - 1
    rows = weight.detach().float().flatten(1)
    scale, zero_point = reference.choose_qparams(rows.amin(1), rows.amax(1), -top - 1, top, symmetric=True)
    y = reference.fake_quantize(weight.detach(), scale.to(weight.dtype), zero_point, -top - 1, top, axis=0)
    return y + (weight - weight.detach())


def linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """A layer whose weight is quantized."""
    return nn.functional.linear(x, weight_on_grid(layer.weight), layer.bias)


def decibels(found: Tensor, expected: Tensor) -> float:
    """Signal to noise."""
    noise = (found.double() - expected.double()).square().sum()
    return float("inf") if noise == 0 else float(10 * torch.log10(expected.double().square().sum() / noise))
