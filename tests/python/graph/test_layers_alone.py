"""Layers of torch.nn that are called by themselves: eager and compiled, their weights and results are on their grids, and it is said."""

import copy
import pickle
import threading
import warnings

import pytest
import torch
from by_hand import linear, on_grid, simulated
from models import Forward
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

import qsim

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

X = torch.linspace(-2, 2, 256, dtype=torch.float64).view(32, 8).sin()
ALONE = "'{}' was called by itself: its weight is quantized, and its result by its own quantizer, not what it is given"


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8, elementwise_affine=False), nn.Linear(8, 4)).double().eval()


def by_hand(model: nn.Sequential, x: Tensor, on: Tensor = X) -> Tensor:
    """One layer after the other, with a grid for each result from the float model's on what was seen."""
    for layer in model:
        seen = layer(on)
        x, on = on_grid(linear(layer, x) if isinstance(layer, nn.Linear) else layer(x), seen), seen
    return x


def one_by_one(layers: nn.Module, x: Tensor) -> Tensor:
    for layer in layers.children():
        x = layer(x)
    return x


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


WAYS = {
    "a loop": one_by_one,
    "a loop, compiled": lambda layers, x: torch.compile(lambda t: one_by_one(layers, t), backend="eager", fullgraph=True)(x),
    "layers compiled": lambda layers, x: one_by_one(nn.Sequential(*[torch.compile(m, backend="eager", fullgraph=True) for m in layers]), x),
    "checkpoints": lambda layers, x: checkpoint_sequential(layers, 2, x, use_reentrant=False),
    "reentrant checkpoints": lambda layers, x: checkpoint_sequential(layers, 2, x, use_reentrant=True),
    "another model": lambda layers, x: nn.Sequential(*layers)(x),
    "without modes": lambda layers, x: _without_modes(one_by_one, layers, x),
    "a device": lambda layers, x: _on_cpu(one_by_one, layers, x),
}


def _without_modes(function, layers, x):
    with torch._C.DisableTorchFunction():
        return function(layers, x)


def _on_cpu(function, layers, x):
    with torch.device("cpu"):  # a function mode of torch's
        return function(layers, x)


@pytest.mark.parametrize("way", WAYS)
def test_layers_that_are_called_by_themselves_are_on_their_grids(way):
    model = made()
    sim = simulated(model, X)
    x, other = (X.clone().requires_grad_() for _ in range(2))
    with pytest.warns(UserWarning, match=ALONE.format("0")):
        y = WAYS[way](sim.model, x)
    expected = by_hand(model, other)
    close(y, expected)
    y.square().sum().backward()
    expected.square().sum().backward()
    close(x.grad, other.grad)
    for found, wanted in zip(sim.model.parameters(), model.parameters(), strict=True):
        close(found.grad, wanted.grad)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        one_by_one(sim.model, X)
    assert ALONE.format("0") in "\n".join(sim.summary().notes)


def test_the_model_is_simulated_as_before():
    model = made()
    sim, untouched = simulated(model, X), simulated(model, X)
    with pytest.warns(UserWarning, match="was called by itself"):
        one_by_one(sim.model, X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            assert torch.equal(sim(X), untouched(X))
        assert torch.equal(torch.compile(sim.model, backend="eager", fullgraph=True)(X), untouched(X))
    close(sim(X), by_hand(model, on_grid(X)))


def test_in_float_they_are_in_float():
    model = made()
    sim = simulated(model, X)
    with sim.in_float():
        assert torch.equal(one_by_one(sim.model, X), model(X))
    sim.disable("0")
    sim.disable("0.weight")
    with pytest.warns(UserWarning, match="was called by itself"):
        assert torch.equal(sim.model[0](X), model[0](X))


def test_copies_and_pickles():
    model = made()
    sim = simulated(model, X)
    with pytest.warns(UserWarning, match="was called by itself"):
        expected = one_by_one(sim.model, X)
    for other in (copy.deepcopy(sim.model), pickle.loads(pickle.dumps(sim.model)), copy.deepcopy(sim).model):
        assert torch.equal(one_by_one(other, X), expected)
    assert torch.equal(copy.deepcopy(sim.model[0])(X), sim.model[0](X))
    assert type(sim.model[0]) is nn.Linear  # programs ask
    assert str(sim.model) == str(model)


COPIES = {
    "copy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "in a list": lambda m: pickle.loads(pickle.dumps(nn.ModuleList([m, nn.Linear(2, 2)])))[0],
}


@pytest.mark.parametrize("way", COPIES.values(), ids=COPIES)
def test_copies_of_a_part(way):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), nn.Linear(8, 4)).double().eval()
    sim = simulated(model, X)
    part = way(sim.model[0])
    close(part(X), sim.model[0](X))
    with pytest.warns(UserWarning, match="was called by itself"):
        expected = one_by_one(sim.model[0], X)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        close(one_by_one(part, X), expected)


def test_a_layer_in_two_containers():
    layer = nn.Linear(8, 8).double()
    forward = lambda m, x: m.last(m.block(m.layers[1](m.layers[0](x))))  # noqa: E731
    model = Forward(forward, layers=nn.ModuleList([layer, layer]), block=nn.Sequential(layer, nn.ReLU()), last=layer).eval()
    sim = simulated(model, X)
    with pytest.warns(UserWarning, match="was called by itself"):
        close(sim.model.last(X), linear(layer, X))
    assert torch.isfinite(sim(X)).all()


