"""Sensitivity: beside the metric with quantizers switched by hand, and going on after an interruption."""

import copy
import dataclasses
import json
import math
import sys

import pytest
import torch
import torch.nn.functional as F
from models import ConvNet, Perceptron, seeded

import qsim

X = torch.randn(8, 1, 12, 12, generator=torch.Generator().manual_seed(1))
ROWS = torch.linspace(-2, 2, 32 * 6).reshape(32, 6).sin()


def calibrated(config: qsim.Config | None = None) -> qsim.QuantSim:
    sim = qsim.QuantSim(seeded(Perceptron), ROWS, config)
    sim.calibrate([ROWS], progress=False)
    return sim


def loss(sim, data):
    """Mean squared distance from the float model: lower is better."""
    expected = seeded(Perceptron)
    return sum((sim(x) - expected(x)).square().mean().item() for x in data)


def test_each_quantizer_alone_and_each_operation():
    sim = calibrated(qsim.int4())
    found = sim.sensitivity([ROWS], loss, higher_is_better=False, progress=False)
    assert (found.baseline, found.quantized) == (0, loss(sim, [ROWS]))
    assert [score.name for score in found.scores] == list(sim.quantizers())
    operations = sim.sensitivity([ROWS], loss, higher_is_better=False, groups="operation", progress=False)
    assert [score.keys for score in operations.scores] == [("input",), ("fc1.weight", "fc1.output"), ("fc2.weight", "fc2.output")]
    for score in found.scores + operations.scores:
        sim.disable("*")
        sim.enable(*score.keys)
        assert score.value == loss(sim, [ROWS]), score
    values = [score.value for score in found.ranked()]
    assert values == sorted(values, reverse=True)
    assert found.lost(found.quantized) == found.quantized


def test_the_default_metric_is_the_ratio_at_the_output():
    sim = calibrated()
    found = sim.sensitivity([(ROWS[:16], "target"), (ROWS[16:], "target")], progress=False)
    assert found.baseline == math.inf
    assert found.quantized == pytest.approx(sim.compare(ROWS).output.sqnr, abs=1e-6)
    values = [score.value for score in found.ranked()]
    assert values == sorted(values)
    lines = str(found).splitlines()
    assert "lost dB" in lines[1]
    assert f"{found.ranked()[0].value:.1f}" in lines[3]
    assert found.share(found.quantized) == 1
    for score in found.scores:  # what is left once its noise is gone
        rest = 10 ** (-found.quantized / 10) - 10 ** (-score.value / 10)
        assert found.quantized + found.lost(score.value) == pytest.approx(-10 * math.log10(rest), abs=1e-6)
    assert found.lost(found.quantized) == pytest.approx(30)  # all of it


def test_worst_operations_go_into_a_config():
    model = seeded(ConvNet)
    config = qsim.int8().override("layer1.0.conv2", bits=2)
    sim = qsim.QuantSim(model, X, config)
    sim.calibrate([X], progress=False)
    found = sim.sensitivity([X], progress=False)
    (worst,) = found.worst(1)
    assert worst == "layer1.0.conv2"
    better = qsim.QuantSim(model, X, config.override(worst, bits=8))
    better.calibrate([X], progress=False)
    assert better.compare(X).output.sqnr > sim.compare(X).output.sqnr + 3
    sim.disable(worst)


