"""A model with each way of recomputing, and its gradients."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

X = torch.linspace(-2, 2, 256, dtype=torch.float64).view(32, 8).sin()


def plainly(function, *args, use_reentrant):
    return function(*args)


class Adding(nn.Module):
    def forward(self, x):
        return x + 0.3


class Clamping(nn.Module):
    def forward(self, x):
        return F.relu(x) * 1.5


class Recomputed(nn.Module):
    """Each way of recomputing once; `how` is `checkpoint`, or `plainly` in its place."""

    def __init__(self, way: str, reentrant: bool, how=checkpoint) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh())
        self.adding, self.clamping, self.clamp = Adding(), Clamping(), nn.Hardtanh()
        self.way, self.reentrant, self.how = way, reentrant, how

    def method(self, x):
        return torch.sigmoid(self.b(F.relu(x * 2.0))) * x

    def forward(self, x):
        y = F.relu(self.a(x))
        how, options = self.how, {"use_reentrant": self.reentrant}
        if self.way == "leaf":
            y = how(self.b, y, **options)
        elif self.way == "forward of a leaf":
            y = how(self.b.forward, y, **options)
        elif self.way == "method":
            y = how(self.method, y, **options)
        elif self.way == "lambda":
            y = how(lambda t: F.relu(self.b(t)) + t, y, **options)
        elif self.way == "container":
            y = how(self.block, y, **options)
        elif self.way == "function":
            y = how(F.hardtanh, self.b(y), **options)
        elif self.way == "twice":
            y = how(self.b, how(self.b, y, **options), **options)
        elif self.way == "nested":
            y = how(lambda t: torch.tanh(self.b(how(self.b, t, **options))), y, **options)
        elif self.way == "chain":  # that begins in another container, before the checkpoint
            y = how(self.clamp, self.adding(self.b(y)), **options)
        elif self.way == "chain into":
            y = how(self.clamping, self.adding(self.b(y)), **options)
        elif self.way == "segments":
            y = self.block(y) if how is plainly else checkpoint_sequential(self.block, 2, y, **options)
        return self.c(y + 0.5)


WAYS = ["leaf", "forward of a leaf", "method", "lambda", "container", "function", "twice", "nested", "segments", "chain", "chain into"]


def gradients(sim, x, training):
    sim.train(training)
    sim.zero_grad()
    x = x.clone().requires_grad_()
    y = sim(x)
    y.square().sum().backward()
    return y.detach(), [x.grad, *(p.grad for p in sim.model.parameters())]