def test_a_layer_made_of_the_class_of_one():
    sim = simulated(made(), X)
    other = type(sim.model[0])(8, 8).double()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(other(X), nn.functional.linear(X, other.weight, other.bias))


def test_a_class_that_was_put_over_that_of_a_layer_stays():
    class Mixin:
        """As FSDP has one."""

    sim = simulated(made(), X)
    sim.model[0].__class__ = type("Mixed", (Mixin, nn.Linear), {})
    for other in (copy.deepcopy(sim.model), sim.bake()):
        assert isinstance(other[0], Mixin)


def test_what_a_copy_does_is_its_own():
    sim = simulated(made(), X)
    other = copy.deepcopy(sim)
    sim.disable("*")
    with pytest.warns(UserWarning, match="was called by itself"):
        assert torch.equal(one_by_one(sim.model, X), made()(X))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        close(one_by_one(other.model, X), by_hand(made(), X))


def test_a_layer_that_was_saved_alone_says_that_it_is_in_float():
    sim = simulated(made(), X)
    alone = pickle.loads(pickle.dumps(sim.model[0]))
    assert len(pickle.dumps(sim.model[0])) < 2 * len(pickle.dumps(made()[0]))
    with pytest.warns(UserWarning, match="'0' was saved without its simulation: it computes in float"):
        assert torch.equal(alone(X), made()[0](X))


def test_layers_in_another_model_are_no_float_model():
    sim = simulated(made(), X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other = simulated(nn.Sequential(*sim.model.children()), X)
        assert torch.equal(other(X), sim(X))
        assert other.summary().notes == sim.summary().notes
    with pytest.raises(ValueError, match="got a simulation"):
        qsim.fold_batch_norms(nn.Sequential(sim.model[0]), X)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(layer):
    torch.manual_seed(0)
    model = Forward(lambda m, x: m.head(m.rnn(x)[0]), rnn=layer(8, 6), head=nn.Linear(6, 3)).eval()
    x = torch.randn(5, 2, 8)
    sim = qsim.QuantSim(model, x)
    sim.calibrate([x], progress=False)
    grid = sim.quantizers()["input"]
    with pytest.warns(UserWarning, match=ALONE.format("rnn")):
        found = sim.model.head(sim.model.rnn(grid(x))[0])
    assert torch.equal(found, sim(x))


def test_in_a_thread_of_the_forwards():
    def forward(m, x):
        if not m.threaded:
            return m.layer(x)
        out: list[Tensor] = []
        thread = threading.Thread(target=lambda: out.append(m.layer(x)))
        thread.start()
        thread.join()
        return out[0]

    torch.manual_seed(0)
    model = Forward(forward, layer=nn.Linear(8, 8).double())
    model.threaded = False
    sim = simulated(model, X)
    expected = sim(X)
    sim.model.threaded = True
    with pytest.warns(UserWarning, match=ALONE.format("layer")), pytest.warns(UserWarning, match="was not reached"):
        assert torch.equal(sim(X), expected)


def test_calling_it_costs_no_calls_of_the_models_their_way():
    """What a layer does alone is not learned as the way of a call in the model."""
    torch.manual_seed(0)
    model = Forward(lambda m, x: m.second(m.first(x)), first=nn.Linear(8, 8).double(), second=nn.Linear(8, 8).double())
    sim, untouched = simulated(model, X), simulated(model, X)
    with pytest.warns(UserWarning, match="was called by itself"):
        sim.model.second(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(sim(X), untouched(X))


def test_a_chain_that_runs_as_one_is_quantized_behind_its_last():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).double().eval()
    sim = simulated(model, X)
    with pytest.warns(UserWarning, match="was called by itself"):
        found = one_by_one(sim.model, X)
    close(found, on_grid(linear(model[0], X).relu(), model(X)))


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_a_forward_that_asks_for_the_class_of_a_layer(how):
    def forward(m, x):
        for layer in m.layers:
            x = layer(x.flip(-1) if type(layer) is nn.Linear else x)
        return x

    torch.manual_seed(0)
    model = Forward(forward, layers=nn.ModuleList([nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)])).double().eval()
    sim = simulated(model, X)
    called = torch.compile(sim.model, backend="eager", fullgraph=True) if how == "compiled" else sim
    first, _, last = model.layers
    hidden = on_grid(linear(first, on_grid(X).flip(-1)).relu(), first(X.flip(-1)).relu())
    close(called(X), on_grid(linear(last, hidden.flip(-1)), model(X)))


def shallow(module: nn.Module) -> nn.Module:
    """A copy with parameters of its own, as libraries for meta-learning make one."""
    made = object.__new__(type(module))
    made.__dict__ = vars(module).copy()
    made._parameters = {name: None if p is None else p * 0.5 for name, p in module._parameters.items()}
    made._modules = {name: shallow(m) for name, m in module._modules.items()}
    return made


def test_shallow_copies_run_with_their_own_parameters():
    model = made()
    sim = simulated(model, X)
    copied, plain = shallow(sim.model), shallow(model)
    with sim.in_float():
        assert torch.equal(copied(X), plain(X))
    with pytest.warns(UserWarning, match="was called by itself"):
        alone = copied[0](X)
    quantizers = sim.quantizers()
    weight = quantizers["0.weight"](plain[0].weight)
    close(alone, quantizers["0.output"](nn.functional.linear(X, weight, plain[0].bias)))
    assert not torch.equal(sim(X), copied(X))
    with pytest.raises(RuntimeError, match="a shallow copy of a simulated module is compiled"):
        torch.compile(shallow(sim.model), backend="eager", fullgraph=True)(X)
