"""Figures of ranges that a simulation's config does not give: a sentence says so, after each way in which that comes about."""

import dataclasses

import pytest
import torch
from models import Perceptron, seeded

import qsim
from qsim.simulation.config_ranges import other_ranges

ROWS = torch.randn(256, 6, generator=torch.Generator().manual_seed(0))
ROWS[0] *= 4
SAID = "ranges that the config does not give"
PLAIN = qsim.Config(weight=qsim.TensorSpec(bits=4, symmetric=True, axis=0, method="minmax"), activation=qsim.TensorSpec(bits=8))


def calibrated(config=PLAIN):
    sim = qsim.QuantSim(seeded(Perceptron), ROWS, config)
    sim.calibrate(ROWS.split(16), progress=False)
    return sim


def loaded(sim, path):
    other = calibrated()
    other.set_method("minmax")
    other.save_encodings(path)
    sim.load_encodings(path)


def learned(sim, _):
    with torch.no_grad():
        sim.quantizers()["input"].scale.mul_(1.5)


WAYS = {
    "method": lambda sim, _: sim.set_method("minmax"),
    "search": lambda sim, _: sim.search_weight_ranges(ROWS.split(16), progress=False),
    "load": loaded,
    "learn": learned,
    "state": lambda sim, _: sim.load_state_dict(_with_method("minmax").state_dict()),
}


def _with_method(method):
    sim = calibrated()
    sim.set_method(method)
    return sim


@pytest.mark.parametrize("way", WAYS)
def test_each_report_says_so(way, tmp_path):
    sim = calibrated()
    assert other_ranges(sim) == []
    reports = [sim.sensitivity([ROWS], progress=False), sim.float_plan([ROWS], target=12.0, progress=False)]
    assert not any(report.ranges or SAID in str(report) for report in reports)
    WAYS[way](sim, tmp_path / "encodings.json")
    alone = sim.sensitivity([ROWS], progress=False)
    reports = [
        alone,
        sim.sensitivity([ROWS], lambda *_: 0.0, progress=False),
        sim.progressive([ROWS], order="forward", progress=False),
        sim.float_plan([ROWS], target=12.0, progress=False),
        sim.float_plan([ROWS], target=-99.0, sensitivity=sim.sensitivity([ROWS], groups="operation", progress=False)),
    ]
    assert all(SAID in str(report) for report in reports)
    assert SAID in alone.page().html()
    sim.set_method(None)
    assert other_ranges(sim) == []


def test_plans_of_the_configs_ranges_hold_in_a_new_simulation():
    sim = _with_method("minmax")
    told = sim.float_plan([ROWS], target=12.0, progress=False)
    assert qsim.Plan.from_json(told.to_json()) == told
    sim.set_method(None)
    plan = sim.float_plan([ROWS], target=12.0, progress=False)
    assert plan.ranges == ""
    new = calibrated(sim.config.with_plan(plan))
    assert new.sensitivity([ROWS], progress=False).quantized == pytest.approx(plan.sqnr, abs=1e-6)


def test_a_search_of_bits_goes_by_the_config():
    pytest.importorskip("scipy")
    options = {"budget": qsim.Budget(tensors=0.4), "candidates": (4, 8), "probes": 4, "progress": False}
    assert SAID not in str(calibrated().search_bits([ROWS], **options))
    assert "goes by the ranges of the config; here" in str(_with_method("minmax").search_bits([ROWS], **options))


@pytest.mark.parametrize("config", [qsim.int8(), qsim.fp16(), qsim.w8a8_dynamic(), qsim.int8(target="tensorrt")], ids=lambda c: "")
def test_nothing_is_said_of_a_calibrated_simulation(config):
    sim = calibrated(config)
    sim.calibrate(ROWS.split(8), progress=False)
    assert other_ranges(sim) == []
    sim.disable("input")
    assert other_ranges(sim) == []


def test_running_ranges_are_not_looked_at():
    running = dataclasses.replace(qsim.int8(), activation=qsim.TensorSpec(method="ema"))
    sim = calibrated(running)
    assert other_ranges(sim) == []


def test_the_configs_method_comes_back():
    sim = calibrated()
    before = sim.encodings()
    sim.set_method("percentile", percentile=80.0)
    assert sim.encodings() != before
    sim.set_method(None)
    assert sim.encodings() == before
    assert {key: q.spec for key, q in sim.quantizers().items()} == {key: p.spec for key, p in sim.decisions.quantizers.items()}
