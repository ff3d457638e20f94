"""Copies of a simulation whose layers were wrapped or parametrized since it was made run in float where they are told to: their layers
are theirs, and do not ask the simulation that they were copied from."""

import copy
import pickle

import pytest
import torch
from models import Perceptron, seeded
from torch import nn
from torch.nn.utils import parametrizations

import qsim

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))


class Adapter(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base, self.added = base, nn.Linear(16, 3, bias=False)

    def forward(self, x):
        return self.base(x) + 0.1 * self.added(x)


def adapted(sim):
    sim.model.fc2 = Adapter(sim.model.fc2)


def adapted_twice(sim):
    sim.model.fc2 = nn.Sequential(Adapter(sim.model.fc2))


def normalized(sim):
    parametrizations.weight_norm(sim.model.fc2)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda sim: pickle.loads(pickle.dumps(sim))], ids=["copy", "pickle"])
@pytest.mark.parametrize("change", [adapted, adapted_twice, normalized])
@pytest.mark.filterwarnings("ignore:QuantSim")
def test_their_layers_are_theirs(change, copied):
    if change is normalized and copied is not copy.deepcopy:
        pytest.skip("torch pickles no parametrization")
    sim = qsim.QuantSim(seeded(Perceptron), X, qsim.int4())
    sim.calibrate([X], progress=False)
    change(sim)
    other = copied(sim)
    with sim.in_float():
        expected = sim(X)
        assert torch.equal(other(X), sim_on(sim))
    with other.in_float():
        assert torch.equal(other(X), expected)


def sim_on(sim):
    twin = copy.deepcopy(sim)
    twin.switch.on = True
    return twin(X)
