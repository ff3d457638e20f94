"""What is changed in place has two names, and lies on its grid by whichever of them a path reads it that no example took."""

import dataclasses
import functools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import qsim

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0)) * 2
READ = {
    "itself": lambda t, _: t**2,
    "a view": lambda t, _: t[:, :4] ** 2,
    "in a list": lambda t, other: torch.cat([other, t.exp()]),
    "twice": lambda t, _: t * t.square(),
    "by keyword": lambda t, _: torch.pow(input=t, exponent=2),
    "by what only moves it": lambda t, _: t.flatten().view(16, 8).exp(),
}


class Network(nn.Module):
    """Reads what it changed in place by the name from before (`older`) or by the name of the result: on the other path by the other one."""

    def __init__(self, read, older):
        super().__init__()
        self.read, self.older, self.clamped = read, older, nn.ReLU6(inplace=True)

    def forward(self, x, other=False):
        y = x + x
        z = self.clamped(y)
        return self.read(y if self.older != other else z, x)


def simulation(model):
    sim = qsim.QuantSim(model.eval(), X, qsim.int8())
    sim.calibrate([X], progress=False)
    return sim


@pytest.mark.filterwarnings("error:QuantSim")
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("savings", [False, True])
@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("name", READ)
def test_either_name_is_on_the_grid(name, older, savings, compiled, gradients):
    sim = simulation(Network(READ[name], older))
    sim.savings = savings
    run = torch.compile(sim, backend="eager", fullgraph=True) if compiled else sim
    given = [X.clone().requires_grad_(gradients) for _ in range(2)]
    found = [run(x, other=other) for x, other in zip(given, (False, True), strict=True)]
    assert torch.equal(*found)
    if gradients:
        for out in found:
            out.mul(torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        assert torch.equal(*(x.grad for x in given))


@pytest.mark.filterwarnings("error:QuantSim")
def test_by_hand():
    sim = simulation(Network(READ["itself"], older=False))
    quantizers = sim.quantizers()
    entered = quantizers["input"](X)
    changed = F.relu6(entered + entered)
    assert not torch.equal(changed, quantizers["add.output"](changed))
    assert torch.equal(sim(X, other=True), quantizers["pow.output"](quantizers["add.output"](changed) ** 2))


class Across(nn.Module):
    """A path of another module's returns what this one's example dropped, and its caller knows the name from before."""

    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x, other=False):
        y = x + x
        return self.inner(y, other) + y


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.clamped = nn.ReLU6(inplace=True)

    def forward(self, y, other):
        z = self.clamped(y)
        return z if other else F.softplus(F.log_softmax(y, -1))


@pytest.mark.filterwarnings("ignore:QuantSim")  # the layers that the other path leaves out
@pytest.mark.parametrize("compiled", [False, True])
def test_both_names_in_one_sum(compiled):
    sim = simulation(Across())
    quantizers = sim.quantizers()
    entered = quantizers["input"](X)
    changed = quantizers["add.output"](F.relu6(entered + entered))
    run = torch.compile(sim, backend="eager") if compiled else sim
    assert torch.equal(run(X, other=True), quantizers["add_2.output"](changed + changed))


class IntoALayer(nn.Module):
    """Its other path gives a layer that no example reaches what was changed in place, by the name from before."""

    def __init__(self, change):
        super().__init__()
        self.change, self.layer = change, nn.Linear(8, 8, bias=False)

    def forward(self, x, other=False):
        y = x + x
        z = self.change(y)
        return self.layer(y) if other else z.exp()


CHANGE = {
    "itself": lambda y: F.relu6(y, inplace=True),
    "a view of all of it": lambda y: F.relu6(y.view(-1), inplace=True).view(y.shape),
}


