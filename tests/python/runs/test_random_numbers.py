"""What qsim runs for itself draws none of the user's random numbers, wherever they come from."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

import qsim
from qsim.runs import random_numbers
from qsim.runs.random_numbers import RandomNumbers, random_numbers_unchanged, seed_random_numbers

SOURCES = {
    "torch": lambda: float(torch.rand(())),
    "Python": random.random,
    "NumPy": lambda: float(np.random.rand()),  # noqa: NPY002  what models call
}


class Accelerator:
    """Two devices with a generator each, as `torch.cuda` has them."""

    def __init__(self):
        self.generators = [torch.Generator().manual_seed(5), torch.Generator().manual_seed(6)]

    def get_rng_state(self, index):
        return self.generators[index].get_state()

    def set_rng_state(self, state, index):
        self.generators[index].set_state(state)

    def manual_seed_all(self, seed):
        for generator in self.generators:
            generator.manual_seed(seed)

    def draw(self):
        return float(torch.rand((), generator=self.generators[1]))


@pytest.fixture
def accelerator(monkeypatch):
    made = Accelerator()
    monkeypatch.setattr(random_numbers, "_accelerator", lambda: (made, [(0,), (1,)]))
    return made


@pytest.mark.parametrize("source", [*SOURCES, "the second device"])
def test_put_back(source, accelerator):
    draw = SOURCES.get(source, accelerator.draw)
    with random_numbers_unchanged():
        first = draw()
    assert draw() == first
    with random_numbers_unchanged():
        seed_random_numbers(3)
        seeded = draw()
    second = draw()
    assert len({first, second, seeded}) == 3
    with random_numbers_unchanged():
        seed_random_numbers(3)
        assert draw() == seeded


@pytest.mark.parametrize("source", [*SOURCES, "the second device"])
def test_what_was_drawn_is_seen(source, accelerator):
    before = RandomNumbers()
    assert RandomNumbers().is_same(before)
    SOURCES.get(source, accelerator.draw)()
    assert not RandomNumbers().is_same(before)
    before.put_back()
    assert RandomNumbers().is_same(before)


def test_an_accelerator_that_is_not_in_use_keeps_the_users_seed(monkeypatch):
    """`torch.manual_seed` seeds it when it is used for the first time: the user's would be overwritten by qsim's."""
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("seeded"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    sim = qsim.QuantSim(model, torch.randn(2, 4), qsim.int8())
    sim.calibrate([torch.randn(8, 4)], progress=False)
    sim.bake()


@pytest.mark.parametrize("source", SOURCES)
def test_a_model_that_draws_is_not_calibrated_block_by_block(source):
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

        def forward(self, x):
            for block in self.blocks:
                x = block(x) + SOURCES[source]()
            return x

    sim = qsim.QuantSim(Noisy(), torch.randn(2, 4), qsim.int8())
    with pytest.raises(qsim.CalibrationError, match="draws random numbers"):
        sim.calibrate([torch.randn(8, 4)] * 2, blocks=["blocks.0", "blocks.1"], progress=False)
