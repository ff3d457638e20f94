"""What of a model is not simulated is told when it is simulated."""

import warnings

import pytest
import torch
import torch.fx
from torch import nn

import qsim


class OwnCall(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.w = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4))

    def __call__(self, x):
        return super().__call__(x * 0.3) @ self.w

    def forward(self, x):
        return self.layer(x)


def test_a_call_of_the_models_own():
    x = torch.randn(3, 4)
    with pytest.warns(UserWarning, match="__call__ of its own: what that computes around forward is in float"):
        sim = qsim.QuantSim(OwnCall().eval(), x)
    assert "w" not in sim.quantizers()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        inside = qsim.QuantSim(nn.Sequential(OwnCall()).eval(), x)
        qsim.QuantSim(torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4))), x)  # has one that does as modules do
    assert "0.w" in inside.quantizers()


class Filter(nn.Module):
    """Multiplies in the frequency domain, as GFNet does."""

    def __init__(self):
        super().__init__()
        self.w, self.layer = nn.Parameter(torch.randn(1, 4, 2)), nn.Linear(4, 4)

    def forward(self, x):
        spectrum = torch.fft.rfft(x, dim=1) * torch.view_as_complex(self.w)
        return self.layer(torch.fft.irfft(spectrum, n=x.shape[1], dim=1))


class Product(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4, dtype=torch.cfloat))

    def forward(self, x):
        return (x.to(torch.cfloat) @ self.w).abs()


@pytest.mark.parametrize(("cls", "names"), [(Filter, {"fft_rfft", "mul"}), (Product, {"matmul"})])
def test_complex_numbers_stay_in_float(cls, names):
    summary = qsim.QuantSim(cls().eval(), torch.randn(3, 6, 4)).summary()
    assert {entry.name for entry in summary.left if "complex numbers" in entry.reason} == names


class Rotary(nn.Module):
    """Angles are constants, whatever they are made of."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        turned = torch.polar(torch.ones(4), torch.arange(4.0))
        return self.layer(x) * turned.real


def test_complex_constants_are_no_news():
    summary = qsim.QuantSim(Rotary().eval(), torch.randn(3, 4)).summary()
    assert not [entry for entry in summary.left if "complex" in entry.reason]
