"""What falls back and works in place: whoever knows the memory by another name sees what was computed."""

import itertools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import qsim

pytestmark = pytest.mark.filterwarnings("ignore:QuantSim", "ignore:None of the inputs")


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))


class ReturnedByAnOlderName(Layers):
    def forward(self, x):
        t = y = self.a(x)
        y = y.add_(x)
        y.relu_()
        return t


class ReadByAnOlderName(Layers):
    def forward(self, x):
        t = y = self.a(x)
        y = y.clamp_(-0.3, 0.3)
        y = y.mul_(x)
        y = y.sub_(1.0)
        return self.b(t) * self.c(y)


class ThroughAView(Layers):
    def forward(self, x):
        y = self.a(x)
        part = y[:, :4]
        part = part.add_(x[:, 4:])
        part.relu_()
        return y


class Held(Layers):
    def forward(self, x):
        y = self.a(x)
        held = [y]
        y = y.mul_(2)
        y = y.clamp_(-1, 1)
        y = y.add_(x)
        return self.b(held[0]) + y


class OfAnArgument(Layers):
    def forward(self, x):
        t = x = x.clone()
        x = x.add_(self.a(x))
        x.mul_(self.b(x))
        return t


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("made", [ReturnedByAnOlderName, ReadByAnOlderName, ThroughAView, Held, OfAnArgument])
def test_whatever_falls_back_the_result_is_near_float(made, grad):
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    model = made().eval()
    sim = qsim.QuantSim(model, x.clone(), qsim.int16())
    sim.calibrate([x.clone()], progress=False)
    expected, operations = model(x.clone()), list(sim.decisions.operations)
    for count in range(1, len(operations) + 1):
        for chosen in itertools.combinations(operations, count):
            sim.fallback(operations, to="int")
            sim.fallback(list(chosen), to="fp16")
            with torch.set_grad_enabled(grad):
                torch.testing.assert_close(sim(x.clone()), expected, rtol=0, atol=4e-3, msg=f"{chosen}", check_device=True)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU6(inplace=True))

    def forward(self, x):
        y = checkpoint(self.layers, x, use_reentrant=True)
        y[:, 2] = 0.25
        return y


@pytest.mark.parametrize("to", ["float32", "fp16", "int"])
def test_what_leaves_a_reentrant_checkpoint_can_be_written_to(to):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    sim = qsim.QuantSim(Checkpointed(), x)
    sim.calibrate([x], progress=False)
    sim.fallback("*", to=to)
    given = x.clone().requires_grad_()
    sim(given).sum().backward()
    assert given.grad.abs().sum() > 0
    assert sim.model.layers[0].weight.grad.abs().sum() > 0
