"""A layer and the BatchNorm that is folded into it are one: where a path that no example took runs one without the other, that is said."""

import contextlib
import copy
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import qsim
from qsim.graph.execute import attach

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm, self.other, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm.running_mean.normal_()
        self.norm.weight.data.uniform_(0.5, 2)
        self.norm.num_batches_tracked.fill_(10)

    def forward(self, x, way="both"):
        if way == "both":
            return self.last(self.norm(self.layer(x)).relu())
        if way == "checkpointed":
            return self.last(checkpoint(lambda x: self.norm(self.layer(x)), x, use_reentrant=False).relu())
        if way == "layer":
            return self.last(self.layer(x).relu())
        if way == "norm":
            return self.last(self.norm(x).relu())
        if way == "another layer":
            return self.last(self.norm(self.other(x)).relu())
        return self.last(self.norm(self.layer(self.norm(self.layer(x)))).relu())  # twice


TOLD = "'layer' ran without 'norm' where 'norm' is folded into 'layer': it computes another function than in float"
ALONE = ["norm", "another layer"]


def simulation(examples=X, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `other` is not reached
        sim = qsim.QuantSim(Network().eval(), examples, qsim.int8(**options))
    sim.calibrate(examples if isinstance(examples, list) else [examples], progress=False)
    return sim


@pytest.mark.parametrize("compiled", [False, True])
def test_a_layer_without_its_norm_is_said_first(compiled):
    sim = simulation()
    run = torch.compile(sim, backend="eager") if compiled else sim
    with pytest.warns(UserWarning, match=TOLD) as told:
        run(X, "layer")
    assert str(told[0].message).startswith(f"QuantSim: {TOLD}")
    assert TOLD in sim.summary().notes


@pytest.mark.filterwarnings("ignore:QuantSim")  # that of a path that no example took
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("way", ALONE)
def test_a_norm_without_its_layer_normalizes(way, compiled):
    sim = simulation()
    for quantizer in sim.quantizers().values():
        quantizer.enabled = False
    run = torch.compile(sim, backend="eager") if compiled else sim
    torch.testing.assert_close(run(X, way), Network().eval()(X, way))
    assert not [note for note in sim.summary().notes if "is folded into" in note]
    with sim.in_float():
        torch.testing.assert_close(sim(X, way), Network().eval()(X, way))
    torch.testing.assert_close(sim.double()(X.double(), way), Network().eval().double()(X.double(), way), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("way", ["both", "checkpointed", "twice"])
def test_both_are_themselves_on_any_path(way, compiled):
    sim = simulation()
    run = torch.compile(sim, backend="eager") if compiled else sim
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run(X.clone().requires_grad_(), way).sum().backward()
    assert not [w for w in told if "is folded into" in str(w.message)]
    with sim.in_float():
        torch.testing.assert_close(sim(X, way), Network().eval()(X, way))


@pytest.mark.filterwarnings("error:QuantSim")
@pytest.mark.parametrize("way", [*ALONE, "layer"])
def test_as_an_example_it_is_what_it_is_in_float(way):
    sim = simulation([X, (X, way)])
    sim(X, way)
    with sim.in_float():
        torch.testing.assert_close(sim(X, way), Network().eval()(X, way))


class Wrapper(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer, self.more = layer, nn.Linear(8, 8, bias=False)
        nn.init.zeros_(self.more.weight)

    def forward(self, x):
        return self.layer(x) + self.more(x)


def wrap(model):
    model.layer = Wrapper(model.layer)


def copy_layer(model):
    model.layer = copy.deepcopy(model.layer)


def make_of_its_weights(model):
    made = nn.Linear(8, 8)
    made.load_state_dict(model.layer.state_dict())
    model.layer = made


def checkpointed_alone(name, **options):
    def change(model):
        setattr(model, name, checkpoint_wrapper(getattr(model, name), **options))

    return change


CHANGED = {
    "nothing": lambda model: None,
    "a hook on the layer": lambda model: model.layer.register_forward_hook(lambda m, given, out: out.clone()),
    "a hook on the norm": lambda model: model.norm.register_forward_pre_hook(lambda m, given: given[0].clone()),
    "a wrapper": wrap,
    "a copy": copy_layer,
    "another layer with its weights": make_of_its_weights,
    "the layer compiled": lambda model: model.layer.compile(backend="eager"),
    "the norm compiled": lambda model: model.norm.compile(backend="eager"),
    "the layer under a checkpoint": checkpointed_alone("layer"),
    "the norm under a checkpoint": checkpointed_alone("norm"),
    "the norm under a reentrant checkpoint": checkpointed_alone("norm", checkpoint_impl=CheckpointImpl.REENTRANT),
}


@pytest.mark.filterwarnings("ignore:QuantSim", "ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("way", ["eager", "in float", "compiled", "by themselves"])
@pytest.mark.parametrize("name", CHANGED)
def test_what_the_layer_returned_is_not_normalized_twice(name, way):
    if name.startswith("the ") and way == "compiled":
        pytest.skip("compiled once more, or what torch does not compile")
    if way == "by themselves" and name in ("a copy", "another layer with its weights"):
        pytest.skip("a norm that is called by itself does not know of other layers, and says that it normalizes")
    sim = simulation()
    CHANGED[name](sim.model)
    for quantizer in sim.quantizers().values():
        quantizer.enabled = False
    run = torch.compile(sim, backend="eager") if way == "compiled" else sim
    if way == "by themselves":
        run = lambda x: sim.model.last(sim.model.norm(sim.model.layer(x)).relu())  # noqa: E731
    plain = Network().eval()
    for _ in range(2):
        found, expected = X.clone().requires_grad_(), X.clone().requires_grad_()
        with sim.in_float() if way == "in float" else contextlib.nullcontext():
            out = run(found)
            out.square().sum().backward()
        torch.testing.assert_close(out, plain(expected))
        plain(expected).square().sum().backward()
        torch.testing.assert_close(found.grad, expected.grad)


class Split(Network):
    """The norm stands in another container than its layer."""

    def __init__(self):
        super().__init__()
        self.behind = nn.Sequential(self.norm, nn.ReLU())
        del self.norm, self.other

    def forward(self, x):
        return self.last(self.behind(self.layer(x)))


@pytest.mark.filterwarnings("error:QuantSim")
@pytest.mark.parametrize("in_float", [False, True])
def test_a_part_that_is_compiled_by_itself_does_not_normalize_twice(in_float):
    sim = qsim.QuantSim(Split().eval(), X, qsim.int8())
    sim.calibrate([X], progress=False)
    with sim.in_float() if in_float else contextlib.nullcontext():
        expected = sim(X)
        sim.model.behind.compile(backend="eager")
        for _ in range(2):
            torch.testing.assert_close(sim(X), expected)


@pytest.mark.parametrize("compiled", [False, True])
def test_another_module_in_the_place_of_the_layer_is_said(compiled):
    sim = simulation()
    sim.model.layer = nn.Linear(8, 8)
    run = torch.compile(sim, backend="eager") if compiled else sim
    with pytest.warns(UserWarning, match="'norm' is folded into what stood at 'layer', and does nothing behind another module"):
        run(X)
    sim = simulation()
    sim.model.layer = nn.Linear(8, 8)
    with sim.in_float(), pytest.warns(UserWarning, match="'norm' is folded into what stood at 'layer'"):
        sim(X)


class UnderModes(Network):
    """The norm runs under a mode of the model's own."""

    def forward(self, x):
        x = self.layer(x)
        with torch.device("cpu"):
            return self.last(self.norm(x).relu())


@pytest.mark.filterwarnings("error:QuantSim.*is folded into")
@pytest.mark.parametrize("in_float", [False, True])
def test_modes_of_the_model_s_own_hide_no_call(in_float):
    model = UnderModes().eval()
    sim = qsim.QuantSim(model, X, qsim.int16())
    sim.calibrate([X], progress=False)
    with sim.in_float() if in_float else contextlib.nullcontext():
        torch.testing.assert_close(sim(X), model(X), rtol=1e-3, atol=1e-3)


def test_a_layer_without_its_norm_is_said_in_float():
    sim = simulation()
    with sim.in_float(), pytest.warns(UserWarning, match=TOLD):
        sim(X, "layer")


@pytest.mark.parametrize("made", [copy.deepcopy, lambda sim: sim.train().eval()], ids=["copied", "trained"])
def test_copies_say_so_too(made):
    sim = made(simulation())
    with pytest.warns(UserWarning, match=TOLD):
        sim(X, "layer")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for quantizer in sim.quantizers().values():
            quantizer.enabled = False
        torch.testing.assert_close(sim(X, "norm"), Network().eval()(X, "norm"))


def test_what_stands_in_its_place_is_a_plain_identity_again_without_a_simulation():
    sim = simulation()
    assert type(sim.model.norm) is nn.Identity
    with pytest.warns(UserWarning, match="'norm' was called by itself, and 'layer', which it is folded into, not before: it normalizes"):
        torch.testing.assert_close(sim.model.norm(X), Network().eval().norm(X))
    assert attach.detach(sim.model).norm(X) is X


@pytest.mark.filterwarnings("ignore:QuantSim")  # of layers that are called by themselves
def test_called_by_themselves():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8)).eval()
    layers[1].running_mean.normal_()
    sim = qsim.QuantSim(layers, X, qsim.int8())
    sim.calibrate([X], progress=False)
    expected, x = layers(X), X
    for layer in sim.model:
        x = layer(x)
    assert (x - expected).abs().max() < 0.02 * expected.abs().max()
    with sim.in_float():
        x = X
        for layer in sim.model:
            x = layer(x)
    torch.testing.assert_close(x, expected)
    torch.testing.assert_close(sim.model[1](X), layers[1](X))


@pytest.mark.parametrize("part", [False, True])
def test_compiled_with_the_simulation_off(part):
    sim = simulation()
    expected = Network().eval()(X)
    with sim.in_float():
        run = sim.model if part else sim
        torch.testing.assert_close(torch.compile(run, backend="eager")(X), expected)


@pytest.mark.filterwarnings("ignore:QuantSim")
@pytest.mark.parametrize("made", [lambda sim: sim, copy.deepcopy], ids=["itself", "copied"])
def test_a_norm_that_was_loaded_normalizes_as_that(made):
    other, sim = Network().eval(), made(simulation())
    with torch.no_grad():
        other.norm.running_var.mul_(4)
        other.norm.bias.add_(0.5)
    sim.load_state_dict(other.state_dict(), strict=False)
    for quantizer in sim.quantizers().values():
        quantizer.enabled = False
    for way in ("both", *ALONE):
        torch.testing.assert_close(sim(X, way), other(X, way))
