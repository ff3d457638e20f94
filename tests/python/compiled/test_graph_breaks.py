"""Where Dynamo breaks a graph, and where a model compiles its own parts, every quantizer stands where it stands in eager mode."""

import warnings
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from by_hand import EXACT, simulated
from torch import nn

import qsim

X = torch.linspace(-2, 2, 256, dtype=torch.float64).view(32, 8).sin()


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@torch.compile(backend="eager")
def compiled_by_the_model(y):
    return torch.tanh(y) * y


BREAKS = {
    "none": lambda y: y,
    "print": lambda y: print(end="") or y,
    "asked for": lambda y: torch._dynamo.graph_break() or y,
    "data": lambda y: y * 3 if y.sum() > 1e9 else y,
    "number": lambda y: y * y.abs().max().item(),
    "compiled by the model": compiled_by_the_model,
}


class Inner(nn.Module):
    def __init__(self, breaks) -> None:
        super().__init__()
        self.a, self.breaks = nn.Linear(8, 8), breaks

    def forward(self, x):
        y = torch.relu(self.a(F.relu(x)) * 2.0)
        return F.gelu(self.breaks(y)) + x


class Outer(nn.Module):
    def __init__(self, breaks, inner) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.h, self.g, self.o, self.breaks = Inner(inner), Inner(inner), nn.Linear(8, 4), breaks

    def forward(self, x):
        y = self.breaks(self.h(x))
        return self.o(self.g(y + 1.0).relu() * 2)  # chains across containers: `g` begins with a rectifier, and ends with an addition


def run(module, sim):
    sim.zero_grad()
    y = module(X.clone().requires_grad_())
    y.square().sum().backward()
    return [y.detach(), *(p.grad for p in sim.model.parameters())]


def whole(sim):
    return torch.compile(sim, backend="eager")


def model(sim):
    sim.model.compile(backend="eager")
    return sim


def parts(sim):
    for part in (sim.model.h, sim.model.g):
        part.compile(backend="eager")
    return sim


@pytest.mark.filterwarnings("ignore:Dynamo does not know:UserWarning")
@pytest.mark.parametrize("compile", [whole, model, parts])
@pytest.mark.parametrize(("inside", "breaks"), [(inside, name) for inside in (False, True) for name in BREAKS if inside or name != "none"])
def test_compiled_as_eager(compile, breaks, inside):
    where = (BREAKS["none"], BREAKS[breaks]) if inside else (BREAKS[breaks], BREAKS["none"])
    sim = simulated(Outer(*where).double().eval(), X, config=EXACT)
    expected = run(sim, sim)
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        compiled = compile(sim)
        for _ in range(2):
            for ours, theirs in zip(run(compiled, sim), expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    said = [str(w.message) for w in noted if "QuantSim" in str(w.message)]
    assert not any("did not show" in text for text in said)
    breaks_it = breaks in ("print", "asked for", "data", "number") and (inside or compile is not parts)
    assert len([text for text in said if "break its graph" in text]) == breaks_it


class Pair(NamedTuple):
    x: torch.Tensor
    z: torch.Tensor


def test_what_stands_around_a_broken_forward_runs_as_it_is():
    """Inputs in a named tuple, which are exchanged before it; and behind it, a rectifier's operand that is left to its readers."""

    class OfPair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(8, 8), nn.LeakyReLU(0.1)

        def forward(self, pair):
            torch._dynamo.graph_break()
            y = self.b(self.a(pair.x) - pair.z)
            return {"out": y + y, "pair": pair}

    pair = Pair(X, X.flip(0))
    sim = simulated(OfPair().double().eval(), pair, config=EXACT)
    expected = sim(pair)["out"]
    with pytest.warns(UserWarning, match="break its graph"):
        torch.testing.assert_close(whole(sim)(pair)["out"], expected, rtol=1e-9, atol=1e-9)


def test_float_models_of_the_same_classes_are_still_compiled():
    """What Dynamo gives up of a simulation it gives up of that alone."""
    sim = simulated(Outer(BREAKS["print"], BREAKS["none"]).double().eval(), X, config=EXACT)
    with pytest.warns(UserWarning, match="break its graph"):
        whole(sim)(X)
    graphs = []
    other = simulated(Outer(BREAKS["none"], BREAKS["none"]).double().eval(), X, config=EXACT)
    other.model.compile(backend=lambda graph, _: graphs.append(graph) or graph.forward)
    other(X)
    assert graphs


@pytest.mark.parametrize("calibrated_before", [False, True])
@pytest.mark.parametrize("part", ["h.a", "h", "", "every module"])
def test_what_is_compiled_by_itself_has_its_quantizers(part, calibrated_before):
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    model = Outer(BREAKS["none"], BREAKS["none"]).double().eval()
    plain = simulated(model, X)
    sim = simulated(model, X) if calibrated_before else qsim.QuantSim(model, X, EXACT)
    for path, module in sim.model.named_modules():
        if part in (path, "every module"):
            module.compile(backend=backend)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if not calibrated_before:
            sim.calibrate([X], progress=False)
        with torch.no_grad():
            assert torch.equal(sim(X), plain(X))
    assert bool(graphs) == (part in ("h", "", "every module"))  # a layer by itself runs in Python


def test_a_generator_in_a_comprehension_is_compiled_as_it_runs():
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(8, 8).double(), nn.Linear(8, 8).double()

        def parts(self, h):
            for _ in range(2):
                yield self.b(h)
                h = torch.tanh(h)

        def forward(self, x):
            first, second = [part * 2 for part in self.parts(self.a(x))]
            by_number = {number: part * 2 for number, part in enumerate(self.parts(first))}
            return second * by_number[1] + by_number[0]

    sim = simulated(Parts().eval(), X)
    with torch.no_grad():
        assert torch.equal(torch.compile(sim, backend="eager", fullgraph=True)(X), sim(X))
