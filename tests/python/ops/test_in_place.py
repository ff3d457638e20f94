"""Programs that write into tensors under several names: what the simulation computes is what the model computes, to 16 bits."""

import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import qsim

STATEMENTS = {  # from two variables to a new one, or None
    "linear": lambda m, u, w: m.b(u),
    "sum": lambda m, u, w: u + w,
    "relu": lambda m, u, w: F.relu(u),
    "copy": lambda m, u, w: u.clone(),
    "same": lambda m, u, w: u,
    "view": lambda m, u, w: u.view(-1, 8),
    "swap": lambda m, u, w: torch.cat(u.chunk(2, -1)[::-1], -1),
    "scale in place": lambda m, u, w: u.mul_(0.7),
    "shift in place": lambda m, u, w: [u.add_(0.3), None][1],
    "add in place": lambda m, u, w: [u.add_(w.clone()), None][1],
    "relu in place": lambda m, u, w: F.relu(u, inplace=True),
    "tanh in place": lambda m, u, w: [u.tanh_(), None][1],
    "half in place": lambda m, u, w: [u[:, :4].mul_(0.5), None][1],
    "set column": lambda m, u, w: [u.__setitem__((slice(None), 2), 0.25), None][1],
    "increment": lambda m, u, w: u.__iadd__(0.2),
}
STEPS = st.tuples(st.sampled_from(sorted(STATEMENTS)), st.integers(0, 5), st.integers(0, 5))


class Program(nn.Module):
    def __init__(self, steps) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.steps, self.a, self.b, self.c = steps, nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        variables = [self.a(x)]
        for name, i, j in self.steps:
            made = STATEMENTS[name](self, variables[i % len(variables)], variables[j % len(variables)])
            variables += [] if made is None else [made]
        return self.c(sum(variables[1:], variables[0])), variables[-1]


@given(st.lists(STEPS, min_size=1, max_size=5))
@settings(max_examples=40)
@example([("scale in place", 0, 0), ("shift in place", 1, 0)])  # through the result, read by the older name
@example([("relu in place", 0, 0), ("add in place", 0, 1), ("swap", 0, 0)])  # through the older name, read by the result
@example([("increment", 0, 0), ("set column", 1, 0)])
@example([("view", 0, 0), ("linear", 1, 0), ("shift in place", 1, 0)])  # read before and after
def test_nothing_written_is_lost(steps):
    model, x = Program(steps).eval(), torch.linspace(-2, 2, 256).view(32, 8).sin()
    with torch.no_grad():
        expected = model(x)
        sim = qsim.QuantSim(model, x, qsim.int16())
        sim.calibrate([x], progress=False)
        for saves in (True, False):
            sim.savings = saves
            for y, z in zip(sim(x), expected, strict=True):
                assert (y - z).abs().max() < 5e-3


class Residual(Program):
    def forward(self, x):
        y = F.relu(self.a(x), inplace=True)
        y += x
        return self.c(y)


def test_a_result_that_no_older_name_reads_is_quantized_though_it_is_written_to():
    sim = qsim.QuantSim(Residual([]).eval(), torch.randn(4, 8))
    assert list(sim.quantizers()) == ["input", "a.weight", "a.output", "add.output", "c.weight", "c.output", "b.weight"]  # b never runs
