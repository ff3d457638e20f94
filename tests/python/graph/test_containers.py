"""Which modules are containers, which are leaves, and which layer of torch.nn each is."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import qsim
from qsim.graph.record.containers import LayerKind, compute_parameters, containers, layer_kind, parametrizing
from qsim.graph.record.record import record


def test_containers():
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ModuleList([nn.ReLU()]), nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))
    paths = [path for path, _ in containers(model)]
    assert paths == ["", "2", "2.parametrizations.weight", "2.parametrizations.weight.0"]


class Own(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


class Plain(nn.Conv2d):
    """Only its constructor is its own."""


def hooked(layer):
    layer.register_forward_pre_hook(lambda m, args: None)
    return layer


KINDS = {
    "a layer": (lambda: nn.Linear(4, 3), LayerKind("Linear", True, True)),
    "a forward of its own": (lambda: Own(4, 3), LayerKind("Linear", False, False)),
    "no forward of its own": (lambda: Plain(4, 3, 1), LayerKind("Conv2d", False, True)),
    "parametrized": (lambda: parametrizations.spectral_norm(nn.Linear(4, 3)), LayerKind("Linear", False, True)),
    "a hook of torch's": (lambda: prune.random_unstructured(nn.Linear(4, 3), "weight", 0.5), LayerKind("Linear", True, True)),
    "a hook of the user's": (lambda: hooked(nn.Linear(4, 3)), LayerKind("Linear", True, False)),
    "scripted": (lambda: torch.jit.script(nn.Linear(4, 3)), LayerKind("Module", False, False)),
    "a model": (lambda: nn.Sequential(nn.Linear(4, 3)), LayerKind("Sequential", False, True)),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", KINDS)
def test_kinds(name):
    make, expected = KINDS[name]
    assert layer_kind(make()) == expected


def test_parameters_are_computed_without_a_call():
    """As they are before each one: until then the attribute holds what was computed last."""
    layer = prune.identity(nn.Linear(4, 3), "weight")
    with torch.no_grad():
        layer.weight_orig.fill_(2.0)
        layer.weight_mask[0] = 0.0
    compute_parameters(layer)
    assert torch.equal(layer.weight, 2 * layer.weight_mask)


def test_what_computes_parameters():
    model = nn.Sequential(nn.Linear(2, 2), parametrizations.orthogonal(nn.Linear(2, 2)))
    assert parametrizing(model) == ("1.parametrizations.weight.",)


def test_class_that_takes_no_subclass_is_reported():
    class Final(nn.Module):
        def __init_subclass__(cls):
            raise TypeError("final")

        def forward(self, x):
            return x.sin()

    tape, report = record(nn.Sequential(Final()), [((torch.randn(3),), {})])
    assert report == ["'0' is counted as part of its caller: its class Final takes no subclass here (final)"]
    assert [step.name for step in tape.steps if step.run == 0] == ["sin"]


class Turned(nn.Module):
    """A block before which its model turns the features around, if it knows it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x).relu()


ASKED = {
    "is": (lambda block: type(block) is Turned, True),
    "==": (lambda block: block.__class__ == Turned, True),
    "a name": (lambda block: type(block).__name__ == "Turned", False),
    "isinstance": (lambda block: isinstance(block, Turned), False),
}


@pytest.mark.parametrize(("knows", "lost"), ASKED.values(), ids=ASKED)
def test_a_model_that_asks_for_the_class_of_its_modules(knows, lost):
    class Asking(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Turned(), nn.Linear(8, 8), Turned()])

        def forward(self, x):
            for block in self.blocks:
                assert type(x) is not list
                x = block(x.flip(-1) if knows(block) else x)
            return x

    torch.manual_seed(0)
    model, x = Asking().eval(), torch.randn(16, 8)
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        sim = qsim.QuantSim(model, x)
    told = [str(w.message) for w in noted if "asks for the exact class of a module" in str(w.message)]
    with sim.in_float():
        same = torch.allclose(sim(x), model(x), atol=1e-5)
    assert (not same, len(told)) == (lost, lost)
    assert all("forward in test_containers.py" in text for text in told)


def test_a_model_that_asks_for_a_class_and_computes_gradients():
    class Force(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            assert type(x) is torch.Tensor
            y = self.layer(x)
            return y + torch.autograd.grad(y.sum(), self.layer.weight)[0].sum()

    with pytest.warns(UserWarning, match="computes gradients in its forward"):
        sim = qsim.QuantSim(Force().eval(), torch.randn(4, 8))
    assert not any("exact class" in note for note in sim.summary().notes)
