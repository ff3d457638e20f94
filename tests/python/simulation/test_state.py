"""State dicts of a simulation: names, float checkpoints, checkpoints of simulations, and what does not fit."""

import copy
import dataclasses
import warnings

import pytest
import torch
from models import ConvNet, Forward, Perceptron, seeded, trained
from torch import Tensor, nn

import qsim

IMAGES = torch.randn(4, 1, 12, 12, generator=torch.Generator().manual_seed(1))
ROWS = torch.randn(16, 6, generator=torch.Generator().manual_seed(2))


def simulated(model: nn.Module, x: Tensor, config: qsim.Config | None = None, *, calibrate: bool = True) -> qsim.QuantSim:
    sim = qsim.QuantSim(model, x, config)
    if calibrate:
        sim.calibrate([x], progress=False)
    return sim


def named_badly() -> nn.Module:
    """Its modules are called as those of a simulation are."""
    torch.manual_seed(0)
    return Forward(
        lambda self, x: self.quantization(self.model.input(x)),
        model=nn.ModuleDict({"input": nn.Linear(6, 6)}),
        quantization=nn.Linear(6, 3),
    ).eval()


@pytest.mark.parametrize("build", [lambda: seeded(Perceptron), named_badly])
def test_the_models_entries_keep_their_names(build):
    model, sim = build(), simulated(build(), ROWS)
    state = sim.state_dict()
    names = list(model.state_dict())
    assert [key for key in state if key in names] == names
    assert all(key.startswith("quantization.") for key in state if key not in names)
    assert state.keys() == simulated(build(), ROWS, calibrate=False).state_dict().keys()
    assert all(torch.equal(state[key], t) for key, t in model.state_dict().items())


@pytest.mark.parametrize("build", [lambda: (seeded(ConvNet), IMAGES), lambda: (named_badly(), ROWS)])
def test_a_state_loads_into_a_fresh_simulation(build):
    model, x = build()
    sim, fresh = simulated(model, x), simulated(copy.deepcopy(model), x, calibrate=False)
    with torch.no_grad():
        for p in sim.parameters():
            p.mul_(1.1)
    assert fresh.load_state_dict(sim.state_dict()) == ([], [])
    assert torch.equal(fresh(x), sim(x))
    assert fresh.encodings() == sim.encodings()
    fresh.set_method("minmax")  # what was observed came along
    sim.set_method("minmax")
    assert fresh.encodings() == sim.encodings()


@pytest.mark.parametrize(
    "wrap", [lambda sim: nn.Sequential(sim), lambda sim: Forward(None, a=nn.ModuleDict({"sim": sim}), b=nn.Linear(2, 2))]
)
def test_a_simulation_is_part_of_a_module(wrap):
    sim, fresh = simulated(seeded(Perceptron), ROWS), simulated(seeded(Perceptron), ROWS, calibrate=False)
    outer, state = wrap(fresh), wrap(sim).state_dict()
    assert not any("model" in key for key in state)
    outer.load_state_dict(state)
    assert fresh.encodings() == sim.encodings()


@pytest.mark.parametrize("build", [lambda: (trained(Perceptron()), ROWS), lambda: (trained(ConvNet()), IMAGES)])
def test_a_float_checkpoint_loads(build):
    other, x = build()
    kind = type(other)
    sim = simulated(seeded(kind), x)
    encodings = sim.encodings()
    assert sim.load_state_dict(other.state_dict()) == ([], [])
    assert sim.encodings() == encodings  # until it is calibrated again
    expected = simulated(other, x)  # BatchNorms folded
    for name, p in expected.model.named_parameters():
        assert torch.equal(sim.model.get_parameter(name), p)
    sim.calibrate([x], progress=False)  # what was observed with other parameters is forgotten
    assert sim.encodings() == expected.encodings()
    assert torch.equal(sim(x), expected(x))