@pytest.mark.filterwarnings("ignore:QuantSim")  # the layer, and that nothing reaches it
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("change", CHANGE)
def test_a_layer_that_no_example_reaches_reads_it_on_its_grid(change, compiled):
    sim = simulation(IntoALayer(CHANGE[change]))
    quantizers = sim.quantizers()
    entered = quantizers["input"](X)
    if "relu6.output" in quantizers:
        changed = quantizers["relu6.output"](F.relu6(quantizers["add.output"](entered + entered)))
    else:
        changed = quantizers["add.output"](F.relu6(entered + entered))
    run = torch.compile(sim, backend="eager", fullgraph=True) if compiled else sim
    assert torch.equal(run(X, other=True), F.linear(changed, quantizers["layer.weight"](sim.model.layer.weight)))


class Decided(nn.Module):
    """Data decide which name is read; Dynamo breaks its graph there, and the container runs in eager, under what Dynamo began with."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8, bias=False)

    def forward(self, x, y):
        y = self.layer(y)
        z = torch.softmax(y, -1) * 1.5
        if x.mean() > 0:
            torch.stack([x, x], -1).amax(-1)
            read = F.relu(z, inplace=True)
        else:
            read = y
        clamped = y.clamp_(-1.0, 1.0)
        return read - clamped, torch.softmax(read, -1)


@pytest.mark.filterwarnings("ignore:QuantSim")  # that stack is skipped, and that the graph breaks
def test_where_the_graph_breaks():
    given = X - X.mean() + 0.3, X * 3
    sim = qsim.QuantSim(Decided().eval(), given, qsim.int8())
    sim.calibrate([given], progress=False)
    other = -given[0], -given[1]
    for found, expected in zip(torch.compile(sim, backend="eager")(*other), sim(*other), strict=True):
        assert torch.equal(found, expected)


class Mapped(nn.Module):
    """What it changes in place is a view, and a transform reads the result: inside there is no memory that could be named."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x, other=False):
        y = self.norm(x[None].transpose(1, 2)).transpose(1, 2)
        y.relu_()
        y = self.norm(y.transpose(1, 2)).transpose(1, 2)
        z = F.relu(y, inplace=True)
        return torch.vmap(torch.tanh)(y if other else z)


@pytest.mark.filterwarnings("error:QuantSim")
@pytest.mark.parametrize("inference", [False, True])
def test_before_a_transform(inference):
    sim = simulation(Mapped())
    with torch.inference_mode(inference):
        assert torch.equal(sim(X, other=True), sim(X))


