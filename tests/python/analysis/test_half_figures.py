"""In half precision numbers among the arguments are rounded too, and figures in float are without that."""

import pytest
import torch
from torch import nn

import qsim

X = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
BATCHES = [*X.split(8)]


class Scaled(nn.Module):
    """By a number that float16 holds badly: 3e-8 becomes 5.96e-8."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.b(self.a(x) * 1000 * 3e-8 * 1000)


class Masked(nn.Module):
    """With a number that only moves in, and is an infinity there."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.b(self.a(x).masked_fill(x > 1.5, 1e6).clamp(-1, 1))


def simulated(kind, config):
    torch.manual_seed(0)
    sim = qsim.QuantSim(kind().eval(), X, config)
    sim.calibrate(BATCHES, progress=False)
    return sim


def sqnr(found, expected):
    return float(10 * torch.log10(expected.double().square().sum() / (found.double() - expected.double()).square().sum()))


HALVES = {
    "fp16": lambda: simulated(Scaled, qsim.fp16()),
    "one operation": lambda: simulated(Scaled, qsim.int8().override("mul_2", dtype="fp16")),
    "a fallback": lambda: _fallen(simulated(Scaled, qsim.int16())),
}


def _fallen(sim):
    sim.fallback(["mul_2"], to="fp16")
    return sim


@pytest.mark.parametrize("name", HALVES)
def test_figures_have_the_error_of_numbers(name):
    sim = HALVES[name]()
    with sim.in_float():
        expected = sim(X)
    level = sqnr(sim(X), expected)
    assert level < 40
    assert sim.compare(X).output.sqnr == pytest.approx(level)
    found = sim.sensitivity([X], groups="operation", progress=False)
    assert (found.baseline, found.quantized) == (float("inf"), pytest.approx(level))
    steps = sim.progressive([X], progress=False)
    assert (steps.baseline, steps.steps[-1].value) == (float("inf"), pytest.approx(level))


def test_the_operation_that_rounds_its_number_is_named():
    sim = HALVES["fp16"]()
    assert sim.sensitivity([X], groups="operation", progress=False).worst(1) == ["mul_2"]
    assert sim.float_plan([X], target=60.0, progress=False).keep == ("mul_2",)
    first = next(row for row in sim.compare(X).rows if row.accumulated.sqnr < 30)
    assert first.key == "mul_2.output"


@pytest.mark.parametrize("kind", [Scaled, Masked])
@pytest.mark.parametrize("compiled", [False, True])
def test_without_quantizers_it_is_float(kind, compiled):
    sim = simulated(kind, qsim.fp16())
    torch._dynamo.reset()
    called = torch.compile(sim, backend="aot_eager", fullgraph=True) if compiled else sim
    simulation = called(X)
    with sim.in_float():
        expected = sim(X)
    assert not torch.equal(simulation, expected)
    for quantizer in sim.quantizers().values():
        quantizer.enabled = False
    assert torch.equal(called(X), expected)
    for quantizer in sim.quantizers().values():
        quantizer.enabled = True
    assert torch.equal(called(X), simulation)
