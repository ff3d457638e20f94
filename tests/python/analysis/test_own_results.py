"""Models that return what they keep, and write there when they run again: every figure is that of the model that returns new tensors."""

import pytest
import torch
from torch import nn

import qsim

ROWS = torch.linspace(-2, 2, 64 * 8).reshape(64, 8).sin()
BATCHES = [*ROWS.split(8)]


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


class OwnBuffer(Network):
    def __init__(self):
        super().__init__()
        self.register_buffer("out", torch.zeros(8, 4))

    def forward(self, x):
        return self.out.copy_(super().forward(x))


class OwnTensor(Network):
    def __init__(self):
        super().__init__()
        self.out = torch.zeros(8, 4)

    def forward(self, x):
        return self.out.copy_(super().forward(x))


class OwnDict(Network):
    def __init__(self):
        super().__init__()
        self.out = {}

    def forward(self, x):
        self.out["y"] = super().forward(x)
        return self.out


def made(kind):
    torch.manual_seed(0)
    return kind().eval()


def simulated(kind):
    weight, activation = qsim.TensorSpec(bits=4, symmetric=True, axis=0), qsim.TensorSpec(bits=6)
    sim = qsim.QuantSim(made(kind), BATCHES[0], qsim.Config(weight=weight, activation=activation))
    sim.calibrate(BATCHES, progress=False)
    return sim


def compared(sim):
    return sim.compare(BATCHES[0]).output.sqnr


def sensitivity(sim):
    found = sim.sensitivity(BATCHES, progress=False)
    return [found.baseline, found.quantized, *(score.value for score in found.scores)]


def planned(sim):
    return sim.float_plan(BATCHES, target=25.0, progress=False).keep


def restored(sim):
    report = sim.restore(BATCHES, progress=False)
    return [report.before, report.after, report.kept]


def distilled(sim):
    report = sim.distill(BATCHES, 8, loss=lambda got, wanted: (_first(got) - _first(wanted)).square().mean(), progress=False)
    return list(report.levels.values())


def searched(sim):
    found = sim.search_bits(BATCHES, budget=qsim.Budget(tensors=0.4), candidates=(3, 8, "float"), probes=20, progress=False)
    return [point.measured for point in found.front]


def _first(results):
    return results["y"] if isinstance(results, dict) else results


FIGURES = [compared, sensitivity, planned, restored, searched]
CASES = [(kind, figures) for kind in (OwnBuffer, OwnTensor, OwnDict) for figures in FIGURES]
CASES += [(OwnBuffer, distilled), (OwnDict, distilled)]  # torch itself goes back through `OwnTensor` once alone


@pytest.mark.parametrize(("kind", "figures"), CASES)
def test_its_figures_are_those_of_the_model_that_returns_new_tensors(kind, figures):
    expected = figures(simulated(Network))
    assert figures(simulated(kind)) == expected
    assert expected != [float("inf")] * 2