class Head(torch.nn.Module):
    """A parameter that no layer owns, scaled by another."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 6))
        self.gain = torch.nn.Parameter(torch.rand(6))

    def forward(self, x):
        return F.linear(x * self.gain, self.weight)


def test_names_of_parameters_that_functions_read_are_those_of_the_functions():
    model = seeded(lambda: torch.nn.Sequential(Head(), torch.nn.ReLU()))
    sim = qsim.QuantSim(model, ROWS)
    sim.calibrate([ROWS], progress=False)
    found = sim.sensitivity([ROWS], groups="operation", progress=False)
    groups = {score.name: score.keys for score in found.scores}
    assert groups == {
        "input": ("input",),
        "0.mul": ("0.gain", "0.mul.output"),
        "0.linear": ("0.weight", "0.linear.output"),
    }
    for score in found.scores:
        changed = qsim.QuantSim(model, ROWS, qsim.int8().override(score.operation, bits=4)).quantizers()
        assert tuple(key for key, quantizer in changed.items() if quantizer.spec.bits == 4) == score.keys


def test_names_with_brackets_are_patterns_of_themselves():
    sim = qsim.QuantSim(seeded(Sum), (ROWS, ROWS + 1), qsim.int8())
    sim.calibrate([(ROWS, ROWS + 1)], progress=False)
    names = sim.sensitivity([(ROWS, ROWS + 1)], progress=False).worst(4)
    sim.disable(*names)  # none of them has brackets that mean something
    assert not any(quantizer.enabled for quantizer in sim.quantizers().values())
    left = qsim.QuantSim(Sum().eval(), (ROWS, ROWS + 1), qsim.int8().override(names[-1], off=True))
    assert len(left.quantizers()) == len(sim.quantizers()) - 1


class Sum(torch.nn.Module):
    def forward(self, x, y):
        return (x + y).sigmoid()


def test_the_sim_is_afterwards_as_it_was_also_after_an_error():
    sim = calibrated().train()
    sim.disable("fc1.weight")
    enabled = {key: quantizer.enabled for key, quantizer in sim.quantizers().items()}

    def failing(model, data):
        assert not model.training
        assert not torch.is_grad_enabled()
        raise RuntimeError("metric")

    with pytest.raises(RuntimeError, match="metric"):
        sim.sensitivity([ROWS], failing, progress=False)
    found = sim.sensitivity([ROWS], loss, progress=False)
    assert "fc1.weight" not in [score.name for score in found.scores]
    assert {key: quantizer.enabled for key, quantizer in sim.quantizers().items()} == enabled
    assert all(module.training for module in sim.modules())


def test_an_interrupted_measurement_goes_on(tmp_path):
    sim, path, calls = calibrated(), tmp_path / "scores.json", []
    expected = sim.sensitivity([ROWS], loss, progress=False)

    def measured(model, data):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return loss(model, data)

    with pytest.raises(KeyboardInterrupt):
        sim.sensitivity([ROWS], measured, path=path, progress=False)
    assert len(json.loads(path.read_text())["scores"]) == 3
    assert sim.sensitivity([ROWS], measured, path=path, progress=False) == expected
    assert len(calls) == 4 + len(expected.scores) + 2 - 3
    assert sim.sensitivity([ROWS], measured, path=path, progress=False) == expected
    assert len(calls) == 4 + len(expected.scores) + 2 - 3
    assert [file.name for file in tmp_path.iterdir()] == ["scores.json"]


def test_a_fresh_sim_of_the_same_model_may_go_on(tmp_path):
    path = tmp_path / "scores.json"
    found = calibrated().sensitivity([ROWS], path=path, progress=False)
    assert found.baseline == math.inf  # as text: JSON has none
    assert calibrated().sensitivity("not read", path=path, progress=False) == found


@pytest.mark.parametrize("aspect", ["weights", "config", "encodings", "enabled quantizers", "groups", "metric"])
def test_scores_of_something_else_are_refused(tmp_path, aspect):
    path = tmp_path / "scores.json"
    calibrated().sensitivity([ROWS], loss, path=path, progress=False)
    kept = path.read_bytes()
    other = calibrated(qsim.int4() if aspect == "config" else None)
    if aspect == "weights":
        with torch.no_grad():
            other.model.fc1.bias.add_(1)
    elif aspect == "encodings":
        other.set_method("minmax")
    elif aspect == "enabled quantizers":
        other.disable("input")
    options = {"groups": "operation"} if aspect == "groups" else {}
    metric = None if aspect == "metric" else loss
    with pytest.raises(ValueError, match=rf"something else: .*{aspect}.* differ"):
        other.sensitivity([ROWS], metric, path=path, progress=False, **options)
    assert path.read_bytes() == kept


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": "other", "measured": {}, "scores": {}}'])
def test_files_of_another_kind_are_refused(tmp_path, text):
    path = tmp_path / "scores.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="no file of scores"):
        calibrated().sensitivity([ROWS], path=path, progress=False)
    assert path.read_text() == text


def test_errors_of_arguments():
    sim = calibrated()
    with pytest.raises(TypeError, match="used up after one pass"):
        sim.sensitivity(iter([ROWS]), progress=False)
    with pytest.raises(ValueError, match="groups='layer'"):
        sim.sensitivity([ROWS], groups="layer", progress=False)
    with pytest.raises(TypeError, match="iterable of batches"):
        sim.sensitivity(ROWS, progress=False)
    with pytest.raises(qsim.NoEncodingError, match=r"sim\.calibrate"):
        qsim.QuantSim(seeded(Perceptron), ROWS).sensitivity([ROWS])


def test_nan_is_the_most_sensitive():
    sim = calibrated()
    found = sim.sensitivity([ROWS], lambda model, _: math.nan if model.quantizers()["fc2.weight"].enabled else 1.0, progress=False)
    assert found.ranked()[0].name == "fc2.weight"
    assert found.worst(1) == ["fc2"]


@pytest.mark.parametrize("installed", [True, False])
def test_progress_bar(installed, monkeypatch, capsys):
    if not installed:
        monkeypatch.setitem(sys.modules, "tqdm", None)
        monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    calibrated().sensitivity([ROWS], loss)
    assert ("sensitivity" in capsys.readouterr().err) == installed


REPORTS = {
    "sensitivity": lambda sim, data: sim.sensitivity(data, progress=False),
    "progressive": lambda sim, data: sim.progressive(data, order="forward", progress=False),
    "float plan": lambda sim, data: sim.float_plan(data, target=99.0, progress=False),
    "comparison": lambda sim, data: sim.compare(data[0]),
}


@pytest.mark.parametrize("name", REPORTS)
def test_all_quantizers_of_running_ranges_are_on_in_training_afterwards(name):
    config = dataclasses.replace(qsim.int8(), activation=qsim.TensorSpec(bits=4, method="ema"))
    x = torch.randn(32, 6, generator=torch.Generator().manual_seed(0))
    sim = qsim.QuantSim(seeded(Perceptron), x, config)
    sim.calibrate([x], progress=False)
    sim.disable("fc1.output")
    twin = copy.deepcopy(sim)
    REPORTS[name](sim, [x])
    for each in (sim, twin):
        each.train()
    assert torch.equal(sim(x), twin(x))
