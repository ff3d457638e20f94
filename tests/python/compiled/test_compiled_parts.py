"""Parts of a simulation that are compiled by themselves, and what one call of theirs hands to the next."""

import pytest
import torch
from models import Perceptron, seeded
from torch import nn

import qsim

pytestmark = [pytest.mark.usefixtures("fresh_dynamo"), pytest.mark.filterwarnings("error:QuantSim")]

X = torch.randn(64, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Recurrent(nn.Module):
    """Called again with what it returned, whose last function no mode meets under Dynamo: it is quantized where the second call reads it,
    and the first call reads the model's input there."""

    def __init__(self, select, activation):
        super().__init__()
        torch.manual_seed(0)
        self.select, self.layers = select, nn.Sequential(nn.Linear(8, 8), activation)

    def forward(self, x):
        return self.layers(self.select(x))


class Network(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, x):
        for _ in range(3):
            x = self.part(x)
        return x


SELECTED = {
    "where": lambda x: torch.where(x > 0, x, x),
    "maximum": lambda x: torch.maximum(x, x[:, :1]),
    "product": lambda x: x * 0.5,
    "view": lambda x: x.view(8, 64).t().reshape(64, 8),
}


def gradients(sim):
    x = X.clone().requires_grad_()
    sim.zero_grad()
    out = sim(x)
    out.mul(torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
    return [out.detach(), x.grad, *(p.grad.clone() for p in sim.model.parameters())]


@pytest.mark.parametrize("activation", [nn.Hardswish(), nn.Sigmoid(), nn.Tanh(), nn.ReLU(), nn.SiLU()], ids=lambda a: type(a).__name__)
@pytest.mark.parametrize("name", SELECTED)
def test_called_again_with_what_they_returned(name, activation):
    sim = qsim.QuantSim(Network(Recurrent(SELECTED[name], activation)).double().eval(), X, qsim.int8())
    sim.calibrate([X], progress=False)
    expected = gradients(sim)  # without a word: the example's own path
    sim.model.part.compile(backend="eager")
    for _ in range(2):
        for found, wanted in zip(gradients(sim), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    assert torch.equal(sim(X), expected[0])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_layer_that_is_compiled_before_it_ever_ran(backend):
    x = torch.randn(8, 6)
    compiled, eager = (qsim.QuantSim(seeded(Perceptron), x, qsim.int8()) for _ in range(2))
    for each in (compiled, eager):
        each.calibrate([x], progress=False)
    compiled.model.fc2.compile(backend=backend)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), eager(x))
        torch.testing.assert_close(compiled(x[:3]), eager(x[:3]))
