"""The time of a file beside that of the float model."""

import time

import onnx_ir as ir
import pytest
import torch
from exported import NETWORKS, computed, simulated

import qsim
from qsim.deploy import times
from qsim.deploy.tracing import Tracing
from qsim.onnx.export_options import Options
from qsim.trace.runtimes import RUNTIMES

CONFIG = qsim.int8(target="onnxruntime")


class Taking:
    """A session that takes so many milliseconds in each run, by a clock that stands still otherwise."""

    def __init__(self, clock, name, *milliseconds):
        self.clock, self.name, self.milliseconds = clock, name, list(milliseconds)

    def run(self, outputs, inputs):
        self.clock.order.append(self.name)
        self.clock.now += 1e-3 * (self.milliseconds.pop(0) if len(self.milliseconds) > 1 else self.milliseconds[0])


class Clock:
    def __init__(self):
        self.now, self.order = 0.0, []


def test_medians_of_runs_by_turns(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    found = times.measured(Taking(clock, "float", 90, 80, 40), Taking(clock, "int8", 500, 1, 1000, 10), {})
    assert (found.float_ms, found.quantized_ms, found.ratio) == (pytest.approx(40), pytest.approx(10), pytest.approx(0.25))
    assert clock.order == ["float", "int8"] * (found.runs + 2)
    assert clock.now < 2.2
    assert str(found).startswith("10 ms a batch, the float model 40 ms: 0.25 of its time")
    assert str(found).endswith("half of them 0.25 to 0.25)")


def test_long_runs_are_few(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    assert times.measured(Taking(clock, "float", 7000), Taking(clock, "int8", 9000), {}).runs == 5
    found = times.measured(Taking(clock, "float", 5000), Taking(clock, "int8", 1, 1, 25000, 5000, 20000, 10000, 15000), {})
    assert (found.runs, found.ratio, *found.ratios) == (5, pytest.approx(3), pytest.approx(2), pytest.approx(4))


@pytest.mark.parametrize("name", ["vision", "attention"])
def test_the_float_model_is_that_of_the_simulation(name, tmp_path):
    sim, (_, inputs, _) = simulated(name, CONFIG), NETWORKS[name]
    traced = Tracing(sim, RUNTIMES["onnxruntime"])
    path = times.write_float(traced.plain, traced.mark_uses, sim.quantizers(), traced.target, Options(), tmp_path / "float.onnx")
    x = inputs(5)
    with sim.in_float(), torch.no_grad():
        expected = sim(x)
    for got, wanted in zip(computed(path, x), [expected] if torch.is_tensor(expected) else expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(got), wanted, rtol=1e-4, atol=1e-5)
    assert not {node.op_type for node in ir.load(path).graph} & {"QuantizeLinear", "DequantizeLinear"}


def test_a_report_has_them_once_and_the_file_is_not_parsed(tmp_path, monkeypatch):
    read = []
    load = ir.load
    monkeypatch.setattr(ir, "load", lambda path, *args: read.append(path.name) or load(path, *args))
    report = simulated("perceptron", CONFIG).export(tmp_path / "model.onnx", verify=[NETWORKS["perceptron"][1](8)])
    assert set(read) <= {"float.onnx"}
    assert report.verification.times.runs >= 5
    assert str(report).count("of its time") == 1


def test_other_runtimes_are_not_timed(tmp_path):
    report = simulated("perceptron", qsim.int8(target="tensorrt")).export(tmp_path / "model.onnx", verify=True)
    assert report.verification.times is None
    assert "of its time" not in str(report)
