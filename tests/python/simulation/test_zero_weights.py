"""Weights that are zero when they are calibrated, as LoRA and new heads begin, are trained on no grid that rounds all to zero."""

import dataclasses
import warnings

import pytest
import torch
from torch import nn

import qsim

TOLD = r"weights were zero throughout when their ranges were chosen.*'2\.weight'\. .*with sim\.in_float\(\):.*sim\.calibrate\(data\)"
BATCHES = [(x, x[:, :2] - x[:, 2:]) for x in torch.randn(4, 16, 4, generator=torch.Generator().manual_seed(0))]


def calibrated(config=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)).eval()
    nn.init.zeros_(model[2].weight)
    nn.init.zeros_(model[2].bias)
    sim = qsim.QuantSim(model, BATCHES[0][0], config)
    sim.calibrate([x for x, _ in BATCHES], progress=False)
    return sim


def train(sim, epochs=10):
    optimizer = torch.optim.Adam(sim.parameters(), 0.02)
    for x, y in BATCHES * epochs:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(sim(x), y)
        loss.backward()
        optimizer.step()
    return loss.item()


def test_training_on_the_grid_of_zero_is_told_and_the_remedy_works():
    sim = calibrated()
    with pytest.warns(UserWarning, match=TOLD):
        sim.train()
    before = sim(BATCHES[0][0])
    train(sim, 3)
    assert torch.equal(sim(BATCHES[0][0]), before)  # nothing is learned
    with sim.in_float():
        train(sim, 40)
    sim.calibrate([x for x, _ in BATCHES], progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sim.train()
    assert train(sim) < 0.1


def test_a_simulation_that_was_loaded_tells_it_too():
    other = qsim.QuantSim(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)).eval(), BATCHES[0][0])
    other.load_state_dict(calibrated().state_dict())
    with pytest.warns(UserWarning, match=TOLD):
        other.train()


def _off(sim):
    sim.disable("2.weight")


def _frozen(sim):
    sim.model[2].requires_grad_(False)


def _other(sim):
    nn.init.ones_(sim.model[2].weight)
    sim.set_method("minmax")


@pytest.mark.parametrize("change", [_off, _frozen, _other])
def test_weights_that_rest_or_are_in_float_or_are_not_zero_are_no_concern(change):
    sim = calibrated()
    change(sim)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sim.train()


def test_ranges_that_follow_the_weights_are_no_concern():
    config = qsim.int8()
    sim = calibrated(dataclasses.replace(config, weight=dataclasses.replace(config.weight, method="ema")))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sim.train()


def test_evaluation_is_no_concern():
    sim = calibrated()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not sim.train(False)(BATCHES[0][0]).any()
