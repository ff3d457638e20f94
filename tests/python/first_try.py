"""What a person tries first: a small network, a batch of images, a calibrated simulation."""

import torch
from torch import nn

import qsim

IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)).eval()


def calibrated(config=None, model=None):
    sim = qsim.QuantSim(network() if model is None else model, IMAGES, config)
    sim.calibrate([IMAGES], progress=False)
    return sim
