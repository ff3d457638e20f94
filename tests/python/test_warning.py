"""Warnings point at the user's line, whatever lies between it and what warns."""

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import qsim


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


def of_training_mode() -> object:
    return qsim.QuantSim(normed().train(), torch.randn(2, 4))


def of_an_idle_policy() -> object:
    return qsim.QuantSim(normed().eval(), torch.randn(2, 4), qsim.Config(batch_norm={"nowhere": "keep"}))


def of_a_state_without_ranges() -> object:
    layer = nn.Linear(4, 4)
    sim = qsim.QuantSim(layer, torch.randn(2, 4))
    sim.calibrate([torch.randn(2, 4)], progress=False)
    return sim.load_state_dict(layer.state_dict())


def of_an_old_name() -> object:
    with qsim.QuantSim(nn.Linear(4, 4), torch.randn(2, 4)).float() as sim:
        return sim


def of_activations_in_float() -> object:
    sim = qsim.QuantSim(nn.Linear(4, 4), torch.randn(2, 4))
    sim.calibrate([torch.randn(2, 4)], progress=False)
    return sim.bake()


@pytest.mark.parametrize("call", [of_training_mode, of_an_idle_policy, of_a_state_without_ranges, of_an_old_name, of_activations_in_float])
def test_a_warning_is_of_the_line_that_called(call: Callable[[], object]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    assert caught, "nothing was warned of"
    assert {Path(warning.filename).name for warning in caught} == {Path(__file__).name}
