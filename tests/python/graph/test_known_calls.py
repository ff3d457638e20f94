"""`qsim._C.KnownCalls`: the calls of a container that are followed without Python are those that Python would follow so."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from models import Forward
from torch import nn

import qsim
from qsim.graph.execute.mode import LocalMode

CONFIGS = {"dynamic": qsim.w8a8_dynamic, "int8": qsim.int8, "fp16": qsim.fp16}


def norm(x):
    y = x.pow(2).mean(-1, keepdim=True)
    return x * torch.rsqrt(y + 1e-6)


def layers(m, x, later=False, wide=False):
    x = norm(m.a(x)) + 0.5
    for _ in range(3):
        x = norm(x).view(2, -1).reshape(2, 4, 8).transpose(1, 2).mT
    if wide:
        x = m.c(x)
    x = torch.cat([F.relu(x), -x], -1)
    x = m.b(x)
    return x * torch.arange(4)[:, None].add(1) if later else x


def network() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = Forward(layers, a=nn.Linear(8, 8), b=nn.Linear(16, 8), c=nn.Linear(8, 8)).eval()
    return model, torch.randn(2, 4, 8)


def simulated(config) -> tuple[qsim.QuantSim, torch.Tensor]:
    model, x = network()
    sim = qsim.QuantSim(model, x, CONFIGS[config]())
    sim.calibrate([x], progress=False)
    return sim.eval(), x


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("options", [{}, {"later": True}, {"wide": True}])
@pytest.mark.parametrize("config", CONFIGS)
def test_results_are_those_without_it(config, options, monkeypatch):
    sim, x = simulated(config)
    with torch.no_grad():
        found = [sim(x, **options) for _ in range(4)]
        sim.savings = False
        expected = sim(x, **options)
    assert all(torch.equal(y, expected) for y in found)
    asked = []
    plain = LocalMode.node
    monkeypatch.setattr(LocalMode, "node", lambda self, key, *rest: (asked.append(key), plain(self, key, *rest))[1])
    with torch.no_grad():
        sim(x, **options)
        by_python = len(asked)
        sim.savings = True
        asked.clear()
        sim(x, **options)
    assert len(asked) < by_python / 4


def test_paths_that_no_example_took_are_told():
    sim, x = simulated("int8")
    with torch.no_grad():
        sim(x), sim(x)
        with pytest.warns(UserWarning, match="did not show"):
            sim(x, wide=True)


def test_training_and_copies():
    sim, x = simulated("int8")
    with torch.no_grad():
        expected = sim(x)
        for other in (copy.deepcopy(sim), pickle.loads(pickle.dumps(sim))):
            assert all(torch.equal(other(x), expected) for _ in range(3))
    gradients = []
    for savings in (True, False):
        sim.train().savings = savings
        for _ in range(3):
            sim.zero_grad()
            sim(x).square().sum().backward()
        gradients.append([p.grad.clone() for p in sim.parameters() if p.grad is not None])
    assert all(map(torch.equal, *gradients))


def test_errors_of_functions_leave_nothing_behind():
    def forward(m, x, wrong=False):
        x = m.a(x)
        return (x + "a") if wrong else x.view(3, -1) if len(x) == 3 else x + 1

    torch.manual_seed(0)
    x = torch.randn(2, 8)
    sim = qsim.QuantSim(Forward(forward, a=nn.Linear(8, 8)).eval(), x, qsim.int8())
    sim.calibrate([x], progress=False)
    with torch.no_grad():
        expected = sim(x)
        for _ in range(3):
            with pytest.raises(TypeError, match="unsupported operand"):
                sim(x, wrong=True)
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                sim(torch.randn(3, 7))
            assert torch.equal(sim(x), expected)


def test_integers_where_the_examples_had_numbers():
    def forward(m, x, i):
        i = i * 2
        return m.a(x) * i.float()

    x, whole = torch.randn(2, 8), torch.tensor([[1], [2]])
    sim = qsim.QuantSim(Forward(forward, a=nn.Linear(8, 8)).eval(), (x, whole.float()), qsim.int8())
    sim.calibrate([(x, whole.float())], progress=False)
    results = []
    with torch.no_grad():
        for savings in (True, False):
            sim.savings = savings
            results += [sim(x, given) for given in (whole.float(), whole, whole.float(), whole)]
    assert all(map(torch.equal, results[:4], results[4:]))
