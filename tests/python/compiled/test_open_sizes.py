"""Sizes that Dynamo holds open, so that one graph serves batches of several lengths: what is computed from them is as in eager mode."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qsim
from qsim.operations.half import nearest


class Model(nn.Module):
    def __init__(self, step) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.step = nn.Linear(6, 8), nn.Linear(8, 4), step

    def forward(self, x):
        return self.b(F.relu(self.step(self.a(x), x.size(1))))


def waves(length: int) -> torch.Tensor:
    return torch.sin(torch.arange(length).float()[:, None] * torch.arange(8).float()[None] * 0.1)


CONSTANTS = {
    "sinusoids": lambda h, n: h + waves(n),
    "ramp": lambda h, n: h * torch.linspace(0.1, 1, n)[:, None],
    "mask": lambda h, n: torch.tril(torch.ones(n, n)) / n @ h,
    "part": lambda h, n: h + waves(32)[:n],
}
FACTORS = {
    "quotient": lambda h, n: h / n,
    "power": lambda h, n: h * n**-0.5,
    "root": lambda h, n: h / math.sqrt(n),
    "large": lambda h, n: h * (n + 3000),
}


def graphs_of(run: nn.Module) -> int:
    """How many graphs several lengths need; each call is as in eager mode."""
    torch._dynamo.reset()
    graphs = []
    compiled = torch.compile(run, backend=lambda graph, _: graphs.append(graph) or graph, fullgraph=True)
    with torch.no_grad():
        for length in (4, 7, 9, 21):
            x = torch.randn(2, length, 6)
            assert torch.equal(compiled(x), run(x))
    return len(graphs)


def assert_compiled_as_eager(sim: qsim.QuantSim, recwarn: pytest.WarningsRecorder, more: int = 0) -> None:
    with sim.in_float():
        theirs = graphs_of(sim.model)
    assert graphs_of(sim) <= theirs + more
    assert not [str(w.message) for w in recwarn if "example inputs" in str(w.message)]


@pytest.mark.parametrize("step", CONSTANTS.values(), ids=CONSTANTS)
def test_constants_are_quantized(step, recwarn):
    xs = [torch.randn(2, length, 6) for length in (4, 24)]
    sim = qsim.QuantSim(Model(step).eval(), xs, qsim.int8())
    sim.calibrate(xs, progress=False)
    assert_compiled_as_eager(sim, recwarn)


@pytest.mark.parametrize("config", [qsim.fp16(), qsim.bf16()], ids=["fp16", "bf16"])
@pytest.mark.parametrize("step", FACTORS.values(), ids=FACTORS)
def test_factors_are_rounded_to_half_formats(step, config, recwarn):
    assert_compiled_as_eager(qsim.QuantSim(Model(step).eval(), torch.randn(2, 4, 6), config), recwarn, more=2)


@pytest.mark.parametrize(("format", "dtype"), [("float16", torch.float16), ("bfloat16", torch.bfloat16)])
def test_numbers_are_rounded_as_torch_rounds_them(format, dtype):
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).double()
    numbers = every[every.isfinite()].unique()
    between = (numbers[1:] + numbers[:-1]) / 2  # ties, which torch rounds to even from float32, where they are exact
    wanted = between.float().to(dtype).double()
    some = torch.randperm(len(between))[:4000].tolist()
    assert all(nearest(between[i].item(), format) == wanted[i].item() for i in some)
    assert all(nearest(numbers[i].item(), format) == numbers[i].item() for i in some)
    largest = numbers[-1].item()
    beyond = largest + (largest - numbers[-2].item()) / 2
    assert [nearest(v, format) for v in (beyond, -beyond, math.nextafter(beyond, 0))] == [math.inf, -math.inf, largest]
    assert math.isnan(nearest(math.nan, format))
    assert math.copysign(1, nearest(-0.0, format)) == -1
