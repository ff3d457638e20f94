"""Layers of complex numbers: no grid holds what they read, nor their weights; what is real beside them is quantized."""

import torch
from by_hand import linear, on_grid, simulated
from models import Forward
from torch import nn

X = torch.linspace(-2, 2, 256).view(32, 8).sin()


def test_a_complex_linear_stays_in_float():
    torch.manual_seed(0)
    model = Forward(lambda m, x: m.a(torch.complex(x, x)).real, a=nn.Linear(8, 8, dtype=torch.complex64)).eval()
    sim = simulated(model, X)
    assert not sim.quantizers()
    assert torch.equal(sim(X), model(X))


def test_the_layers_around_it_by_hand():
    torch.manual_seed(0)

    def forward(m, x):
        return m.c(m.b(torch.complex(m.a(x), x)).abs())

    model = Forward(forward, a=nn.Linear(8, 8), b=nn.Linear(8, 8, dtype=torch.complex64), c=nn.Linear(8, 4)).eval()
    sim = simulated(model, X)
    assert {key for key in sim.quantizers() if key.endswith("weight")} == {"a.weight", "c.weight"}
    y = on_grid(linear(model.a, on_grid(X)), model.a(X))
    z = model.b(torch.complex(model.a(X), X)).abs()
    y = on_grid(linear(model.c, on_grid(model.b(torch.complex(y, on_grid(X))).abs(), z)), model(X))
    torch.testing.assert_close(sim(X), y, rtol=0, atol=0.02)
    sim.model(X).square().sum().backward()
    assert all(p.grad is not None for p in sim.model.parameters())
