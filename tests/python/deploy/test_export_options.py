"""What an export is given: checked before anything is written; and autocast, which is no part of a model."""

import pytest
import torch
from exported import simulated
from torch import nn

import qsim
from qsim.errors import ExportError

CONFIG = qsim.int8(target="onnxruntime")


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"external_data": "yes"}, TypeError, "got external_data='yes'; expected True or False"),
        ({"external_data": 1}, TypeError, "got external_data=1; expected True or False"),
        ({"accuracy_level": 1.0}, ValueError, "got accuracy_level=1.0; expected 0, 1, 2, 3, 4 or None"),
        ({"forward": 3}, TypeError, "got forward=3; expected a function"),
    ],
)
def test_options_of_another_type_are_refused(options, error, said, tmp_path):
    with pytest.raises(error, match=f"QuantSim.export: {said}"):
        simulated("perceptron", CONFIG).export(tmp_path / "model.onnx", **options)
    assert not list(tmp_path.iterdir())


def test_a_folder_in_the_place_of_the_tensors_is_named(tmp_path):
    (tmp_path / "model.onnx.data").mkdir()
    with pytest.raises(IsADirectoryError, match=r"a folder is where the tensors of '.*model\.onnx' would be: 'model\.onnx\.data'; move it"):
        simulated("perceptron", CONFIG).export(tmp_path / "model.onnx", external_data=True)
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx.data"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_around_an_export_changes_nothing(dtype, tmp_path):
    sim = simulated("perceptron", CONFIG)
    (x,) = sim.calls[0][0]
    sim.export(tmp_path / "plain.onnx")
    expected = sim.evaluate(x, integer=True)
    for key in [key for key in sim.derived if "programs" in str(key)]:
        del sim.derived[key]
    with torch.autocast("cpu", dtype):
        report = sim.export(tmp_path / "model.onnx", verify=[x])
        found = sim.evaluate(x, integer=True)
        program = qsim.QuantSim.quantized_program(sim.retarget("executorch"))
        assert torch.is_autocast_enabled("cpu")
    assert torch.equal(found, expected)
    assert report.verification.differences["on integers", "optimised"]["output"].mismatching == 0
    assert (tmp_path / "model.onnx").read_bytes() == (tmp_path / "plain.onnx").read_bytes()
    assert program.module()(x).dtype is torch.float32


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_integers_cannot_hold_is_refused_by_name(name, value, tmp_path):
    torch.manual_seed(0)
    x = torch.randn(8, 4)
    sim = qsim.QuantSim(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)).eval(), x, CONFIG)
    sim.calibrate([x], progress=False)
    before = sim.evaluate(x, integer=True)
    own = getattr(sim.model[2], name)
    with torch.no_grad():
        kept = own.clone()
        own.view(-1)[0] = value
    with pytest.raises(ValueError, match=rf"QuantSim\.integer: NaN or Inf in '2\.{name}'; expected finite numbers"):
        sim.evaluate(x, integer=True)
    with pytest.raises(ExportError, match=rf"'2\.{name}': holds NaN or Inf, which integers cannot"):
        sim.export(tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())
    with torch.no_grad():
        own.copy_(kept)
    assert torch.equal(sim.evaluate(x, integer=True), before)
