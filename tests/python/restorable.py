"""A small network of convolutions, data for it, and how far a simulation is from it: for the tests of restoration."""

import torch
from torch import nn

import qsim

W3A8 = qsim.Config(weight=qsim.TensorSpec(bits=3, symmetric=True, axis=0, method="mse"), activation=qsim.TensorSpec(bits=8))


def digits_net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(12, 12, 3, padding=1, groups=12),
        nn.ReLU(),
        nn.ConvTranspose2d(12, 6, 2, 2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(6 * 8 * 8, 5),
    ).eval()


def batches_of(count, size=16, seed=1):
    g = torch.Generator().manual_seed(seed)
    return [torch.rand(size, 1, 4, 4, generator=g) for _ in range(count)]


def calibrated(model=None, config=W3A8, data=None):
    data = data or batches_of(8)
    sim = qsim.QuantSim(model or digits_net(), data[0][:1], config)
    sim.calibrate(data, progress=False)
    return sim


def error(sim, model, data):
    with torch.no_grad():
        return sum(float((sim(x) - model(x)).square().sum()) for x in data)