SAID = {
    "writes into it again": (
        lambda t, _: t.mul_(0.7).exp(),  # it gets the memory itself
        "'mul' .* read what 'clamped' .* computes, where the example inputs did not show it",
    ),
    "returns it": (lambda t, _: t, "what 'clamped' .* computes was returned, where the example inputs did not show it"),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", SAID)
def test_who_does_else_is_told(name, compiled):
    read, said = SAID[name]
    sim = simulation(Network(read, older=False))
    run = torch.compile(sim, backend="eager") if compiled else sim
    with pytest.warns(UserWarning, match=said):
        run(X, other=True)


def part(t):
    return t[:, :4]


def first_column(t):
    t[:, 0] = 3.0


WRITE = {
    "an operation": lambda t: t.mul_(2),
    "one that has no quantizer": lambda t: t.zero_(),
    "a part of it": first_column,
    "a view of it": lambda t: part(t).add_(1),
}


class Written(Network):
    """Writes, on the other path, by the older name or by the other one, where that reads, and then reads the result."""

    def forward(self, x, other=False):
        y = x + x
        z = self.clamped(y)
        if other:
            self.read(y if self.older else z)
        return z.exp()


@pytest.mark.parametrize("way", ["eager", "warm", "inference", "compiled"])
@pytest.mark.parametrize("name", WRITE)
def test_a_write_by_the_older_name_alone_is_told(name, way):
    if (name, way) == ("a view of it", "inference"):
        pytest.skip("torch does not say of what a view is one there")
    for older in (True, False):
        torch._dynamo.reset()
        sim = simulation(Written(WRITE[name], older))
        run = torch.compile(sim, backend="eager") if way == "compiled" else sim
        if way == "warm":
            for _ in range(3):
                run(X)
        with torch.inference_mode(way == "inference"), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            run(X, other=True)
        told = [str(each.message) for each in said if "'clamped' (test_truth_either_name.py" in str(each.message)]
        assert bool(told) == older
        assert not older or "changed in place was written into by its older name, where the example inputs did not show it" in told[0]


@pytest.mark.filterwarnings("error:QuantSim")
@pytest.mark.parametrize("compiled", [False, True])
def test_what_is_written_to_again_by_its_own_name_is_not(compiled):
    sim = qsim.QuantSim(Network(lambda t, _: t.mul_(0.7).exp(), older=False).eval(), X, qsim.int8())
    sim.calibrate([X], progress=False)
    run = torch.compile(sim, backend="eager") if compiled else sim
    run(X)
    with sim.in_float():
        assert torch.equal(sim(X), (F.relu6(X + X) * 0.7).exp())


@pytest.mark.filterwarnings("error:QuantSim")
@pytest.mark.parametrize("compiled", [False, True])
def test_what_was_not_changed_this_time_is_what_it_was(compiled):
    class Perhaps(nn.Module):
        def forward(self, x, other=False):
            y = x * 3
            z = F.elu(y, inplace=not other)
            return (y if other else z) ** 2

    sim = simulation(Perhaps())
    quantizers = sim.quantizers()
    run = torch.compile(sim, backend="eager") if compiled else sim
    tripled = quantizers["mul.output"](quantizers["input"](X) * 3)
    assert torch.equal(run(X, other=True), quantizers["pow.output"](tripled**2))


@pytest.mark.filterwarnings("error:QuantSim")
def test_calibration_on_the_other_path_observes_no_tensor_twice():
    config = dataclasses.replace(qsim.int8(), activation=qsim.TensorSpec(method="ema"))
    one, other = (qsim.QuantSim(Network(READ["itself"], older=False).eval(), X, config) for _ in range(2))
    one.calibrate([X, X * 2, X * 0.5], progress=False)
    other.calibrate([X, (X * 2, True), (X * 0.5, True)], progress=False)
    for name, quantizer in one.quantizers().items():
        assert torch.equal(quantizer.encoding.scale, other.quantizers()[name].encoding.scale), name


@pytest.mark.filterwarnings("error:QuantSim")
@pytest.mark.parametrize("older", [False, True])
def test_in_float_where_the_operation_falls_back(older):
    sim = simulation(Network(READ["itself"], older))
    sim.fallback(["add", "pow"], "fp32")
    assert torch.equal(sim(X, other=True), sim(X))
    assert torch.equal(sim(X), F.relu6(X + X) ** 2)


@pytest.mark.filterwarnings("error:QuantSim")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("older", [False, True])
def test_what_runs_again_under_a_checkpoint_reads_it_as_it_did(older, inside, reentrant):
    """Written to `inside` of it, or before it."""

    class Checkpointed(Network):
        def __init__(self, run):
            super().__init__(lambda t: t**2 * 0.01, older)
            self.run = run

        def forward(self, x, other=False):
            if inside:
                return self.run(lambda x: self.chosen(y := x * 1.5, self.clamped(y), other), x)
            y = x * 1.5
            return self.run(lambda y, z: self.chosen(y, z, other), y, self.clamped(y))

        def chosen(self, y, z, other):
            return self.read(y if self.older != other else z).exp()

    found = []
    for run in (functools.partial(checkpoint, use_reentrant=reentrant), lambda function, *args: function(*args)):
        sim, x = simulation(Checkpointed(run)), X.clone().requires_grad_()
        sim(x, other=True).mul(torch.linspace(-1, 1, X.numel()).view_as(X)).sum().backward()
        found.append(x.grad)
    assert found[0].abs().max() > 0
    assert torch.equal(*found)


def test_a_part_of_what_has_a_grid_for_each_channel_is_said_to_be_in_float():
    config = dataclasses.replace(qsim.int8(), activation=qsim.TensorSpec(axis=1, method="minmax"))
    sim = qsim.QuantSim(Network(lambda t, _: t[:, :4].exp(), older=False).eval(), X, config)
    sim.calibrate([X], progress=False)
    with pytest.warns(UserWarning, match="read what 'clamped' .* computes, where the example inputs did not show it: that stays in float"):
        sim(X, other=True)
