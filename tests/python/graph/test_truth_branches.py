"""torch's branches and loops by values: what their functions compute is the forward's, as if it were written in Python."""

import pytest
import torch
from models import Forward
from torch import nn
from torch._higher_order_ops import map as mapped
from torch._higher_order_ops import scan, while_loop

import qsim

ROWS = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
EXAMPLES = [ROWS.abs(), -ROWS.abs()]


def positive(m, x):
    return m.a(x).relu() * 2


def negative(m, x):
    return m.b(x).tanh() - 1


def step(m, hidden, x):
    return torch.tanh(m.a(hidden) + x)


def branch(m, x):
    return m.c(torch.cond(x.sum() > 0, lambda x: positive(m, x), lambda x: negative(m, x), (x,)))


def branch_written(m, x):
    return m.c(positive(m, x) if x.sum() > 0 else negative(m, x))


def chain(m, x):  # the rectifier behind either layer has their quantizer
    return m.c(torch.cond(x.sum() > 0, lambda x: m.a(x), lambda x: m.b(x), (x,)).relu())


def chain_written(m, x):
    return m.c((m.a(x) if x.sum() > 0 else m.b(x)).relu())


def carried(m, x):
    hidden, out = scan(lambda hidden, x: (new := step(m, hidden, x), new * 2), torch.zeros(8), m.b(x), reverse=True)
    return m.c(out) + hidden


def carried_written(m, x):
    hidden, out = torch.zeros(8), []
    for row in m.b(x).flip(0):
        hidden = step(m, hidden, row)
        out.append(hidden * 2)
    return m.c(torch.stack(out).flip(0)) + hidden


def every_row(m, x):
    return m.c(mapped(lambda row, other: {"y": step(m, row, other)}, x, m.b(x)[0] * 2)["y"])


def every_row_written(m, x):
    other = m.b(x)[0] * 2
    return m.c(torch.stack([step(m, row, other) for row in x]))


def as_long_as(m, x):
    return m.c(while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, step(m, x, x)), (torch.tensor(0), m.b(x)))[1])


def as_long_as_written(m, x):
    x = m.b(x)
    for _ in range(3):
        x = step(m, x, x)
    return m.c(x)


PAIRS = [(branch, branch_written), (chain, chain_written), (carried, carried_written), (every_row, every_row_written)]
LOOP = (as_long_as, as_long_as_written)


def simulated(forward, config):
    torch.manual_seed(0)
    layers = {name: nn.Linear(8, 8) for name in "abc"}
    sim = qsim.QuantSim(Forward(forward, **layers).eval(), EXAMPLES, config)
    sim.calibrate(EXAMPLES, progress=False)
    return sim


def outcomes(sim, compiled=None):
    """Results and gradients for every example; a branch that was not taken has gradients of zero, or none."""
    found = []
    for x in EXAMPLES:
        sim.zero_grad()
        out = sim(x) if compiled is None else compiled(x)
        out.pow(2).mean().backward()
        found.append([out, *(torch.zeros(()) if p.grad is None else p.grad.clone() for p in sim.model.parameters())])
    return found


def assert_same(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b.expand_as(a) if a.numel() > 1 else b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("config", [qsim.int4(), qsim.fp16()], ids=["int4", "fp16"])
@pytest.mark.parametrize(("forward", "written"), [*PAIRS, LOOP], ids=lambda f: f.__name__)
def test_computes_what_is_written_in_python(forward, written, config):
    sim, by_hand = simulated(forward, config), simulated(written, config)
    assert sorted(q.encoding.scale.sum().item() for q in sim.quantizers().values() if q.encoding) == pytest.approx(
        sorted(q.encoding.scale.sum().item() for q in by_hand.quantizers().values() if q.encoding)
    )
    assert_same(outcomes(sim), outcomes(by_hand))
    sim.train()
    by_hand.train()
    assert_same(outcomes(sim), outcomes(by_hand))


@pytest.mark.parametrize("forward", [pair[0] for pair in PAIRS], ids=lambda f: f.__name__)
def test_compiled_as_eager(forward):
    sim = simulated(forward, qsim.int4())
    expected = outcomes(sim)
    torch._dynamo.reset()
    compiled = torch.compile(sim, backend="eager", fullgraph=True)
    assert_same(outcomes(sim, compiled), expected)


def test_a_compiled_loop_of_unknown_length_is_refused():
    sim = simulated(as_long_as, qsim.int4())
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"steps of while_loop .*without torch.compile"), torch.no_grad():
        torch.compile(sim, backend="eager")(ROWS)


def test_a_branch_in_a_loop_is_told_where_compiled_code_cannot_count_its_calls():
    def forward(m, x):
        for i in range(2):
            x = torch.cond(x.sum() + i > 0, lambda x: positive(m, x), lambda x: negative(m, x), (x,))
        return m.c(x)

    sim = simulated(forward, qsim.int4())
    torch._dynamo.reset()
    with pytest.warns(UserWarning, match=r"'a' .*ran more often than the example inputs show"), torch.no_grad():
        torch.compile(sim, backend="eager")(ROWS)


class CellBehindABranch(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.cell = nn.Linear(8, 8), nn.Linear(8, 8), nn.LSTMCell(8, 8)

    def forward(self, x):
        x = torch.cond(x.mean() > -100.0, lambda t: self.a(t).relu(), lambda t: self.b(t).tanh(), (x,))
        return self.cell(x)[0]


def test_a_recurrent_cell_behind_a_branch_has_its_quantizers_compiled_too():
    x = torch.randn(16, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    sim = qsim.QuantSim(CellBehindABranch().double().eval(), x, qsim.int8())
    sim.calibrate([x], progress=False)
    torch._dynamo.reset()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(sim, backend="eager")(x), sim(x), rtol=0, atol=1e-9)
