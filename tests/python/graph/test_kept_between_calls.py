"""What a module keeps in one call and reads in another of the same forward, as a normalization that is taken back does (RevIN)."""

import warnings

import pytest
import torch
from torch import nn

import qsim

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

ELSE = r"'norm.mul(_\d)?' .* ran on what the example inputs did not show it: its operand 1 stays in float"


class Norm(nn.Module):
    def __init__(self, keep):
        super().__init__()
        self.keep = keep

    def forward(self, x, back=False, other=None):
        if back:
            return x * (self.std if other is None else other) + self.mean
        self.mean = self.keep(x.mean(1, keepdim=True))
        self.std = self.keep(torch.sqrt(x.var(1, keepdim=True, unbiased=False) + 1e-5))
        return (x - self.mean) / self.std


class Series(nn.Module):
    def __init__(self, keep):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.layer = Norm(keep), nn.Linear(3, 3)

    def forward(self, x, other=None):
        return self.norm(self.layer(self.norm(x)), back=True, other=other)


KEEP = {"itself": lambda t: t, "detached": lambda t: t.detach()}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("keep", KEEP.values(), ids=KEEP)
def test_it_is_quantized_where_it_is_read(keep, compiled):
    torch.manual_seed(1)
    x = torch.randn(4, 14, 3) * 3 + 5
    sim = qsim.QuantSim(Series(keep).eval(), x, qsim.int8())
    sim.calibrate([x], progress=False)
    taken = []
    handle = sim.model.norm.register_forward_pre_hook(lambda _, args: taken.append(args[0]))
    sim(x)
    handle.remove()
    norm, quantizers = sim.model.norm, sim.quantizers()
    product = quantizers["norm.mul.output"](taken[-1] * quantizers["norm.var.output"](norm.std))
    expected = quantizers["norm.add_2.output"](product + norm.mean)
    called = torch.compile(sim, backend="eager", fullgraph=True) if compiled else sim
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = called(x)
    assert torch.equal(found, expected)
    assert not torch.equal(found, quantizers["norm.add_2.output"](quantizers["norm.mul.output"](taken[-1] * norm.std) + norm.mean))


def test_another_tensor_in_its_place_is_told():
    torch.manual_seed(1)
    x = torch.randn(4, 14, 3) * 3 + 5
    sim = qsim.QuantSim(Series(KEEP["itself"]).eval(), x, qsim.int16())
    sim.calibrate([x], progress=False)
    with pytest.warns(UserWarning, match=ELSE):
        found = sim(x, -torch.ones(4, 1, 3))
    with sim.in_float():
        expected = sim(x, -torch.ones(4, 1, 3))
    noise = (found - expected).square().sum() / expected.square().sum()
    assert noise < 1e-6
