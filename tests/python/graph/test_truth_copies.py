"""A forward that copies a module and calls the copy, as meta-learning does."""

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from by_hand import EXACT, linear, on_grid, simulated
from models import Forward
from torch import nn

X = torch.linspace(-2, 2, 256, dtype=torch.float64).view(32, 8).sin()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.b(F.relu(self.a(x)))


def copied(m, x):
    return m.head(copy.deepcopy(m.block)(x))


def called(m, x):
    return m.head(m.block(x))


def model(forward) -> nn.Module:
    torch.manual_seed(0)
    return Forward(forward, block=Block(), head=nn.Linear(8, 4)).double().eval()


def test_what_is_copied_while_it_is_recorded_is_freed_once():
    gc.collect()
    gc.freeze()  # what other tests left need not be walked twenty times
    for _ in range(20):  # references to storages were freed twice: some time later the process crashed
        simulated(model(copied), X)
        gc.collect()


def test_the_copy_computes_with_the_quantizers_of_the_original():
    sim, plain = simulated(model(copied), X), simulated(model(called), X)
    assert list(sim.quantizers()) == list(plain.quantizers())
    assert torch.equal(sim(X), plain(X))
    sim.train()
    plain.train()
    assert torch.equal(sim(X), plain(X))


def test_a_copy_outside_has_quantizers_of_its_own():
    original = model(called)
    sim, plain = simulated(original, X), original.block
    block = copy.deepcopy(sim.model.block)
    given = on_grid(X)
    before = block(given)
    sim.calibrate([X * 3], progress=False)
    assert torch.equal(block(given), before)
    assert not torch.equal(sim.model.block(given), before)
    expected = linear(plain.b, on_grid(F.relu(linear(plain.a, given)), F.relu(plain.a(X))))
    with torch.no_grad():
        torch.testing.assert_close(before, on_grid(expected, plain.b(F.relu(plain.a(X)))), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("way", [copy.deepcopy, copy.copy])
def test_a_copy_of_the_simulation_computes_the_same(way):
    sim = simulated(model(copied), X, config=EXACT)
    assert torch.equal(way(sim)(X), sim(X))
