"""Models that return what they keep, have a state, or draw random numbers: a figure is what quantization does, and nothing else that is
another in the next run."""

import copy
import math

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
def test_figures_are_those_of_the_model_that_returns_new_tensors(kind, figures):
    expected = figures(simulated(Network))
    assert figures(simulated(kind)) == expected
    assert expected != [float("inf")] * 2


class Counting(Network):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * (1 + self.calls % 3)


class Remembering(Network):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(16))

    def forward(self, x):
        h = torch.relu(self.a(x))
        self.seen.mul_(0.5).add_(h.mean(0))
        return self.b(h + self.seen)


class Replacing(Remembering):
    """As an attribute, which each call replaces."""

    def forward(self, x):
        h = torch.relu(self.a(x))
        self.seen = 0.5 * self.seen + h.detach().mean(0)
        return self.b(h + self.seen)


class Noisy(Network):
    def forward(self, x):
        return self.b(torch.relu(self.a(x)) + torch.randn(16))


@pytest.mark.parametrize("kind", [Counting, Remembering, Replacing, Noisy])
def test_sixteen_bits_are_all_but_float(kind):
    spec = qsim.TensorSpec(bits=16, symmetric=True)
    sim = qsim.QuantSim(made(kind), BATCHES[0], qsim.Config(weight=spec, activation=spec))
    sim.calibrate(BATCHES, progress=False)
    before = {name: t.clone() for name, t in sim.state_dict().items()}
    assert sim.compare(BATCHES[0]).output.sqnr > 60
    found = sim.sensitivity(BATCHES, progress=False)
    assert (found.baseline, found.quantized > 60) == (float("inf"), True)
    assert sim.progressive(BATCHES, progress=False).steps[-1].value == found.quantized
    assert sim.float_plan(BATCHES, target=60.0, progress=False).keep == ()
    assert sim.search_bits(BATCHES, budget=qsim.Budget(tensors=1.0), candidates=(15, 16), probes=5, progress=False).best.measured < 1e-6
    assert qsim.doctor(made(kind), BATCHES, target="tensorrt-fp16", progress=False).sqnr > 40
    for name, t in sim.state_dict().items():
        assert torch.equal(t, before[name]), name
    assert copy.deepcopy(sim).distill(BATCHES, 8, progress=False).levels[0] > 60
    assert sim.restore(BATCHES, progress=False).before > 60


class Writing(Network):
    """Changes what it is given."""

    def forward(self, x):
        return super().forward(x.mul_(0.5).add_(1.0))


class Cache:
    """What a model puts into an object of its caller's."""

    def __init__(self):
        self.rows = torch.zeros(0, 16)


class Caching(Network):
    def forward(self, x, cache):
        cache.rows = torch.cat([cache.rows, torch.relu(self.a(x))])
        return self.b(cache.rows[-len(x) :] + cache.rows.sum(0))


def given_to(kind):
    return [(x.clone(), Cache()) for x in BATCHES] if kind is Caching else [x.clone() for x in BATCHES]


def calls_of(kind):
    yield "restore", lambda sim, data: sim.restore(data, progress=False).before
    yield "its forward", lambda sim, data: sim.restore(data, forward=_forward, progress=False).before
    yield "distill", lambda sim, data: sim.distill(data, 8, progress=False).levels[0]
    yield "sensitivity", lambda sim, data: sim.sensitivity(data, progress=False).quantized
    yield "sensitivity with a forward", lambda sim, data: sim.sensitivity(data, forward=_forward, progress=False).quantized
    if kind is Writing:
        yield "search_bits with a forward", lambda sim, data: -10 * math.log10(_searched(sim, data))
    yield "compare", lambda sim, data: sim.compare(data[0]).output.sqnr
    yield "doctor", lambda sim, data: qsim.doctor(made(kind), data, target="tensorrt-fp16", progress=False).sqnr + 20


def _searched(sim, data):
    budget = qsim.Budget(tensors=1.0)
    return sim.search_bits(data, budget=budget, candidates=(15, 16), forward=_forward, probes=5, progress=False).best.measured


def _forward(model, batch):
    return model(*batch) if isinstance(batch, tuple) else model(batch)


@pytest.mark.parametrize(("kind", "call"), [(kind, call) for kind in (Writing, Caching) for call, _ in calls_of(kind)])
def test_each_run_has_its_own_arguments(kind, call):
    """And the caller's are as they were."""
    spec, data, expected = qsim.TensorSpec(bits=16, symmetric=True), given_to(kind), given_to(kind)
    sim = qsim.QuantSim(made(kind), data[0], qsim.Config(weight=spec, activation=spec))
    sim.calibrate(data, progress=False)
    assert dict(calls_of(kind))[call](sim, data) > 60
    for batch, before in zip(data, expected, strict=True):
        x, given = (batch, before) if kind is Writing else (batch[0], before[0])
        assert torch.equal(x, given)
        assert kind is Writing or len(batch[1].rows) == 0
