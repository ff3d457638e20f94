"""What was restored is part of a simulation's state: copies say so, states of the float model take it back, scales stay with weights."""

import copy
import dataclasses
import pickle
import re
import warnings

import pytest
import torch
from restorable import batches_of, calibrated, digits_net
from torch import nn

import qsim
from qsim.simulation.config_ranges import other_ranges, told_of_ranges

DATA, INT4 = batches_of(16, 32), qsim.int4()
NOT_FLOAT = "what runs in float is not the float model any more"
NAME = "quantization.restored_weights"
WAYS = {
    "restore": (lambda sim: sim.restore(DATA, progress=False), "4 weights"),
    "distill": (lambda sim: sim.distill(DATA, 200, progress=False), "distillation"),
    "both": (lambda sim: sim.restore(DATA, steps=200, progress=False), "4 weights, distillation"),
    "learn_rounding": (lambda sim: sim.learn_rounding(DATA, steps=50, progress=False), "4 weights"),
    "correct_biases": (lambda sim: sim.correct_biases(DATA, progress=False), "4 weights"),
}


def restored(way="restore", config=INT4):
    sim = calibrated(config=config)
    WAYS[way][0](sim)
    return sim


def restored_with_batch_norm():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3))
    for x in DATA:
        model(x)
    sim = calibrated(model.eval(), dataclasses.replace(INT4, batch_norm="keep"), data=DATA)
    sim.restore(DATA, progress=False)
    return sim


def through_a_state(sim):
    fresh = calibrated(config=sim.config)
    assert fresh.load_state_dict(sim.state_dict()) == ([], [])
    return fresh


def through_a_holder(sim):
    fresh = nn.ModuleDict({"net": qsim.QuantSim(digits_net(), DATA[0], sim.config)})
    fresh.load_state_dict(nn.ModuleDict({"net": sim}).state_dict())
    return fresh["net"]


def through_a_file(sim):
    return pickle.loads(pickle.dumps(sim))


@pytest.mark.parametrize("copied", [through_a_state, through_a_holder, through_a_file, copy.deepcopy])
@pytest.mark.parametrize("way", WAYS)
def test_a_copy_knows_it(way, copied):
    sim = copied(restored(way))
    assert sim.restored == WAYS[way][1]
    with pytest.warns(UserWarning, match=NOT_FLOAT):
        sim.compare(DATA[0])
    with pytest.raises(ValueError, match="solved for already"):
        sim.restore(DATA, progress=False)


def test_another_simulations_state_takes_it_back():
    sim, plain = restored(), calibrated(config=INT4)
    sim.load_state_dict(plain.state_dict())
    assert not sim.restored
    sim.restore(DATA, progress=False)  # not refused


def test_a_state_from_before_it_was_known():
    state = calibrated(config=INT4).state_dict()
    del state[NAME]
    sim, fresh = restored(), calibrated(config=INT4)
    for each in (sim, fresh):
        assert each.load_state_dict(state) == ([], [])
        assert not each.restored
    ranges = {key: t for key, t in state.items() if key.startswith("quantization.")}
    sim = restored()
    sim.load_state_dict(ranges, strict=False)
    assert sim.restored == "4 weights"  # they are still there


