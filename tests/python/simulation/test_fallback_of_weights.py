"""Weights of operations that fall back: in their format wherever they are read, also where no example reads them."""

import pytest
import torch
from models import seeded
from torch import nn

import qsim

pytestmark = [pytest.mark.filterwarnings("ignore:QuantSim"), pytest.mark.usefixtures("fresh_dynamo")]
X = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
CELLS = {"lstm": nn.LSTMCell, "gru": nn.GRUCell, "rnn": nn.RNNCell}


class Cell(nn.Module):
    """Nothing but a cell: the container around it has no call of its own."""

    def __init__(self, kind="lstm"):
        super().__init__()
        self.cell = CELLS[kind](8, 8)

    def forward(self, x):
        found = self.cell(x)
        return found[0] if isinstance(found, tuple) else found


class Paths(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x, other=False):
        return nn.functional.linear(x * 2, self.layer.weight) if other else self.layer(x)


def calibrated(model):
    sim = qsim.QuantSim(model, X)
    sim.calibrate([X], progress=False)
    return sim


def rounded(t, format):
    return t if format == "float32" else t.half().float()


@pytest.mark.parametrize("kind", CELLS)
def test_a_cell_of_which_all_falls_back_is_in_float(kind):
    sim = calibrated(seeded(Cell, kind))
    sim.fallback("*", to="float32")
    torch.testing.assert_close(sim(X), seeded(Cell, kind)(X), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", CELLS)
def test_a_cell_in_half_precision_has_the_weights_of_that(kind):
    """To 11 bits: on the grid of 8 bits they would be off by much more."""
    sim, model = calibrated(seeded(Cell, kind)), seeded(Cell, kind)
    sim.fallback("*", to="fp16")
    assert (sim(X) - model(X)).abs().max() < 5e-4 * model(X).abs().max() * 4


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("format", ["float32", "fp16"])
def test_where_no_example_reads_them(format, compiled):
    sim = calibrated(seeded(Paths))
    sim.disable("input")
    sim.fallback("layer", to=format)
    called = torch.compile(sim, backend="eager") if compiled else sim
    weight = sim.model.layer.weight
    torch.testing.assert_close(called(X, other=True), nn.functional.linear(X * 2, rounded(weight, format)), rtol=0, atol=1e-6)
    sim.fallback("layer", to="int")
    on_grid = sim.quantizers()["layer.weight"].quantize(weight)
    torch.testing.assert_close(called(X, other=True), nn.functional.linear(X * 2, on_grid), rtol=0, atol=1e-6)
