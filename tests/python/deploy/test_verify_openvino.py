"""Models that are written for OpenVINO run there; skipped where it is not installed."""

import math

import onnx
import pytest
import torch
from exported import NETWORKS, simulated
from torch import nn

import qsim
from qsim.onnx import openvino_sessions
from qsim.onnx.sessions import saturates

CONFIG = qsim.int8(target="openvino")


def test_without_openvino_a_report_says_that_its_kernels_did_not_run(tmp_path, monkeypatch):
    monkeypatch.setattr(openvino_sessions, "is_installed", lambda: False)
    report = simulated("perceptron", CONFIG).export(tmp_path / "model.onnx", verify=True)
    assert report.verification.openvino is None
    assert report.verification.times is None
    assert 'its kernels did not run: pip install "qsim[openvino]"' in str(report)


@pytest.mark.parametrize(("config", "noted"), [(CONFIG, True), (CONFIG.override("*", weight={"bits": 7}), False)])
def test_what_cpus_needs_vnni_need_is_noted(config, noted, tmp_path):
    report = simulated("perceptron", config).export(tmp_path / "model.onnx")
    assert any("without VNNI" in note for note in report.notes) == noted


class Tokens(nn.Module):
    """A class token before patches: it is expanded to the batch, whose size the file asks for where it is open."""

    def __init__(self):
        super().__init__()
        self.embed, self.head, self.token = nn.Conv2d(3, 16, 4, 4), nn.Linear(16, 4), nn.Parameter(torch.randn(1, 1, 16))

    def forward(self, x):
        x = self.embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1).relu()
        return self.head(x)


def test_a_file_that_asks_for_sizes_is_noted_and_exact_with_sizes_fixed(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 16, 16)
    sim = qsim.QuantSim(Tokens().eval(), x, CONFIG)
    sim.calibrate([x], progress=False)
    path = tmp_path / "model.onnx"
    assert any("may lose the biases" in note for note in sim.export(path).notes)
    fixed = sim.export(path, dynamic_batch=False, verify=openvino_sessions.is_installed())
    assert not any("may lose the biases" in note for note in fixed.notes)
    if fixed.verification is None:
        pytest.skip('OpenVINO is not installed: pip install "qsim[openvino]"')
    assert sum(difference.mismatching for difference in fixed.verification.borders.values()) <= 2


def test_what_openvino_cannot_load_is_told_and_the_rest_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr(openvino_sessions, "is_installed", lambda: True)
    monkeypatch.setattr(openvino_sessions, "_TRIAL", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    report = simulated("perceptron", CONFIG).export(tmp_path / "model.onnx", verify=True)
    assert "OpenVINO cannot load the file: it ends its process by signal 11" in str(report)
    assert report.verification.openvino is None
    assert report.verification.differences["simulation", "not optimised"]["output"].elements == 2 * 24


@pytest.mark.parametrize("given", [False, True])
def test_inner_integers_become_outputs_and_inputs(given, tmp_path):
    path = tmp_path / "model.onnx"
    simulated("perceptron", CONFIG).export(path)
    model = openvino_sessions.ir.load(path)
    assert openvino_sessions.exposed(model, ["up.output_quantized", "nothing"], given=given) == ["up.output_quantized"]
    assert [value.name for value in model.graph.outputs] == ["output", "up.output_quantized"]
    assert [value.name for value in model.graph.inputs] == ["x", "up.output_quantized_given"][: 1 + given]


@pytest.fixture(scope="module")
def verified(tmp_path_factory):
    pytest.importorskip("openvino", reason='OpenVINO is not installed: pip install "qsim[openvino]"')
    inputs, path = NETWORKS["vision"][1], tmp_path_factory.mktemp("openvino") / "model.onnx"
    return path, simulated("vision", CONFIG).export(path, verify=[inputs(24), inputs(4)])


@pytest.mark.skipif(saturates(), reason="sums of two products saturate on this CPU, which export notes")
def test_its_integers_are_the_simulations(verified):
    path, report = verified
    borders = report.verification.borders
    held = {initializer.name for initializer in onnx.load(path).graph.initializer}
    activations = {name for name in report.names.values() if name not in held}
    assert set(borders) <= activations
    assert len(borders) >= 8
    assert all(difference.step is not None and difference.elements > 0 for difference in borders.values())
    assert sum(difference.mismatching for difference in borders.values()) <= 3  # float32 sums at a tie
    assert max(difference.largest for difference in borders.values()) <= 1
    for output in report.verification.differences["simulation", "OpenVINO"].values():
        assert output.sqnr > 60


def test_it_says_which_version_ran_how_long_it_took_and_what_ran_on_integers(verified):
    import openvino

    _, report = verified
    assert openvino.__version__.startswith(report.verification.openvino)
    assert report.verification.times.runs >= 5
    assert report.verification.in_float == {}
    assert f"OpenVINO {report.verification.openvino}: " in str(report)
    assert "quantizers" in str(report.verification)
    assert ("float", "OpenVINO") in report.verification.differences


def test_a_product_in_float_is_told(tmp_path):
    pytest.importorskip("openvino", reason='OpenVINO is not installed: pip install "qsim[openvino]"')
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval()
    sim = qsim.QuantSim(model, torch.randn(2, 3, 8, 8), CONFIG.override("0", activation=None))
    sim.calibrate([torch.randn(4, 3, 8, 8)], progress=False)
    report = sim.export(tmp_path / "model.onnx", verify=True)
    assert list(report.verification.in_float) == ["2.Conv"]
    assert "not quantized" in report.verification.in_float["2.Conv"]


def test_integers_that_differ_are_counted():
    """The comparison itself, of arrays that are known."""
    from qsim.deploy.verification import Difference, Verification

    difference = Difference(0.5)
    difference.add(torch.tensor([0.0, 0.5, 1.0]).numpy(), torch.tensor([0.0, 1.0, 1.0]).numpy())
    said = str(Verification("1", openvino="2", borders={"a": Difference(0.5, 3), "b": difference}))
    assert "of the integers at 2 quantizers 1 of 6 differ from the simulation's, by at most 1 steps; most at 'b', 1 of 3" in said
    assert math.isfinite(difference.sqnr)
