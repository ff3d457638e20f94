"""Weights that a forward computes have a scale per channel where the model has these channels, and one where the input's size decides."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import qsim


class Parts(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.u, self.first = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(1, 4))
        self.position = nn.Parameter(torch.randn(17, 4))
        self.register_buffer("lower", torch.tril(torch.ones(16, 16)))
        self.run = forward

    def forward(self, x):
        return self.run(self, x)


def averages(lower):
    return lower / lower.sum(1, keepdim=True)


SIZED = {
    "zeros like the input": lambda m, x: torch.tanh(torch.zeros_like(x) @ m.u) + x,
    "zeros": lambda m, x: torch.tanh(torch.zeros(len(x), 4) @ m.u) + x,
    "an expanded parameter": lambda m, x: torch.tanh(m.first.expand(len(x), -1) @ m.u) + x,
    "averages": lambda m, x: averages(torch.tril(torch.ones(len(x), len(x)))) @ x,
    "averages of a buffer": lambda m, x: averages(m.lower[: len(x), : len(x)]) @ x,
    "the identity": lambda m, x: F.linear(x.mT, torch.eye(len(x))),
    "positions": lambda m, x: x @ m.position[: len(x)].t(),
}


@pytest.mark.parametrize("target", ["default", "onnxruntime", "tensorrt"])
@pytest.mark.parametrize("forward", SIZED.values(), ids=SIZED)
def test_other_sizes_than_the_examples(forward, target):
    model = Parts(forward).eval()
    sim = qsim.QuantSim(model, torch.rand(3, 4), qsim.Config(target=target))
    sim.calibrate([torch.ones(3, 4), torch.ones(16, 4)], progress=False)
    x = torch.rand(5, 4)
    got, wanted = sim(x), model(x)
    assert (got - wanted).square().sum() < 1e-2 * wanted.square().sum()


OWN = {
    "scaled": (lambda m, x: F.linear(x, m.u * 2), "linear.weight"),
    "a part": (lambda m, x: sum(F.linear(x, part) for part in m.u.chunk(2)), "linear.weight"),
    "two": (lambda m, x: F.linear(x, torch.cat([m.u, m.u * 2])), "linear.weight"),
    "of a batch": (lambda m, x: torch.bmm(x[None].expand(2, -1, -1), (m.u * 2).expand(2, -1, -1)), "bmm.weight"),
}


@pytest.mark.parametrize(("forward", "key"), OWN.values(), ids=OWN)
def test_channels_of_the_model_have_scales_of_their_own(forward, key):
    sim = qsim.QuantSim(Parts(forward).eval(), torch.randn(3, 4))
    sim.calibrate([torch.randn(3, 4), torch.randn(5, 4)], progress=False)
    assert sim.quantizers()[key].spec.axis is not None
    assert sim.quantizers()[key].scale.numel() > 1


class Mask(nn.Module):
    def forward(self, weight):
        return weight * (weight.abs() > 0.2)


def masked(layer):
    parametrize.register_parametrization(layer, "weight", Mask())


def masked_bias(layer):
    parametrize.register_parametrization(layer, "bias", Mask())


REGISTERED = {
    "weight": masked,
    "bias": masked_bias,
    "weight norm": parametrizations.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
}


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("register", REGISTERED.values(), ids=REGISTERED)
def test_a_parametrization_that_is_registered_later_is_no_operation_of_the_model(register, is_compiled):
    """What computes it is told of no more than where it was there from the start; the layer's result is as quantized."""
    model, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval(), torch.randn(64, 8)
    sim = qsim.QuantSim(model, x, qsim.w4a8())
    sim.calibrate([x], progress=False)
    twin = copy.deepcopy(sim)
    register(sim.model[0].eval())
    sim.eval()
    with torch.no_grad():  # the same numbers, held
        twin.model[0].weight.copy_(sim.model[0].weight)
        twin.model[0].bias.copy_(sim.model[0].bias)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            got = torch.compile(sim, backend="eager")(x) if is_compiled else sim(x)
        assert torch.equal(got, twin(x))


def test_what_else_runs_beside_a_parametrization_is_told():
    x = torch.randn(64, 8)
    sim = qsim.QuantSim(nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval(), x)
    sim.calibrate([x], progress=False)
    masked(sim.model[0])
    sim.model[1] = nn.Tanh()
    with pytest.warns(UserWarning, match="'tanh' ran where the example inputs did not show it"):
        sim(x)