@pytest.mark.filterwarnings("ignore:QuantSim. a state without ranges")
def test_calibrating_forgets_what_other_parameters_showed():
    kind = type(trained(ConvNet()))
    model = seeded(kind)
    with torch.no_grad():
        model.stem[0].weight.mul_(100)  # what it computes has ranges that no other has
    sim, other = simulated(seeded(kind), IMAGES, dataclasses.replace(qsim.int8(), batch_norm="keep")), trained(ConvNet())
    expected = simulated(other, IMAGES, dataclasses.replace(qsim.int8(), batch_norm="keep")).encodings()
    part = {name.removeprefix("stem."): t for name, t in other.state_dict().items() if name.startswith("stem.")}
    for load in (lambda: sim.load_state_dict(other.state_dict()), lambda: sim.model.load_state_dict(other.state_dict())):
        sim.load_state_dict(model.state_dict())
        sim.calibrate([IMAGES], progress=False)
        assert sim.encodings() != expected
        load()
        sim.calibrate([IMAGES], progress=False)
        assert sim.encodings() == expected
        sim.load_state_dict(sim.state_dict())  # with ranges
        sim.calibrate([IMAGES], progress=False)  # adds up
        assert sim.quantizers()["input"].observer.counts.elements == 2 * IMAGES.numel()
    sim.load_state_dict(model.state_dict())
    sim.calibrate([IMAGES], progress=False)
    sim.model.load_state_dict({name: t for name, t in other.state_dict().items() if not name.startswith("stem.")}, strict=False)
    sim.model.stem.load_state_dict(part)
    sim.calibrate([IMAGES], progress=False)
    assert sim.encodings() == expected


@pytest.mark.parametrize("way", ["a layer's state", "data", "a new parameter", "an optimizer", "statistics"])
def test_calibrating_forgets_what_other_parameters_showed_however_they_changed(way):
    def change(model):
        layer = model.stem[0]
        if way == "a layer's state":
            layer.load_state_dict({name: t * 0.01 for name, t in layer.state_dict().items()})
        elif way == "data":
            layer.weight.data.mul_(0.01)
        elif way == "a new parameter":
            layer.weight = torch.nn.Parameter(layer.weight.detach() * 0.01)
        elif way == "an optimizer":
            layer.weight.grad = layer.weight.detach() * 0.99
            torch.optim.SGD([layer.weight], 1.0).step()
        else:
            model.stem[1].running_var.fill_(1e4)

    config = dataclasses.replace(qsim.int8(), batch_norm="keep")
    sim = simulated(seeded(ConvNet), IMAGES, config)
    change(sim.model)
    again = copy.deepcopy(sim)
    model = seeded(ConvNet)
    change(model)
    expected = simulated(model, IMAGES, config).encodings()
    for each in (sim, again):
        each.calibrate([IMAGES], progress=False)
        assert each.encodings() == expected
        each.calibrate([IMAGES], progress=False)  # adds up
        assert each.quantizers()["input"].observer.counts.elements == 2 * IMAGES.numel()


def test_what_no_batch_reaches_after_other_parameters_keeps_what_it_has():
    def either(model, x, second=False):
        return model.b(x) if second else model.a(x)

    sim = qsim.QuantSim(Forward(either, a=nn.Linear(6, 6), b=nn.Linear(6, 6)), [(ROWS, False), (ROWS, True)])
    sim.calibrate([(ROWS, False), (ROWS, True)], progress=False)
    before, held = sim.encodings(), sim.quantizers()["b.output"].counts
    with torch.no_grad():
        sim.model.a.weight.mul_(0.1)
    message = "'b.output' was reached by no batch since the parameters changed, and keeps its range. Calibrate with data that reach it"
    assert message in sim.calibrate([(ROWS, False)], progress=False).problems
    assert sim.quantizers()["b.output"].counts == held
    assert [key for key, found in sim.encodings().items() if found != before[key]] == ["a.weight", "a.output"]
    with pytest.raises(ValueError, match="batch 1"):
        sim.calibrate([(ROWS, True), (ROWS[:, :2], True)], progress=False)
    assert sim.quantizers()["b.output"].counts == held  # of this call alone
    assert sim.calibrate([(ROWS, False)], progress=False).problems == []


def test_a_float_checkpoint_loads_after_batch_norm_was_trained_and_folded():
    sim, other = simulated(seeded(ConvNet), IMAGES, dataclasses.replace(qsim.int8(), batch_norm="keep")), trained(ConvNet())
    assert sim.load_state_dict(other.state_dict()) == ([], [])  # nothing is folded yet
    assert torch.equal(sim.state_dict()["stem.1.running_mean"], other.state_dict()["stem.1.running_mean"])
    assert "stem.1" in sim.fold_batch_norms().folded
    assert sim.load_state_dict(other.state_dict()) == ([], [])
    with sim.in_float():
        torch.testing.assert_close(sim(IMAGES), other(IMAGES), rtol=1e-4, atol=1e-4)


