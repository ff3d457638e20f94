"""Simulations of small networks, and whether two were calibrated alike."""

import torch
from models import Perceptron, seeded
from torch import Tensor, nn

import qsim

ROWS = torch.linspace(-2, 2, 32 * 6).reshape(32, 6).sin()


def simulated(model: nn.Module | None = None, example: object = ROWS, config: qsim.Config | None = None) -> qsim.QuantSim:
    return qsim.QuantSim(seeded(Perceptron) if model is None else model, example, config)


def ranges(sim: qsim.QuantSim) -> dict[str, tuple[Tensor, Tensor]]:
    return {key: (quantizer.min, quantizer.max) for key, quantizer in sim.quantizers().items()}


def assert_same_ranges(sim: qsim.QuantSim, other: qsim.QuantSim) -> None:
    mine, theirs = ranges(sim), ranges(other)
    assert mine.keys() == theirs.keys()
    for key in mine:
        assert torch.equal(mine[key][0], theirs[key][0]), key
        assert torch.equal(mine[key][1], theirs[key][1]), key
    assert sim.encodings() == other.encodings()
