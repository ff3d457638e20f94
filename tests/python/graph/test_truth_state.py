"""State that changes is an activation: observed as it changes, and every call of a container is seen."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from by_hand import EXACT, decibels, on_grid, simulated
from models import Forward
from torch import nn

import qsim

STEPS = 6


class Remembering(nn.Module):
    """A recurrent cell whose state is a buffer, zero at first."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.i, self.u, self.out, self.how = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4), how
        self.register_buffer("h", torch.zeros(4, 8))

    def forward(self, x):
        h = torch.tanh(self.i(x) + self.u(self.h))
        if self.how == "copy_":
            self.h.copy_(h.detach())
        elif self.how == "assigned":
            self.h = h.detach()
        elif self.how == "index":
            self.h[:] = h.detach()
        else:
            self.h.mul_(0.5).add_(h.detach(), alpha=0.5)
        return self.out(h)


def sequence(model: nn.Module, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Results step by step, from a state of zero."""
    owner = model.model if isinstance(model, qsim.QuantSim) else model
    with torch.no_grad():
        owner.h = torch.zeros(4, 8, dtype=inputs[0].dtype)
        return [model(x).clone() for x in inputs]


@pytest.mark.parametrize("how", ["copy_", "assigned", "index", "average"])
def test_a_buffer_that_the_forward_writes(how):
    """The range of its zeros is no range."""
    model, inputs = Remembering(how).eval(), [torch.randn(4, 8) for _ in range(STEPS)]
    sim = qsim.QuantSim(model, inputs[0], qsim.int16())
    sim.calibrate(inputs, progress=False)
    for found, expected in zip(sequence(sim, inputs), sequence(model, inputs), strict=True):
        assert decibels(found, expected) > 60


def test_a_cache_that_grows_by_index():
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)
            self.register_buffer("keys", torch.zeros(2, 8, 8))
            self.at = 0

        def forward(self, x):
            q, k = self.q(x), self.k(x)
            self.keys[:, self.at % 8] = k[:, 0].detach()
            self.at += 1
            return F.softmax(q @ self.keys.mT, -1) @ self.keys

    model, inputs = Cached().eval(), [torch.randn(2, 1, 8) for _ in range(STEPS)]
    sim = qsim.QuantSim(model, inputs[0], qsim.int16())
    sim.calibrate(inputs, progress=False)
    model.at, sim.model.at = 0, 0
    with torch.no_grad():
        for x in inputs:
            assert decibels(sim(x), model(x)) > 60


def test_what_is_written_in_training_alone_is_an_activation_too():
    class Centers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a = nn.Linear(8, 8)
            self.register_buffer("center", torch.zeros(8))

        def forward(self, x):
            y = self.a(x)
            if self.training:
                self.center.lerp_(y.detach().mean(0), 0.5)
            return F.linear(y, torch.eye(8)) - self.center * 3.0

    model, x = Centers().eval(), torch.randn(64, 8) + 2
    sim = qsim.QuantSim(model, x, qsim.int16())
    sim.train()
    with torch.no_grad(), sim.in_float() if hasattr(sim, "in_float") else sim.float():
        sim(x)
    sim.eval()
    sim.calibrate([x], progress=False)
    model.center.copy_(sim.model.center)
    assert model.center.abs().max() > 0.1
    with torch.no_grad():
        assert decibels(sim(x), model(x)) > 60


@pytest.mark.parametrize("factors", [(332.0, 1.0, 0.5), (1.0, 332.0, 0.5), (0.5, 1.0, 332.0)])
def test_a_running_range_spans_all_calls_of_a_batch(factors):
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Forward(lambda m, x: torch.relu(m.a(x)) + 0.0, a=nn.Linear(4, 4))
            nn.init.eye_(self.block.a.weight)
            nn.init.zeros_(self.block.a.bias)

        def forward(self, x):
            return sum(self.block(x * factor) for factor in factors)

    x = torch.rand(64, 4) + 0.1
    config = dataclasses.replace(qsim.int8(), activation=qsim.TensorSpec(method="ema"))
    model = Twice().eval()
    sim = qsim.QuantSim(model, x, config)
    sim.calibrate([x, x, x], progress=False)
    with torch.no_grad():
        assert decibels(sim(x), model(x)) > 35
        sim.train()
        assert decibels(sim(x), model(x)) > 35


def test_sequences_do_not_depend_on_how_often_they_ran():
    model, inputs = Remembering("copy_").eval().double(), [torch.randn(4, 8, dtype=torch.float64) for _ in range(STEPS)]
    sim = qsim.QuantSim(model, inputs[0], EXACT)
    sim.calibrate(inputs, progress=False)
    first, second = sequence(sim, inputs), sequence(sim, inputs)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    sim.savings = False
    assert all(torch.equal(a, b) for a, b in zip(first, sequence(sim, inputs), strict=True))


def test_a_learned_scale_at_what_is_written_to_afterwards():
    """Its gradient is that of the values that were quantized; the float model needs none of them in its backward pass."""
    model = Forward(lambda m, x: (x + m.state, m.state.copy_(x.detach()[0]))[0])
    model.register_buffer("state", torch.zeros(8))
    config = dataclasses.replace(qsim.int8(), activation=qsim.TensorSpec(learnable=True))
    sim = qsim.QuantSim(model, torch.randn(4, 8), config)
    sim.calibrate([torch.randn(4, 8)], progress=False)
    x = torch.randn(4, 8)
    held = sim.model.state.clone()
    sim(x).sum().backward()
    found = sim.quantizers()["add.input[1]"].scale.grad.clone()
    sim.model.state.copy_(held)
    again = sim(x)
    sim.zero_grad()
    x.zero_()  # an input that the caller fills anew
    again.sum().backward()
    assert torch.equal(sim.quantizers()["add.input[1]"].scale.grad, found)


@pytest.mark.parametrize(
    "begin",
    [lambda x: x.add_(0.3), lambda x: F.max_pool1d(x, 3, 1, 1).add_(0.3), lambda x: torch.full((32, 8), 0.3, dtype=x.dtype).sub_(x)],
    ids=["argument", "part", "numbers"],
)
def test_changed_in_place_again_where_nobody_else_looks(begin):
    """What the model's caller gave is a quantized copy by then: both results are quantized."""
    x = torch.linspace(-2, 2, 256, dtype=torch.float64).view(32, 8).sin()
    sim = simulated(Forward(lambda m, x: begin(x).tanh_()).eval(), x.clone())
    y = on_grid(begin(on_grid(x)), begin(x.clone()))
    torch.testing.assert_close(sim(x.clone()), on_grid(y.tanh(), begin(x.clone()).tanh()), rtol=0, atol=1e-9)


def test_changed_in_place_and_a_copy_of_it_again():
    """What is written into the copy, and read there by its older name, is nothing of what was copied."""

    def forward(m, x):
        y = F.max_pool1d(x.tanh_(), 3, 1, 1)
        y.add_(0.3)
        return y.sin()

    x = torch.linspace(-2, 2, 256, dtype=torch.float64).view(32, 8).sin()
    sim = simulated(Forward(forward).eval(), x.clone())
    y = x.tanh()
    copied = F.max_pool1d(on_grid(on_grid(x).tanh(), y), 3, 1, 1)
    added = F.max_pool1d(y, 3, 1, 1) + 0.3
    torch.testing.assert_close(sim(x.clone()), on_grid(on_grid(copied + 0.3, added).sin(), added.sin()), rtol=0, atol=1e-9)


def test_changed_in_place_again_by_what_no_mode_meets():
    """That returns no name of its own: who reads it reads no older one."""
    x = torch.linspace(-2, 2, 256, dtype=torch.float64).view(32, 8).sin()
    sim = simulated(Forward(lambda m, x: F.hardswish(x.tanh_(), inplace=True).sin()).eval(), x.clone())
    y = x.tanh()
    found = on_grid(F.hardswish(on_grid(on_grid(x).tanh(), y)), F.hardswish(y))
    torch.testing.assert_close(sim(x.clone()), on_grid(found.sin(), F.hardswish(y).sin()), rtol=0, atol=1e-9)


@pytest.mark.parametrize("reads", [True, False])
def test_what_a_later_call_reads_is_no_metric(reads):
    """A state that nothing reads is for those who look at the model."""

    def forward(m, x):
        y = m.a(x) + m.h if reads else m.a(x)
        m.h.copy_(F.relu(y).detach())
        return y.sin()

    model = Forward(forward, a=nn.Linear(8, 8))
    model.register_buffer("h", torch.zeros(4, 8))
    sim = qsim.QuantSim(model, torch.randn(4, 8))
    assert ("relu.output" in sim.quantizers()) == reads
    assert [entry.name for entry in sim.decisions.left] == ([] if reads else ["relu"])
