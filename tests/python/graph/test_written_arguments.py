"""What a model writes into its arguments reaches its caller, and nobody else's data."""

import copy
import warnings
from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

import qsim

SIXTEEN = qsim.Config(weight=qsim.TensorSpec(bits=16, symmetric=True), activation=qsim.TensorSpec(bits=16))


class Writer(nn.Module):
    def __init__(self, write):
        super().__init__()
        self.layer, self.write = nn.Linear(4, 4), write

    def forward(self, x):
        return self.write(self, x)


def scaled(self, x):
    x.mul_(2)
    return self.layer(x)


def through_a_view(self, x):
    x.view(-1).mul_(2)
    return self.layer(x)


def past_its_version(self, x):
    x.data.mul_(2)
    return self.layer(x)


def out_of_a_function(self, x):
    torch.mul(x, 2, out=x)
    return self.layer(x)


def rectified(self, x):
    return self.layer(F.relu(x, inplace=True))


def in_part(self, x):
    x[:, 1] = 0.5
    return self.layer(x)


def with_the_result(self, x):
    y = self.layer(x)
    x.copy_(y)
    return y


def in_a_dict(self, x):
    y = self.layer(x["x"])
    x["x"].add_(y)
    return y


WRITES = [scaled, through_a_view, past_its_version, out_of_a_function, rectified, in_part, with_the_result, in_a_dict]


def ratio(got, wanted):
    return 10 * torch.log10(wanted.double().square().mean() / (got.double() - wanted.double()).square().mean().clamp_min(1e-30))


def unpacked(given):
    return given["x"] if isinstance(given, dict) else given


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("target", ["default", "onnxruntime", "tensorrt"])
@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_the_caller_gets_what_is_written(write, target, compiled):
    def given():
        return {"x": x.clone()} if write is in_a_dict else x.clone()

    model, x = Writer(write).eval(), torch.randn(5, 4)
    sim = qsim.QuantSim(model, (given(),), qsim.Config(weight=SIXTEEN.weight, activation=SIXTEEN.activation, target=target))
    batch = (given(),)
    sim.calibrate([batch], progress=False)
    torch.testing.assert_close(unpacked(batch[0]), x, rtol=0, atol=0)  # another pass over the data sees the same
    in_float, simulated = given(), given()
    with torch.no_grad():
        wanted = model(in_float)
        torch._dynamo.reset()
        got = (torch.compile(sim, backend="eager") if compiled else sim)(simulated)
    assert ratio(got, wanted) > 60
    assert ratio(unpacked(simulated), unpacked(in_float)) > 60


