"""Running ranges follow the mode of the module in which they stand, as the statistics of its BatchNorms do."""

import copy
import dataclasses
import pickle

import pytest
import torch
from torch import nn

import qsim

RUNNING = dataclasses.replace(qsim.int8(), activation=qsim.TensorSpec(method="ema", averaging=0.3, symmetric=False))


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.backbone(x))


class Frozen(Parts):
    """Keeps its backbone in eval mode, as detectors do."""

    def train(self, mode=True):
        super().train(mode)
        self.backbone.eval()
        return self


def simulated(model):
    sim = qsim.QuantSim(model.eval(), torch.randn(2, 4), RUNNING)
    sim.calibrate([torch.randn(8, 4)], progress=False)
    return sim


def moved(sim, call):
    """Keys of activations whose range a batch moves."""
    before = sim.encodings()
    call(torch.randn(8, 4) * 9)
    return {key for key, encoding in sim.encodings().items() if encoding != before[key] and not key.endswith("weight")}


ALL = {"input", "backbone.0.output", "backbone.2.output", "head.output"}


@pytest.mark.parametrize("way", ["itself", "a copy", "a pickle", "compiled"])
@pytest.mark.parametrize("model", [Parts, lambda: nn.Linear(4, 2)])
def test_the_model_in_training_mode_moves_ranges(model, way):
    sim = simulated(model())
    sim = copy.deepcopy(sim) if way == "a copy" else pickle.loads(pickle.dumps(sim)) if way == "a pickle" else sim
    torch.compiler.reset()
    call = torch.compile(sim.model, backend="eager") if way == "compiled" else sim.model
    assert moved(sim, call) == set()
    sim.model.train()
    assert moved(sim, call) == (ALL if model is Parts else {"input", "linear.output"})
    assert sim.training is False
    sim.model.eval()
    assert moved(sim, call) == set()


def test_a_part_in_training_mode_moves_its_own():
    sim = simulated(Parts())
    sim.model.backbone.train()
    assert moved(sim, sim) == {"backbone.0.output", "backbone.2.output"}
    sim.train()
    assert moved(sim, sim) == ALL
    sim.model.backbone.eval()
    assert moved(sim, sim) == ALL - {"backbone.0.output", "backbone.2.output"}


@pytest.mark.parametrize("train", [lambda sim: sim.train(), lambda sim: sim.model.train()])
def test_a_part_that_the_model_freezes_keeps_its_ranges(train):
    sim = simulated(Frozen())
    train(sim)
    assert moved(sim, sim) == ALL - {"backbone.0.output", "backbone.2.output"}
