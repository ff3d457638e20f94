"""Layers that were moved, and weights that were untied, after the simulation was made: a weight would get the range of another one."""

import pytest
import torch
from by_hand import EXACT, decibels, simulated
from models import Forward
from torch import nn

import qsim

X = torch.linspace(-2, 2, 256).view(32, 8).sin()
IDS = torch.arange(16).view(2, 8)


def language_model() -> nn.Module:
    torch.manual_seed(0)
    e, head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
    head.weight = e.weight
    return Forward(lambda m, ids: m.head(torch.tanh(m.e(ids))), e=e, head=head).eval()


def layered() -> nn.Module:
    torch.manual_seed(0)

    def forward(m, x):
        for layer in m.layers:
            x = torch.tanh(layer(x))
        return x

    blocks = [nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)]
    return Forward(forward, layers=nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), *blocks])).eval()


@pytest.mark.parametrize("name", ["head", "e"])
def test_an_untied_weight_is_an_error_where_ranges_are_chosen(name):
    sim = simulated(language_model(), IDS)
    getattr(sim.model, name).weight = nn.Parameter(torch.randn(16, 8) * 30)
    says = r"'head.weight' was one with 'e.weight', whose quantizer it has, and is another tensor now: the model was changed after"
    for call in (lambda: sim.calibrate([IDS], progress=False), sim.summary, sim.weights):
        with pytest.raises(ValueError, match=says):
            call()


def test_untied_weights_of_the_same_values_have_the_same_range():
    model = language_model()
    sim = simulated(model, IDS)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.warns(UserWarning, match="a state without ranges"):
        sim.model.load_state_dict(state, assign=True)
    assert sim.model.head.weight is not sim.model.e.weight
    sim.calibrate([IDS], progress=False)
    assert decibels(sim(IDS), model(IDS)) > 30
    with torch.no_grad():
        sim.model.head.weight.mul_(2)
    with pytest.raises(ValueError, match="is another tensor now"):
        sim.calibrate([IDS], progress=False)


def test_a_layer_in_the_place_of_a_tied_one_is_none_of_its_quantizers():
    model = language_model()
    sim = simulated(model, IDS)
    sim.model.head = nn.Linear(8, 16, bias=False)
    sim.calibrate([IDS], progress=False)
    assert torch.equal(sim.weights()["e.weight"], model.e.weight)


@pytest.mark.parametrize("pair", [(0, 1), (2, 3)])
def test_layers_that_changed_places_are_an_error_where_ranges_are_chosen(pair):
    model, (first, second) = layered(), pair
    sim = simulated(model, X)
    expected, layers = sim(X), sim.model.layers
    layers[first], layers[second] = layers[second], layers[first]
    with pytest.raises(ValueError, match=f"what was 'layers.{second}' is at 'layers.{first}' now: the model was changed after"):
        sim.calibrate([X], progress=False)
    layers[first], layers[second] = layers[second], layers[first]
    sim.calibrate([X], progress=False)
    assert torch.equal(sim(X), expected)


def test_layers_and_weights_with_two_names_stay():
    one = nn.Linear(8, 8)
    model = Forward(lambda m, x: m.b(torch.tanh(m.a(x))), a=one, b=one).eval()
    sim = qsim.QuantSim(model, X, EXACT)
    for _ in range(2):
        sim.calibrate([X], progress=False)
    assert list(sim.weights()) == ["a.weight"]
