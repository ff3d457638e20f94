"""Parameters that a forward reads in the dtype of its input: the parameter itself in the example, a cast of it under autocast."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from by_hand import simulated
from models import Forward
from torch import nn

CASTS = {
    "to": lambda parameter, x: parameter.to(x.dtype),
    "like": lambda parameter, x: parameter.to(x),
    "type_as": lambda parameter, x: parameter.type_as(x),
}


class Casting(nn.Module):
    def __init__(self, cast):
        super().__init__()
        self.first, self.cast = nn.Linear(8, 8), cast
        self.gain, self.weight = nn.Parameter(torch.rand(8) + 0.5), nn.Parameter(torch.randn(6, 8))

    def forward(self, x):
        h = self.first(x)
        return F.linear(h * self.cast(self.gain, h), self.cast(self.weight, h))


def by_hand(sim, x):
    """In the dtypes of the call, with the quantizers of the simulation."""
    m, q = sim.model, sim.quantizers()
    h = q["first.output"](F.linear(q["input"](x), q["first.weight"](m.first.weight), m.first.bias))
    gained = q["mul.output"](h * q["gain"](m.cast(m.gain, h)))
    return q["linear.output"](F.linear(gained, q["weight"](m.cast(m.weight, h))))


@pytest.fixture(params=CASTS)
def sim(request):
    torch.manual_seed(0)
    return simulated(Casting(CASTS[request.param]).eval(), torch.randn(32, 8))


def outcomes(sim, called):
    """Under autocast, without a warning: results without and with gradients, and the gradients."""
    sim.zero_grad()
    x = torch.linspace(-2, 2, 256).reshape(32, 8)
    with warnings.catch_warnings(), torch.autocast("cpu", torch.bfloat16):
        warnings.simplefilter("error")
        with torch.no_grad():
            evaluated = called(x)
        out = called(x)
    out.float().square().sum().backward()
    return [evaluated, out.detach(), *(p.grad.clone() for p in sim.model.parameters())]


def test_they_are_on_their_grids(sim):
    found, expected = outcomes(sim, sim), outcomes(sim, lambda x: by_hand(sim, x))
    assert found[0].dtype is torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_compiled(sim):
    torch._dynamo.reset()
    compiled = torch.compile(sim, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(outcomes(sim, compiled), outcomes(sim, sim), rtol=0, atol=0)


def test_calibrated_so(sim):
    with torch.autocast("cpu", torch.bfloat16):
        report = sim.calibrate([torch.randn(32, 8)], progress=False)
    assert not report.problems
    torch.testing.assert_close(outcomes(sim, sim), outcomes(sim, lambda x: by_hand(sim, x)), rtol=0, atol=0)


@pytest.mark.parametrize("compiled", [False, True])
def test_where_no_example_reached_it(compiled):
    """The cast of another parameter is not on the grid of the one that the example reads, but on its own."""
    forward = lambda m, x, other=False: F.linear(x, (m.b if other else m.a).weight.to(x.dtype))  # noqa: E731
    model, x = Forward(forward, a=nn.Linear(8, 6), b=nn.Linear(8, 6)).eval(), torch.randn(32, 8)
    sim = simulated(model, x)
    torch._dynamo.reset()
    called = torch.compile(sim, backend="aot_eager", fullgraph=True) if compiled else sim
    with pytest.warns(UserWarning, match="'linear' .*its weight is quantized, its result stays in float"):
        found = called(x.bfloat16(), other=True)
    q = sim.quantizers()
    assert torch.equal(found, F.linear(q["input"](x.bfloat16()), q["b.weight"](model.b.weight.bfloat16())))
