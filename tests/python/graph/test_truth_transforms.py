"""Simulations under torch.func and torch.vmap, inside the model and around it: what a loop over the samples computes."""

import dataclasses
import warnings

import pytest
import torch
import torch.nn.functional as F
from by_hand import EXACT, linear, on_grid, simulated
from models import Forward
from torch import Tensor, nn

import qsim

X = torch.randn(6, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def layers(*names: str) -> dict[str, nn.Linear]:
    torch.manual_seed(0)
    return {name: nn.Linear(8, 8).double() for name in names}


def test_a_map_over_a_later_dimension_computes_what_is_written():
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        return torch.vmap(lambda rows: m.b(torch.tanh(m.a(rows))), in_dims=1, out_dims=2)(x)

    sim = simulated(Forward(forward, **layers("a", "b")), X)
    x = X.clone().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a performance drop, says torch
        y = sim(x)
        y.square().sum().backward()
    by_hand = X.clone().requires_grad_()
    a, b, seen = sim.model.a, sim.model.b, torch.tanh(sim.model.a(X))  # what calibration saw, in float
    first = on_grid(torch.tanh(linear(a, on_grid(by_hand).movedim(1, 0))), seen)
    expected = on_grid(linear(b, first), b(seen)).movedim(0, 2)
    torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-9)
    expected.square().sum().backward()
    torch.testing.assert_close(x.grad, by_hand.grad, rtol=1e-9, atol=1e-9)


CONFIGS = {
    "int8": EXACT,
    "learned": dataclasses.replace(EXACT, activation=qsim.TensorSpec(learnable=True)),
    "fp16": qsim.fp16(),
    "fp8": qsim.fp8(),
    "int4 in blocks": dataclasses.replace(EXACT, weight=qsim.TensorSpec(bits=4, symmetric=True, axis=1, block_size=4, method="minmax")),
}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))


def small(config: qsim.Config) -> qsim.QuantSim:
    model = Forward(lambda m, x: m.b(F.relu(m.a(x)) * x), **layers("a", "b")).float()
    return simulated(model, X[:, 0].float(), config=config)


def gradients(sim: qsim.QuantSim, x: Tensor) -> list[Tensor]:
    """Of the sum of squares, by the tape of eager mode."""
    sim.zero_grad()
    sim(x).square().sum().backward()
    return [p.grad.clone() for p in sim.parameters() if p.grad is not None]


@every_config
def test_gradients_of_each_sample(config):
    sim, x = small(config), X[:, 0].float()
    learned = {name: p for name, p in sim.named_parameters() if p.requires_grad}

    def loss(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
        return torch.func.functional_call(sim, parameters, (row[None],)).square().sum()

    found = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))({name: p.detach() for name, p in learned.items()}, x)
    for i, row in enumerate(x):
        for ours, theirs in zip(found.values(), gradients(sim, row[None]), strict=True):
            torch.testing.assert_close(ours[i], theirs, rtol=1e-5, atol=1e-6)


@every_config
def test_an_ensemble_of_parameters(config):
    sim, x = small(config), X[:, 0].float()
    members = [{name: p.detach() + 0.01 * i for name, p in sim.named_parameters()} for i in range(3)]
    stacked = {name: torch.stack([member[name] for member in members]) for name in members[0]}
    found = torch.vmap(lambda p: torch.func.functional_call(sim, p, (x,)))(stacked)
    for ours, member in zip(found, members, strict=True):
        torch.testing.assert_close(ours, torch.func.functional_call(sim, member, (x,)), rtol=1e-6, atol=1e-6)


def test_a_jacobian():
    sim, row = small(EXACT), X[0, :1].float()
    torch.testing.assert_close(torch.func.jacrev(sim)(row), torch.autograd.functional.jacobian(sim, row))


def test_a_running_range_is_trained_inside_a_map():
    config = dataclasses.replace(EXACT, activation=qsim.TensorSpec(method="ema"))
    model = Forward(lambda m, x: torch.vmap(lambda rows: torch.tanh(m.a(rows)), in_dims=1)(x), **layers("a")).float()
    other = Forward(lambda m, x: torch.tanh(m.a(x.movedim(1, 0))), **layers("a")).float()
    mapped, plain = (simulated(m, X.float(), config=config).train() for m in (model, other))
    for x in (X.float() * 2, X.float() * 3):
        found, expected = (gradients(sim, x) for sim in (mapped, plain))
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs)
    ours, theirs = ([q.encoding.scale for q in sim.quantizers().values() if q.encoding is not None] for sim in (mapped, plain))
    torch.testing.assert_close(ours, theirs)
