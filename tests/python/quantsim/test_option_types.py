"""Options of another type than they are for: told where they are given, by name, and not by what breaks of them later."""

import pytest
import torch
from torch import nn

import qsim

IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)).eval()


@pytest.fixture(scope="module")
def sim():
    made = qsim.QuantSim(network(), IMAGES, qsim.Config(batch_norm="keep"))
    made.calibrate([IMAGES], progress=False)
    return made


def metric(sim, data):
    return sum(float(sim(batch).sum()) for batch in data)


NUMBERS = {
    "compare": (lambda sim, value: sim.compare(IMAGES, memory=value), "memory"),
    "param_groups": (lambda sim, value: sim.param_groups(value), "lr"),
    "param_groups, scales": (lambda sim, value: sim.param_groups(scale_lr=value), "scale_lr"),
    "param_groups, decay": (lambda sim, value: sim.param_groups(bias_decay=value), "bias_decay"),
    "float_plan": (lambda sim, value: sim.float_plan([IMAGES], metric, target=value), "target"),
    "float_plan, probes": (lambda sim, value: sim.float_plan([IMAGES], metric, target=0.0, probes=value), "probes"),
    "float_plan, seconds": (lambda sim, value: sim.float_plan([IMAGES], metric, target=0.0, seconds=value), "seconds"),
    "progressive": (lambda sim, value: sim.progressive([IMAGES], metric, max_drop=value), "max_drop"),
    "progressive, seconds": (lambda sim, value: sim.progressive([IMAGES], metric, seconds=value), "seconds"),
    "monitor": (lambda sim, value: sim.monitor(print, every=value), "every"),
    "schedule": (lambda sim, value: sim.schedule(quantize_from=value), "quantize_from"),
    "schedule, globs": (lambda sim, value: sim.schedule(quantize_from={"*": value}), r"quantize_from\['\*'\]"),
    "schedule, end": (lambda sim, value: sim.schedule(observe_until=value), "observe_until"),
    "doctor": (lambda sim, value: qsim.doctor(network(), [IMAGES], probes=value), "probes"),
    "doctor, seconds": (lambda sim, value: qsim.doctor(network(), [IMAGES], seconds=value), "seconds"),
    "doctor, sqnr": (lambda sim, value: qsim.doctor(network(), [IMAGES], sqnr=value), "sqnr"),
    "numeric_log": (lambda sim, value: qsim.numeric_log(network(), "log", max_bytes=value), "max_bytes"),
}
FLAGS = {
    "QuantSim": (lambda sim, value: qsim.QuantSim(network(), IMAGES, inplace=value), "inplace"),
    "float_plan": (lambda sim, value: sim.float_plan([IMAGES], metric, target=0.0, higher_is_better=value), "higher_is_better"),
    "sensitivity": (lambda sim, value: sim.sensitivity([IMAGES], metric, higher_is_better=value), "higher_is_better"),
    "progressive": (lambda sim, value: sim.progressive([IMAGES], metric, higher_is_better=value), "higher_is_better"),
    "search_bits": (
        lambda sim, value: sim.search_bits([IMAGES], metric, budget=qsim.Budget(size=0.3), higher_is_better=value),
        "higher_is_better",
    ),
    "quantize": (lambda sim, value: qsim.quantize(network(), IMAGES, [IMAGES], metric, higher_is_better=value), "higher_is_better"),
    "monitor": (lambda sim, value: sim.monitor(print, histograms=value), "histograms"),
    "solve_weights": (lambda sim, value: sim.solve_weights([IMAGES], follow_inputs=value), "follow_inputs"),
    "freeze_batch_norms": (lambda sim, value: sim.freeze_batch_norms("*", affine=value), "affine"),
    "evaluate": (lambda sim, value: sim.evaluate(IMAGES, integer=value), "integer"),
    "load_encodings": (lambda sim, value: sim.load_encodings("file", strict=value), "strict"),
    "export": (lambda sim, value: sim.export("model.onnx", dynamic_batch=value), "dynamic_batch"),
    "override": (lambda sim, value: qsim.int8().override("4", off=value), "off"),
    "profile": (lambda sim, value: qsim.Profile("mine", lone_norms=value), "lone_norms"),
}
PATTERNS = {
    "disable": lambda sim, value: sim.disable(value),
    "enable": lambda sim, value: sim.enable(value),
    "fallback": lambda sim, value: sim.fallback([value]),
    "freeze_batch_norms": lambda sim, value: sim.freeze_batch_norms(value),
}