def test_a_simulations_state_loads_into_the_float_model():
    sim, model = simulated(trained(Perceptron()), ROWS), seeded(Perceptron)
    missing, unexpected = model.load_state_dict(sim.state_dict(), strict=False)
    assert missing == []
    assert all(key.startswith("quantization.") for key in unexpected)
    with sim.in_float():
        assert torch.equal(model(ROWS), sim(ROWS))


def test_a_float_checkpoint_with_half_of_its_batch_norms_is_an_error():
    sim, state = simulated(seeded(ConvNet), IMAGES), trained(ConvNet()).state_dict()
    del state["layer1.0.bn1.running_mean"]
    with pytest.raises(RuntimeError, match=r"(?s)'layer1\.0\.bn1', which has part in folding.*running_mean"):
        sim.load_state_dict(state, strict=False)


def test_what_is_missing_or_unknown_has_the_models_names():
    sim = simulated(seeded(Perceptron), ROWS)
    state = sim.state_dict()
    del state["fc1.bias"], state["quantization.fc1/weight.scale"]
    state |= {"fc3.weight": torch.ones(1), "quantization.fc3/weight.scale": torch.ones(1)}
    found = sim.load_state_dict(state, strict=False)
    assert found.missing_keys == ["fc1.bias", "quantization.fc1/weight.scale"]
    assert found.unexpected_keys == ["fc3.weight", "quantization.fc3/weight.scale"]
    with pytest.raises(RuntimeError, match=r"fc1\.bias"):
        sim.load_state_dict(state)


def test_a_state_of_other_bits_names_the_quantizers():
    state = simulated(seeded(Perceptron), ROWS, qsim.int4()).state_dict()
    sim = simulated(seeded(Perceptron), ROWS, calibrate=False)
    with pytest.raises(
        RuntimeError, match=r"'fc1\.weight': the state is of another spec: .*\[-8\.0, 7\.0, 0\.0\].*\[-128\.0, 127\.0, 0\.0\]"
    ):
        sim.load_state_dict(state, strict=False)
    with pytest.raises(qsim.NoEncodingError):
        sim(ROWS)


def test_a_state_that_is_loaded_beside_the_simulation_is_told():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    x = torch.randn(8, 4)
    sim = qsim.QuantSim(model, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sim.model.load_state_dict(model.state_dict())  # it has no ranges yet
        sim.calibrate([x], progress=False)
        sim.load_state_dict(sim.state_dict())
        copy.deepcopy(sim)
    with pytest.warns(UserWarning, match="without ranges"):
        sim.model.load_state_dict(model.state_dict())
    with pytest.warns(UserWarning, match="without ranges"):
        sim.model[1].load_state_dict(model[1].state_dict())


def test_a_state_with_ranges_of_weights_that_are_folded_here_is_an_error():
    kept = dataclasses.replace(qsim.int8(), batch_norm="keep")
    sim, other = simulated(trained(ConvNet()), IMAGES), simulated(trained(ConvNet()), IMAGES, kept)
    before = other.state_dict()
    with pytest.raises(RuntimeError, match="BatchNorms are not folded, as they are here"):
        sim.load_state_dict(before)
    other.fold_batch_norms()
    with pytest.raises(RuntimeError, match=r"before sim\.fold_batch_norms"):
        other.load_state_dict(before, strict=False)


def test_a_layer_without_the_batch_norm_that_is_folded_into_it_is_an_error():
    sim, other = simulated(seeded(ConvNet), IMAGES), trained(ConvNet())
    layers = {name: t for name, t in other.state_dict().items() if t.dim() == 4}
    with pytest.raises(RuntimeError, match=r"'stem\.0' as it was before 'stem\.1' was folded"):
        sim.load_state_dict(layers, strict=False)
    head = {name: t for name, t in other.state_dict().items() if name.startswith("fc")}
    assert head
    with pytest.warns(UserWarning, match="without ranges"):
        sim.load_state_dict(head, strict=False)
