"""What the reports and logs write to a logger is what they hold."""

import pytest
import torch
from torch import nn

import qsim

X = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))


class Kept:
    def __init__(self):
        self.steps = {}

    def log(self, figures, step):
        self.steps.setdefault(step, {}).update(figures)


def kept(report, step=0):
    logger = Kept()
    report.log(logger, step)
    return logger.steps[step]


@pytest.fixture(scope="module")
def sim():
    torch.manual_seed(0)
    sim = qsim.QuantSim(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval(), X, qsim.int8(target="onnxruntime"))
    sim.calibrate([X], progress=False)
    return sim


def test_calibration_and_summary(sim):
    x = X.clone()
    x[0, 0] = torch.nan
    other = qsim.QuantSim(sim.model[0].__class__(8, 4).eval(), X, qsim.int4())
    report = other.calibrate([x], progress=False)
    found = kept(report, 3)
    assert found["batches"] == 1
    assert found["nonfinite/input"] == 1
    for row in other.summary().rows[:3]:
        assert (found[f"range_low/{row.key}"], found[f"range_high/{row.key}"]) == (row.low, row.high)
        assert found[f"clipped/{row.key}"] == row.clipped
    histograms = report.figures().histograms
    assert histograms["observed/input"].counts.sum() == X.numel() - 1
    assert histograms["observed/weight"].counts.sum() == 32
    edges = histograms["observed/input"].edges
    finite = x[x.isfinite()]
    assert (edges[0], edges[-1]) == (finite.min(), finite.max())


def test_comparison(sim):
    comparison = sim.compare(X)
    found = kept(comparison)
    assert found["sqnr/output"] == comparison.output.sqnr
    assert found["sqnr_accumulated/2.output"] == comparison["2.output"].accumulated.sqnr
    assert found["sqnr_local/0.weight"] == comparison["0.weight"].local.sqnr


def test_sensitivity_progressive_bits_diagnosis_export(sim, tmp_path):
    sensitivity = sim.sensitivity([X], progress=False)
    worst = sensitivity.ranked()[0]
    assert kept(sensitivity)[f"lost_alone/{worst.name}"] == sensitivity.lost(worst.value)
    progressive = sim.progressive([X], order="forward", progress=False)
    assert kept(progressive)["metric/quantized"] == progressive.steps[-1].value
    search = sim.search_bits([X], budget=qsim.Budget(tensors=0.5), candidates=(4, 8), probes=0, progress=False)
    assert {name: value for name, value in kept(search).items() if name.startswith("bits/")} == {
        f"bits/{key}": bits for key, bits in search.best.bits.items()
    }
    diagnosis = qsim.doctor(nn.Linear(8, 2), [X * 1e6], "tensorrt-fp16", progress=False)
    assert kept(diagnosis)["findings/error"] == sum(finding.severity == "error" for finding in diagnosis.findings) > 0
    exported = sim.export(tmp_path / "model.onnx", verify=[X])
    found = kept(exported)
    assert found["bytes/model.onnx"] == (tmp_path / "model.onnx").stat().st_size
    assert [value for name, value in found.items() if name.startswith("differ/on integers and optimised/")] == [0.0]


def test_a_numeric_log_is_written_step_by_step(tmp_path):
    model, logger = nn.Sequential(nn.Linear(8, 4), nn.ReLU()), Kept()
    with qsim.numeric_log(model, tmp_path / "log"):
        for factor in (1.0, 2.0, torch.inf):
            model(X * factor)
    log = qsim.read_numeric_log(tmp_path / "log")
    log.log(logger)
    assert list(logger.steps) == [0, 1, 2]
    assert [figures["max/0"] for figures in list(logger.steps.values())[:2]] == log["0"].max[:2]
    assert logger.steps[2]["nans/0"] + logger.steps[2]["infs/0"] == log["0"].nonfinite[2] > 0
    assert "rms/(the model)" in logger.steps[0]
    assert "rms/0" not in logger.steps[2]  # NaN
