"""Parametrizations are taken off a simulation as they are off the float model, for deployment, say, after training."""

import copy
import pickle

import pytest
import torch
from by_hand import simulated
from torch import nn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm
from torch.nn.utils.parametrize import is_parametrized, register_parametrization, remove_parametrizations

import qsim

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Doubled(nn.Module):
    def forward(self, t):
        return 2 * t


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.layer = nn.Parameter(torch.randn(8, 8)), nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x @ self.weight)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(spectral_norm(nn.Linear(8, 8)), nn.ReLU(), weight_norm(nn.Linear(8, 8)), orthogonal(nn.Linear(8, 8)))
        self.inner = Inner()
        register_parametrization(self.inner, "weight", Doubled())
        register_parametrization(self.inner.layer, "weight", Doubled())
        register_parametrization(self.inner.layer, "bias", Doubled())

    def forward(self, x):
        return self.inner(self.layers(x))


def model():
    torch.manual_seed(0)
    return Model().eval()


def take_off(module):
    for m in list(module.modules()):
        for name in list(m.parametrizations) if is_parametrized(m) else ():
            remove_parametrizations(m, name)


CONFIGS = pytest.mark.parametrize("config", [qsim.int8(), qsim.w4a8(), qsim.fp16()], ids=["int8", "w4a8", "fp16"])


@CONFIGS
@torch.no_grad()
def test_it_computes_what_it_did(config):
    sim, twin = simulated(model(), X, config=config), model()
    expected = sim(X)
    take_off(sim.model)
    take_off(twin)
    assert {name for name, _ in sim.model.named_parameters()} == {name for name, _ in twin.named_parameters()}
    assert torch.equal(sim(X), expected)
    assert torch.equal(copy.deepcopy(sim)(X), expected)
    with sim.in_float():
        assert torch.equal(sim(X), twin(X))
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(sim, backend="eager", fullgraph=True)(X), expected)


def test_it_is_trained_on(tmp_path):
    sim = simulated(model(), X, config=qsim.int8()).train()
    take_off(sim.model)
    sim(X).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in sim.model.parameters())
    sim.eval().export(tmp_path / "model.onnx")


@torch.no_grad()
def test_copies_and_the_float_model_keep_theirs():
    float_model = model()
    sim = simulated(float_model, X, config=qsim.int8())
    expected, in_float = sim(X), float_model(X)
    other = copy.deepcopy(sim)
    remove_parametrizations(sim.model.inner.layer, "bias")  # and the weight keeps its own
    for each in (sim, other, copy.deepcopy(sim), simulated(float_model, X, config=qsim.int8())):
        assert torch.equal(each(X), expected)
    take_off(float_model)
    assert torch.equal(float_model(X), in_float)
    for each in (sim, other, copy.deepcopy(other)):
        assert torch.equal(each(X), expected)
    with pytest.raises(RuntimeError, match="only supported through state_dict"):
        pickle.dumps(other)