@pytest.mark.parametrize("value", ["1e-3", True, [1], float("nan")], ids=["text", "flag", "list", "nan"])
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers(sim, name, value):
    call, option = NUMBERS[name]
    with pytest.raises((TypeError, ValueError), match=rf"(?i){name.partition(',')[0]}: got {option}=.*; expected"):
        call(sim, value)


@pytest.mark.parametrize("value", ["no", None, 1], ids=["text", "none", "number"])
@pytest.mark.parametrize("name", FLAGS)
def test_flags(sim, name, value):
    call, option = FLAGS[name]
    with pytest.raises(TypeError, match=rf"(?i){name}: got {option}={value!r}; expected True or False"):
        call(sim, value)


@pytest.mark.parametrize("value", [None, 3, ["4"]], ids=["none", "number", "list"])
@pytest.mark.parametrize("name", PATTERNS)
def test_patterns(sim, name, value):
    with pytest.raises(TypeError, match=r"got the pattern .*; expected a name or glob"):
        PATTERNS[name](sim, value)


def test_rates_in_tensors_are_taken(sim):
    groups = sim.param_groups(torch.tensor(1e-3), weight_decay=0.01)
    assert groups[0]["lr"] == torch.tensor(1e-3)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: qsim.int8().override("4", weight=4), r"got weight=4; expected a TensorSpec, fields of one \(weight=\{'bits': 4\}\)"),
        (lambda: qsim.int8().override(op_type=3), "got op_type=3; expected a glob"),
        (lambda: qsim.Config(overrides=3), "got overrides=3; expected a tuple of Override"),
        (lambda: qsim.Config(batch_norm=True), "got batch_norm=True; expected a policy"),
        (lambda: qsim.Profile("mine", chains=("Conv",)), "got chains=.*; expected a tuple of tuples"),
        (lambda: qsim.Profile("mine", rules=("Conv",)), "got rules=.*; expected a tuple of Override"),
        (lambda: qsim.Profile("mine", weight=3), "got weight=3; expected fields of a TensorSpec"),
        (lambda: qsim.Quantizer("int8"), "got spec='int8'; expected a qsim.TensorSpec"),
        (lambda: qsim.fold_batch_norms(network(), IMAGES, keep="1"), r"got keep='1'; expected the paths"),
        (lambda: qsim.doctor(network(), [IMAGES], forward="x"), r"got forward='x'; expected a function, forward\(model, batch\)"),
        (lambda: qsim.equalize(network(), IMAGES, [IMAGES], forward="x"), "got forward='x'; expected a function"),
        (lambda: qsim.QuantSim(network(), IMAGES).calibrate([IMAGES], "x"), "got forward='x'; expected a function"),
        (lambda: qsim.QuantSim(network(), IMAGES, qsim.Config(batch_norm="keep")).freeze_batch_norms(), "got no pattern; expected globs"),
    ],
)
def test_others(call, says):
    with pytest.raises(TypeError, match=says):
        call()


def test_paths_to_keep_that_are_none():
    with pytest.raises(ValueError, match="got 'bn' in keep, which is no module"):
        qsim.fold_batch_norms(network(), IMAGES, keep=["bn"])


def test_no_group_is_one_scale_an_output_channel():
    weight = qsim.w4a16(None).weight
    assert (weight.axis, weight.block_size) == (0, None)