@pytest.mark.filterwarnings("ignore:QuantSim. a state without ranges")
@pytest.mark.parametrize("way", WAYS)
def test_a_float_checkpoint_takes_it_back(way):
    model, sim = digits_net(), restored(way)
    expected = calibrated(model, INT4)
    sim.load_state_dict(model.state_dict())
    assert not sim.restored
    sim.calibrate(DATA, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with sim.in_float(), torch.no_grad():
            assert torch.equal(sim(DATA[0]), model(DATA[0]))
    expected.calibrate(DATA, progress=False)
    assert [sim.encodings()[key] for key in sim.weights()] == [expected.encodings()[key] for key in sim.weights()]
    sim.restore(DATA, progress=False)


@pytest.mark.filterwarnings("ignore:QuantSim. a state without ranges")
def test_a_part_of_a_float_checkpoint_takes_that_part_back():
    model, sim = digits_net(), restored("both")
    part = {name: t for name, t in model.state_dict().items() if name.startswith("0.")}
    sim.load_state_dict(part, strict=False)
    assert sim.restored == "3 weights, distillation"
    sim.load_state_dict({name: t for name, t in model.state_dict().items() if name not in part}, strict=False)
    assert sim.restored == "distillation"  # nobody knows of what
    sim.load_state_dict(model.state_dict())
    assert sim.restored == ""


def test_another_targets_simulation_and_one_whose_batch_norms_are_folded_know_it():
    assert restored("both").retarget("tensorrt").restored == "4 weights, distillation"
    sim = restored_with_batch_norm()
    before = sim.restored
    sim.fold_batch_norms()
    assert sim.restored == before != ""


def level(sim):
    model = digits_net()
    with torch.no_grad():
        return sum(float((sim(x) - model(x)).square().sum()) for x in DATA)


AGAIN = {"calibrate": lambda sim: sim.calibrate(DATA, progress=False), "set_method": lambda sim: sim.set_method(None)}
KEPT = (
    r"4 restored weights \('0\.weight', '2\.weight', '4\.weight', \.\.\.\)( and \d activations?)? keep the scales that were solved for, "
    "or learned"
)


@pytest.mark.parametrize("copied", [lambda sim: sim, through_a_state, through_a_file], ids=["itself", "a state", "a file"])
@pytest.mark.parametrize("again", AGAIN)
@pytest.mark.parametrize("way", ["restore", "distill", "both", "learn_rounding"])
def test_choosing_ranges_anew_keeps_the_scales_of_restored_weights(way, again, copied):
    sim, plain = copied(restored(way)), calibrated(config=INT4)
    before, gained = {key: sim.encodings()[key] for key in sim.weights()}, level(sim)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        report = AGAIN[again](sim)
    told = [str(warning.message) for warning in said] if report is None else report.problems
    assert sum(bool(re.search(KEPT, sentence)) for sentence in told) == 1
    assert {key: sim.encodings()[key] for key in sim.weights()} == before
    learned = way in ("distill", "both")
    assert any(re.search(r"and \d activations? keep", sentence) for sentence in told) == learned
    assert level(sim) < level(plain)
    assert level(sim) == gained if learned else level(sim) < 1.5 * gained
    assert all(sim.quantizers()[key].counts.elements == weight.numel() for key, weight in sim.weights().items())
    assert sim.quantizers()["0.weight"].max.max() == sim.model[0].weight.max()  # what is told of a weight is the weight's


@pytest.mark.filterwarnings("ignore:QuantSim. a state without ranges")
@pytest.mark.parametrize("way", ["training", "a layer's state", "a checkpoint", "search", "scales alone"])
def test_other_weights_get_scales_of_their_own(way):
    sim, expected = restored("restore"), calibrated(config=INT4)
    if way == "training":
        for each in (sim, expected):
            with torch.no_grad():
                each.model[0].weight.copy_(digits_net()[0].weight * 0.5)
    elif way == "a layer's state":
        sim.model[0].load_state_dict(digits_net()[0].state_dict())
    elif way == "a checkpoint":
        sim.load_state_dict(digits_net().state_dict())
    else:  # no weight is changed
        sim = calibrated(config=INT4)
        if way == "search":
            sim.search_weight_ranges(DATA, progress=False)
        else:
            sim.model.requires_grad_(False)
            assert sim.distill(DATA, 200, progress=False).kept
        assert sim.encodings()["0.weight"] != expected.encodings()["0.weight"]
    for each in (sim, expected):
        report = each.calibrate(DATA, progress=False)
    assert sim.encodings()["0.weight"] == expected.encodings()["0.weight"]
    assert not any("restored" in sentence for sentence in report.problems)


@pytest.mark.parametrize("change", [lambda sim: sim.half(), lambda sim: sim.model[0].load_state_dict(digits_net()[0].state_dict())])
def test_scales_that_are_chosen_anew_for_restored_weights_are_told(change):
    sim = restored("restore")
    change(sim)
    with pytest.warns(match=r"restored weights? \('0\.weight'.* not as restoration left (it|them) .*: scales are chosen anew there"):
        sim.set_method(None)


def test_a_weight_with_batch_norm_folded_into_it_keeps_its_scale():
    sim = restored_with_batch_norm()
    sim.fold_batch_norms()
    before = sim.encodings()["0.weight"]
    assert any("2 restored weights (" in sentence for sentence in sim.calibrate(DATA, progress=False).problems)
    assert sim.encodings()["0.weight"] == before


def test_what_is_said_of_ranges_is_true():
    sim = restored()
    others = other_ranges(sim)
    assert others
    assert set(others) <= set(sim.weights())
    alone = f"a new simulation with the config has others; sim.set_method(None) keeps the {len(others)} that restoration found"
    assert alone in told_of_ranges(sim)
    with pytest.warns(UserWarning, match=KEPT):
        sim.set_method("minmax")
    assert "sim.set_method(None) goes back to the config's, but for the" in told_of_ranges(sim)
    with pytest.warns(UserWarning, match=KEPT):
        sim.set_method(None)
    assert other_ranges(sim) == others
    assert alone in told_of_ranges(sim)
