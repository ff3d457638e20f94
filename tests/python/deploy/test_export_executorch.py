"""Programs for ExecuTorch's XNNPACK backend, run here: the simulation's integers kernel by kernel; skipped where it is not installed."""

import math

import pytest
import torch
import torch.nn.functional as F
from exported import simulated
from torch import nn

import qsim
from qsim.errors import ExportError
from qsim.executorch import session

CONFIG = qsim.int8(target="executorch")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


def test_without_executorch_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "executorch", None)
    sim = simulated("perceptron", CONFIG)
    with pytest.raises(ImportError, match=r"pip install qsim\[executorch\]"):
        sim.export(tmp_path / "model.pte")


needed = pytest.mark.skipif(not session.is_installed(), reason='ExecuTorch is not installed: pip install "qsim[executorch]"')


class Many(nn.Module):
    """Kernels of XNNPACK, what stands between them, and what has none, in parallel branches."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU6())
        self.branches = nn.ModuleList([nn.Conv2d(8, 8, 3, padding=1, groups=groups) for groups in (1, 2, 8, 1, 1, 1, 1, 1)])
        self.up, self.last, self.head = nn.ConvTranspose2d(8, 8, 2, stride=2), nn.Conv2d(24, 8, 1), nn.Linear(8, 5)

    def forward(self, x):
        x = self.stem(x)
        a, b, c, d, e, f, g, h = (branch(x) for branch in self.branches)
        pooled = F.relu(F.max_pool2d(a, 2))  # XNNPACK would make one kernel of the two, which takes one grid for the other
        clamped = F.relu6(F.max_pool2d(b, 2))
        gated = c * F.hardsigmoid(c.mean((2, 3), keepdim=True))
        summed = F.relu(F.relu(d + x) - 0.5 * e)
        floats = F.gelu(f) + g.softmax(1) + F.hardswish(h.clamp(-0.31, 0.29))
        joined = torch.cat([self.up(pooled + clamped), gated, summed + floats.flip(2)], 1)
        return self.head(self.last(joined).mean((2, 3)))


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    torch.manual_seed(0)
    data = [torch.randn(1, 3, 16, 16) for _ in range(4)]
    sim = qsim.QuantSim(Many().eval(), data[0], CONFIG)
    sim.calibrate(data, progress=False)
    path = tmp_path_factory.mktemp("programs") / "many.pte"
    return sim, sim.export(path, verify=data)


@needed
def test_integers_are_the_simulations_at_every_kernel(many):
    _, report = many
    borders = report.verification.borders
    assert len(borders) > 20
    assert sum(d.mismatching for d in borders.values()) <= sum(d.elements for d in borders.values()) // 10_000
    assert max(d.largest for d in borders.values()) <= 1


@needed
def test_outputs_are_the_simulations_and_everything_is_reported(many):
    _, report = many
    verification = report.verification
    (output,) = verification.differences["simulation", "ExecuTorch"].values()
    assert output.largest <= 1
    assert output.step == float(many[0].encodings()["head.output"].scale)
    assert 10 < verification.differences["float", "ExecuTorch"]["output"].sqnr < math.inf
    assert verification.times.quantized_ms > 0
    assert report.target == "executorch"
    assert report.files == {report.path: report.path.stat().st_size}
    assert report.lint == {}
    assert any("softmax" in note and "portable kernels" in note for note in report.notes)
    assert "ExecuTorch" in str(report)
    assert "opset" not in str(report)
    assert "opset" not in report._repr_html_()


@needed
def test_a_file_runs_by_itself(many):
    sim, report = many
    x = torch.randn(1, 3, 16, 16)
    (got,) = session.ExecutorchSession(report.path).run(None, {"x": x.numpy()})
    with torch.no_grad():
        assert float((torch.from_numpy(got) - sim(x)).abs().max()) <= 1.001 * float(sim.encodings()["head.output"].scale)


@needed
def test_products_without_an_integer_kernel_are_named(tmp_path):
    sim = qsim.QuantSim(nn.Sequential(nn.ConvTranspose2d(4, 4, 3, groups=2), nn.Conv2d(4, 2, 1)).eval(), torch.randn(1, 4, 6, 6), CONFIG)
    sim.calibrate([torch.randn(1, 4, 6, 6)], progress=False)
    report = sim.export(tmp_path / "model.pte")
    assert report.lint == {"0": "the weight of a transposed convolution in groups has a scale for each channel"}


@needed
def test_a_simulation_for_another_runtime_goes_over(tmp_path):
    sim = simulated("perceptron", qsim.int8(target="onnxruntime"))  # uint8
    report = sim.export(tmp_path / "model.pte", target="executorch", verify=True)
    assert all(d.largest <= 1 for d in report.verification.differences["simulation", "ExecuTorch"].values())


@needed
def test_what_executorch_cannot_run_is_not_written(tmp_path):
    sim = qsim.QuantSim(nn.Conv3d(2, 4, 3).eval(), torch.randn(1, 2, 6, 6, 6), CONFIG)
    sim.calibrate([torch.randn(1, 2, 6, 6, 6)], progress=False)
    with pytest.raises(ExportError, match="ExecuTorch lowers the model and cannot run it"):
        sim.export(tmp_path / "model.pte")
    assert not list(tmp_path.iterdir())


@needed
def test_a_program_that_computes_something_else_is_told(tmp_path, monkeypatch):
    sim = simulated("perceptron", CONFIG)
    own = session.ExecutorchSession.run
    monkeypatch.setattr(session.ExecutorchSession, "run", lambda self, names, inputs: [-x for x in own(self, names, inputs)])
    with pytest.warns(UserWarning, match="computes something else than the simulation"):
        report = sim.export(tmp_path / "model.pte")
    assert any("computes something else" in note for note in report.notes)


@needed
def test_sizes_are_fixed_unless_left_open(tmp_path):
    sim = simulated("perceptron", CONFIG)
    (x,) = sim.calls[0][0]
    path = tmp_path / "model.pte"
    sim.export(path, dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=16)},))
    more = torch.cat([x, x, x])[:7]
    (got,) = session.ExecutorchSession(path).run(None, {"x": more.numpy()})
    with torch.no_grad():
        assert torch.allclose(torch.from_numpy(got), sim(more), atol=float(2 * sim.encodings()[next(reversed(sim.encodings()))].scale))


@needed
def test_options_and_names_of_onnx_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"model\.onnx' for 'executorch'; expected a name such as 'model\.pte'"):
        simulated("perceptron", CONFIG).export(tmp_path / "model.onnx")
    with pytest.raises(ValueError, match=r"expected a name such as 'model\.onnx'"):
        simulated("perceptron", CONFIG).export(tmp_path / "model.pte", target="onnxruntime")
    with pytest.raises(ValueError, match="opset=19, external_data=True for 'executorch', which reads no ONNX"):
        simulated("perceptron", CONFIG).export(tmp_path / "model.pte", opset=19, external_data=True)
