"""Modules that took the place of others after the simulation was made: eager and compiled, what they compute stays in float, with a
warning; all others keep their quantizers, and what was there has its own when it is put back."""

import warnings

import pytest
import torch
from by_hand import linear, on_grid, simulated
from models import Forward
from torch import nn
from torch.nn.utils import parametrize

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

X = torch.linspace(-2, 2, 256, dtype=torch.float64).view(32, 8).sin()
HOW = ["eager", "eager before", "compiled", "compiled before"]


def one_by_one(m, x):
    return m.layers[2](m.layers[1](m.layers[0](x)))


def in_a_loop(m, x):
    for layer in m.layers:
        x = layer(x)
    return x


KINDS = {
    "one by one": lambda layers: Forward(one_by_one, layers=nn.ModuleList(layers)),
    "in a loop": lambda layers: Forward(in_a_loop, layers=nn.ModuleList(layers)),
    "sequential": lambda layers: nn.Sequential(*layers),
}


def made(kind: str):
    torch.manual_seed(0)
    return KINDS[kind]([nn.Linear(8, 8).double() for _ in range(3)]).eval()


def layers_of(model: nn.Module) -> nn.Module:
    return model if isinstance(model, nn.Sequential) else model.layers


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def alike(layer: nn.Linear) -> nn.Linear:
    """Another layer with these parameters, and so with their grids."""
    other = nn.Linear(8, 8).double()
    other.load_state_dict(layer.state_dict())
    return other.eval()


def running(sim, how: str):
    called = torch.compile(sim.model, backend="eager", fullgraph=True) if how.startswith("compiled") else sim
    if how.endswith("before"):
        called(X)
    return called


def noted(call, *args):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        out = call(*args)
    return out, " ".join(str(w.message) for w in found)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_in_the_middle_by_hand(kind, how):
    model = made(kind)
    sim = simulated(model, X)
    expected, called = sim(X), running(sim, how)
    first, second, third = layers_of(model)
    before = layers_of(sim.model)[1]
    layers_of(sim.model)[1] = alike(before)
    y = on_grid(linear(first, on_grid(X)), first(X))
    y = on_grid(linear(third, linear(second, y)), model(X))
    found, said = noted(called, X)
    close(found, y)
    assert "its result stays in float" in said
    assert "'1'" in said.replace("layers.", "")
    close(called(X), y)
    layers_of(sim.model)[1] = before
    close(called(X), expected)


@pytest.mark.parametrize("how", HOW)
def test_two_layers_that_changed_places(how):
    model = made("one by one")
    sim = simulated(model, X)
    called, layers = running(sim, how), sim.model.layers
    layers[0], layers[1] = layers[1], layers[0]
    first, second, third = model.layers
    y = on_grid(linear(second, on_grid(X)), second(first(X)))
    y = on_grid(linear(third, on_grid(linear(first, y), first(X))), model(X))
    found, said = noted(called, X)
    close(found, y)
    assert "'layers.0'" in said
    assert "'layers.1'" in said