class Decoder(nn.Module):
    """Attention over keys and values that its caller holds."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x, keys, values, at):
        q, k, v = self.qkv(x).chunk(3, -1)
        keys[:, at], values[:, at] = k, v
        weights = torch.einsum("bd,bnd->bn", q, keys[:, : at + 1]).softmax(-1)
        return self.out(torch.einsum("bn,bnd->bd", weights, values[:, : at + 1]))


def decoded(model, tokens):
    keys, values = torch.zeros(2, len(tokens), 8), torch.zeros(2, len(tokens), 8)
    return torch.stack([model(token, keys, values, at) for at, token in enumerate(tokens)])


@pytest.mark.parametrize(("config", "least"), [(SIXTEEN, 60), (qsim.Config(), 30), (qsim.bf16(), 35)], ids=["int16", "int8", "bf16"])
def test_caches_that_the_caller_holds(config, least):
    model, tokens = Decoder().eval(), torch.randn(6, 2, 8)
    sim = qsim.QuantSim(model, (tokens[0], torch.zeros(2, 6, 8), torch.zeros(2, 6, 8), 3), config)
    sim.calibrate([tokens], forward=decoded, progress=False)
    with torch.no_grad():
        got, wanted = decoded(sim, tokens), decoded(model, tokens)
    assert all(ratio(*step) > least for step in zip(got, wanted, strict=True))


def test_a_comparison_runs_both_on_the_same_data():
    x = torch.randn(8, 4)
    sim = qsim.QuantSim(Writer(scaled).eval(), x, SIXTEEN)
    sim.calibrate([x], progress=False)
    before = x.clone()
    report = sim.compare(x)
    assert torch.equal(x, before)
    assert report.output.sqnr > 60


class Steps(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        for _ in range(2):
            y = self.layer(x)
            x.copy_(y)
            yield y


def test_what_a_generator_writes_reaches_the_caller():
    x = torch.randn(3, 4)
    sim = qsim.QuantSim(Steps().eval(), x, SIXTEEN)
    sim.calibrate([x], forward=lambda model, x: list(model(x.clone())), progress=False)
    in_float, simulated = x.clone(), x.clone()
    wanted, got = list(Steps.forward(sim.model, in_float)), list(sim(simulated))
    assert all(ratio(*each) > 60 for each in zip(got, wanted, strict=True))
    assert ratio(simulated, in_float) > 60


class Sometimes(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, write=False):
        y = self.layer(x)
        if write:
            x.copy_(y)
        return y


def test_writes_that_no_example_shows_are_told():
    x = torch.randn(3, 4)
    sim = qsim.QuantSim(Sometimes().eval(), x)
    sim.calibrate([x], progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sim(x)
    with pytest.warns(UserWarning, match="argument 'x' was written into where the example inputs did not show it"):
        sim(x, write=True)
    shown = qsim.QuantSim(Sometimes().eval(), [x, (x, True)])
    shown.calibrate([x], progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shown(given := x.clone(), write=True)
    assert not torch.equal(given, x)


class State(NamedTuple):
    hidden: list


def another_entry(m, x, s):
    h = m.a(x) + s["h"]
    s["h"], s["new"] = h, h * 2
    return h


def appended(m, x, s):
    h = m.a(x) + s[0]
    s[0] = h
    s.append(x)
    return h


def a_tuple_for_another(m, x, s):
    h = m.a(x) + s[0][0]
    s[0] = (torch.cat([s[0][0], h]), s[0][1])
    return h


def taken_out(m, x, s):
    return m.a(x) + s.pop("h")


def within_another(m, x, s):
    h = m.a(x) + s["k"][1]
    s["k"][1] = h
    s["k"].insert(0, s["z"])
    return h


def changed_for_one_another(m, x, s):
    h = m.a(x) + s[0] + s[1]
    s[0], s[1] = s[1], s[0]
    return h


def in_a_named_tuple(m, x, s):
    h = m.a(x) + s.hidden[0]
    s.hidden[0] = h
    return h


def left_alone(m, x, s):
    return m.a(x) + s[0]


class Stateful(nn.Module):
    def __init__(self, step) -> None:
        super().__init__()
        self.a, self.step = nn.Linear(4, 4), step

    def forward(self, x, state):
        return self.step(self, x, state)


def rows() -> torch.Tensor:
    return torch.rand(2, 4) * 2 - 1


STATES = {
    another_entry: lambda: {"h": rows()},
    appended: lambda: [rows()],
    a_tuple_for_another: lambda: [(rows(), rows())],
    taken_out: lambda: OrderedDict(h=rows(), z=rows()),
    within_another: lambda: {"k": [rows(), rows()], "z": rows()},
    changed_for_one_another: lambda: [rows(), rows()],
    in_a_named_tuple: lambda: State([rows()]),
    left_alone: lambda: [rows()],
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("step", STATES)
def test_what_the_model_puts_into_a_list_or_dict_reaches_its_caller(step, compiled):
    torch.manual_seed(0)
    model, make = Stateful(step).eval(), STATES[step]
    given = [(rows(), make()) for _ in range(20)]
    held = [copy.copy(state) for _, state in given]
    sim = qsim.QuantSim(model, given[0], SIXTEEN)
    sim.calibrate(given, progress=False)
    sim.compare(given[0])
    for (_, state), before in zip(given, held, strict=True):  # copies were given
        assert all(a is b for a, b in zip(tree_leaves(state), tree_leaves(before), strict=True))
    x, state = given[0]
    theirs = copy.deepcopy(state)
    names = {id(t): i for i, t in enumerate(tree_leaves(state))}, {id(t): i for i, t in enumerate(tree_leaves(theirs))}
    kept = state, theirs, tree_leaves(state), tree_leaves(theirs)  # ids of what is gone are given to others
    run = torch.compile(sim, backend="eager", fullgraph=True) if compiled else sim
    with torch.no_grad():
        torch.testing.assert_close(run(x, state), model(x, theirs), rtol=0, atol=1e-3)
    torch.testing.assert_close(state, theirs, rtol=0, atol=1e-3)
    assert [names[0].get(id(t)) for t in tree_leaves(state)] == [names[1].get(id(t)) for t in tree_leaves(theirs)]
    assert len(kept[2]) == len(kept[3])


def test_a_state_is_handed_on_step_by_step():
    torch.manual_seed(0)
    model = Stateful(another_entry).eval()
    xs = [rows() for _ in range(6)]
    sim = qsim.QuantSim(model, (xs[0], {"h": rows()}), SIXTEEN)
    sim.calibrate([(x, {"h": 4 * rows()}) for x in xs], progress=False)
    ours, theirs = {"h": torch.zeros(2, 4)}, {"h": torch.zeros(2, 4)}
    with torch.no_grad():
        for x in xs:
            torch.testing.assert_close(sim(x, ours), model(x, theirs), rtol=0, atol=1e-3)


def test_scales_learn_where_the_model_writes_into_what_it_is_given():
    learned = qsim.TensorSpec(bits=8, learnable=True)
    x = torch.linspace(-1, 1, 32).reshape(8, 4)
    sim = qsim.QuantSim(Writer(scaled), x.clone(), qsim.Config(weight=qsim.TensorSpec(bits=8, symmetric=True), activation=learned))
    sim.calibrate([x.clone()], progress=False)
    given = x.clone()
    sim(given).square().sum().backward()
    assert sim.quantizers()["input"].grid_tensors[0].grad.isfinite().all()
    assert torch.equal(given, 2 * sim.quantizers()["input"](x))