class Adapted(nn.Module):
    """As a library of adapters writes it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(8, 2, bias=False).double(), nn.Linear(2, 8, bias=False).double()

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def adapt(layers) -> None:
    layers[1] = Adapted(layers[1])


def another_sequence(layers) -> None:
    layers[1] = nn.Sequential(alike(layers[1]), nn.ReLU())


def nothing(layers) -> None:
    layers[1] = nn.Identity()


def parametrized(layers) -> None:
    parametrize.register_parametrization(layers[1], "weight", Doubled())


@pytest.mark.parametrize("replace", [adapt, another_sequence, nothing, parametrized])
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_as_eager(kind, replace):
    found = {}
    for how in HOW:
        torch.compiler.reset()
        sim = simulated(made(kind), X)
        called = running(sim, how)
        torch.manual_seed(1)
        replace(layers_of(sim.model))
        found[how] = noted(called, X)
    out, said = found.pop("eager")
    assert ("the example inputs" in said) == (replace is not parametrized)  # what computes a weight is no operation of the model
    for other, told in found.values():
        close(other, out)
        assert told == said


def test_a_layer_whose_weight_its_container_read():
    """What a container multiplies with by itself is looked for where it was: there may be nothing now."""

    def forward(m, x, whole=True):
        return m.b(nn.functional.linear(x, m.a.weight) if whole else m.a(x))

    a, b = nn.Linear(8, 8).double(), nn.Linear(8, 8).double()
    seen = b(nn.functional.linear(X, a.weight))
    sim = simulated(Forward(forward, a=a, b=b).eval(), X)
    other = nn.Linear(8, 8).double()
    sim.model.a = nn.Sequential(other)
    expected = on_grid(linear(b, other(on_grid(X))), seen)
    for called in (sim, torch.compile(sim.model, backend="eager", fullgraph=True)):
        close(noted(called, X, False)[0], expected)


# Modules that are made of others.


def in_slices(m, x):
    return m.layers[:2](x) + m.layers[2:](x)


def anew(m, x):
    with torch.no_grad():
        other = type(m.layers)(*m.layers)
    return other[:1](x) + m.layers[0](x)


def on_the_spot(m, x):
    return m.layers[1](m.layers[0](x)) + m.layers[2](x)


@pytest.mark.parametrize("how", HOW)
def test_slices_of_a_sequence_in_a_forward(how):
    """A slice is no module of the model: its layers are called by the forward that makes it."""
    layers = [nn.Linear(8, 8).double() for _ in range(3)]
    expected = simulated(Forward(on_the_spot, layers=nn.Sequential(*layers)).eval(), X)(X)
    sim = simulated(Forward(in_slices, layers=nn.Sequential(*layers)).eval(), X)
    assert {"layers.0.weight", "layers.1.weight", "layers.2.weight"} <= set(sim.quantizers())
    close(running(sim, how)(X), expected)


def test_a_module_of_the_same_class_made_in_a_forward():
    model = Forward(anew, layers=nn.Sequential(nn.Linear(8, 8).double())).eval()
    sim, layer = simulated(model, X), model.layers[0]
    y = on_grid(linear(layer, on_grid(X)), layer(X))
    close(sim(X), on_grid(y + y, 2 * layer(X)))


def test_a_slice_that_is_called_by_itself_says_what_is_simulated():
    model = made("sequential")
    sim = simulated(model, X)
    with pytest.warns(
        UserWarning, match="a Sequential was made of a simulated one, as a slice is: what it computes between its layers is in"
    ):
        part = sim.model[:2]
    with pytest.warns(UserWarning, match="'0' was called by itself"):
        found = part(X)
    first = on_grid(linear(model[0], X), model[0](X))
    close(found, on_grid(linear(model[1], first), model[:2](X)))
    assert type(part) is nn.Sequential


@pytest.mark.parametrize("how", HOW)
def test_layers_that_were_added_and_taken_away(how):
    """The others have new names then."""
    model = made("sequential")
    sim = simulated(model, X)
    called = running(sim, how)
    first, _, third = model
    sim.model.append(alike(third))
    noted(called, X)
    del sim.model[1]
    y = on_grid(linear(third, on_grid(linear(first, on_grid(X)), first(X))), model(X))
    close(noted(called, X)[0], linear(third, y))


def test_a_forward_that_was_set_on_the_model():
    model = made("one by one")
    sim = simulated(model, X)
    expected, original = sim(X), sim.model.forward
    sim.model.forward = lambda x: original(x)  # as libraries that move weights about do
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        close(sim(X), expected)
    first = sim.model.layers[0]
    sim.model.forward = lambda x: nn.functional.linear(x, first.weight, first.bias)
    with pytest.warns(
        UserWarning, match="'forward' was set on the model after it was simulated: 'layers.0.weight' and what it computes are"
    ):
        close(sim(X), model.layers[0](X))
    sim.model.forward = lambda x: sim.model.layers[0](x)
    with pytest.warns(UserWarning, match="'layers.0' was called by itself"):
        close(sim(X), on_grid(linear(model.layers[0], X), model.layers[0](X)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with sim.in_float():
            sim(X)
