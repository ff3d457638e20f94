"""The file itself: names, metadata, sizes, what is written when, and errors before anything is."""

import json
import os
import subprocess
import sys

import numpy as np
import onnx
import onnx.checker
import pytest
import torch
from exported import NETWORKS, computed, expected, exported, simulated
from models import Forward
from torch import nn
from torch.utils._pytree import tree_leaves

import qsim
from qsim.graph.execute.marks import Mark

CONFIG = qsim.int8(target="onnxruntime")


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, left, right):
        return {"sum": self.fc(left) + right, "parts": (self.fc(right), left * right)}


def calibrated(model: nn.Module, *inputs: torch.Tensor, **options) -> qsim.QuantSim:
    torch.manual_seed(0)
    sim = qsim.QuantSim(model.eval(), inputs, CONFIG, **options)
    sim.calibrate([inputs], progress=False)
    return sim


def named() -> qsim.QuantSim:
    return calibrated(Named(), torch.randn(8, 6), torch.randn(8, 6))


def ends(path):
    graph = onnx.load(path).graph
    return [end.name for end in graph.input], [end.name for end in graph.output]


def test_inputs_and_outputs_have_the_names_of_the_model(tmp_path):
    sim, path = named(), tmp_path / "model.onnx"
    sim.export(path)
    assert ends(path) == (["left", "right"], ["sum", "parts_0", "parts_1"])
    left, right = torch.randn(32, 6), torch.randn(32, 6)
    mine = sim(left, right)
    for x, y in zip([mine["sum"], *mine["parts"]], computed(path, left, right), strict=True):
        np.testing.assert_array_equal(x.detach().numpy(), y)


def test_names_can_be_given(tmp_path):
    sim, path = named(), tmp_path / "model.onnx"
    report = sim.export(path, input_names=["a", "b"], output_names=["x", "fc.output_quantized", "z"])
    assert ends(path) == (["a", "b"], ["x", "fc.output_quantized", "z"])
    assert report.names["fc.weight"] == "fc.weight_quantized"
    for names in (["a"], ["a", "a"]):
        with pytest.raises(qsim.ExportError, match=r"input_names=.*expected 2 different names, for left, right"):
            sim.export(path, input_names=names)


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: (m.fc(x), x),
        lambda m, x: {"y": m.fc(x), "x": x, "again": x},
        lambda m, x: (lambda y: (y, y))(m.fc(x)),
    ],
)
@pytest.mark.parametrize("config", [CONFIG, CONFIG.override("input", off=True)])
def test_what_comes_back_as_it_went_in_or_twice_has_names_of_its_own(tmp_path, forward, config):
    x = torch.randn(4, 6)
    sim = qsim.QuantSim(Forward(forward, fc=nn.Linear(6, 3)), x, config)
    sim.calibrate([x], progress=False)
    report = sim.export(tmp_path / "model.onnx", verify=[x])
    graph = onnx.load(tmp_path / "model.onnx").graph
    names = [end.name for end in graph.output]
    assert [end.name for end in graph.input] == ["args_0"]
    assert len(set(names)) == len(names) == len(tree_leaves(sim(x)))
    assert all(node.name for node in graph.node)
    for got, simulated_here in zip(computed(tmp_path / "model.onnx", x), tree_leaves(sim(x)), strict=True):
        assert np.array_equal(got, simulated_here.detach().numpy())
    assert report.verification is not None
    assert report.verification.times is not None


def test_a_single_number_that_forward_makes_is_traced(tmp_path):
    x = torch.randn(4, 6)
    sim = qsim.QuantSim(Forward(lambda m, x: torch.minimum(m.fc(x), torch.tensor(0.1)), fc=nn.Linear(6, 3)), x, qsim.fp16())
    sim.calibrate([x], progress=False)
    sim.export(tmp_path / "model.onnx")
    assert np.array_equal(computed(tmp_path / "model.onnx", x), expected(sim, x))


@pytest.mark.parametrize("target", ["onnxruntime", "tensorrt", "openvino", "coreml"])
def test_tensors_that_are_plain_attributes_are_quantized_and_written(tmp_path, target):
    """Means and deviations, anchors and strides of a detector: neither parameters nor buffers."""
    x = torch.randn(4, 3, 6, 6)
    model = Forward(lambda m, x: m.conv((x - m.mean) / m.deviation) * m.strides, conv=nn.Conv2d(3, 5, 3))
    model.mean, model.deviation, model.strides = torch.randn(3, 1, 1), torch.rand(3, 1, 1) + 0.5, torch.arange(1.0, 6.0).view(5, 1, 1)
    sim = qsim.QuantSim(model, x, qsim.int8(target=target))
    sim.calibrate([x], progress=False)
    sim.export(tmp_path / "model.onnx")
    np.testing.assert_allclose(computed(tmp_path / "model.onnx", x)[0], expected(sim, x)[0], atol=1e-5)


def test_a_mark_is_not_computed_by_who_runs_a_graph():
    with pytest.raises(NotImplementedError, match="a mark is no operator"):
        Mark("key")(torch.rand(3))


def test_every_quantizer_maps_to_a_tensor_and_its_encoding_comes_along():
    path, report = exported("vision", CONFIG)
    sim, model = simulated("vision", CONFIG), onnx.load(path)
    held = {entry.key: entry.value for entry in model.metadata_props}
    tensors = {name for node in model.graph.node for name in node.output} | {tensor.name for tensor in model.graph.initializer}
    assert set(report.names) == set(sim.quantizers())
    assert json.loads(held["qsim.names"]) == report.names
    assert set(report.names.values()) <= tensors
    assert len(set(report.names.values())) == len(report.names)
    encodings = {key: qsim.Encoding.from_dict(fields) for key, fields in json.loads(held["qsim.encodings"]).items()}
    assert encodings == sim.encodings()
    assert (held["qsim.target"], held["qsim.version"], model.producer_name) == ("onnxruntime", qsim.__version__, "qsim")


def test_nodes_are_named_by_modules_and_nothing_of_this_machine_is_told():
    path, _ = exported("vision", CONFIG)
    model = onnx.load(path)
    names = [node.name for node in model.graph.node]
    assert len(set(names)) == len(names)
    assert {"stem.Conv", "depthwise.Conv", "up.ConvTranspose", "squeeze.Gemm", "head.Gemm"} <= set(names)
    raw = path.read_bytes()
    assert os.getcwd().encode() not in raw
    assert b".py" not in raw


def test_the_batch_can_be_fixed(tmp_path):
    sim, path = named(), tmp_path / "model.onnx"
    sim.export(path, dynamic_batch=False)
    shapes = [[d.dim_value for d in end.type.tensor_type.shape.dim] for end in onnx.load(path).graph.input]
    assert shapes == [[8, 6], [8, 6]]
    sim.export(path)
    assert [end.type.tensor_type.shape.dim[0].dim_param for end in onnx.load(path).graph.input] == ["batch", "batch"]


def test_a_fixed_batch_is_told(tmp_path):
    sim = calibrated(Forward(lambda self, x: self.fc(x) * float(len(x)), fc=nn.Linear(4, 2)), torch.randn(3, 4))
    report = sim.export(tmp_path / "model.onnx")
    assert any("batch size is fixed to 3" in note for note in report.notes)
    with pytest.raises(ValueError, match=r"got a batch whose 'args_0' has shape \(5, 4\); model.onnx takes \(3, 4\)"):
        sim.export(tmp_path / "model.onnx", verify=[torch.randn(5, 4)])


IN_PARTS = {
    "for": lambda self, x: torch.stack([self.fc(part) for part in x]),
    "names": lambda self, x: (lambda query, key, value: query * key + value)(*self.fc(x)),
    "unbind": lambda self, x: x.unbind()[0] * self.fc(x.unbind(0)[2]),
    "view": lambda self, x: torch.cat([self.fc(part).view(part.shape[0], -1) for part in x], 1).view(len(x), -1),
}


@pytest.mark.parametrize("in_parts", IN_PARTS)
@pytest.mark.parametrize("dynamic_batch", [True, False])
def test_a_first_axis_that_is_taken_apart_is_fixed(tmp_path, in_parts, dynamic_batch):
    x = torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(0))
    sim, path = calibrated(Forward(IN_PARTS[in_parts], fc=nn.Linear(4, 4)), x), tmp_path / "model.onnx"
    sim.export(path, dynamic_batch=dynamic_batch)
    assert [d.dim_value for d in onnx.load(path).graph.input[0].type.tensor_type.shape.dim] == [3, 4, 4]
    with sim.integer():
        np.testing.assert_allclose(computed(path, x)[0], expected(sim, x)[0], rtol=1e-5, atol=1e-6)


def test_external_data(tmp_path):
    sim, path = named(), tmp_path / "model.onnx"
    report = sim.export(path, external_data=True)
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(file.name for file in report.files)
    assert {file.name for file in report.files} == {"model.onnx", "model.onnx.data"}
    assert all(file.stat().st_size == size for file, size in report.files.items())
    left, right = torch.randn(32, 6), torch.randn(32, 6)
    np.testing.assert_array_equal(sim(left, right)["sum"].detach().numpy(), computed(path, left, right)[0])


def test_a_failed_export_leaves_what_was_there(tmp_path, monkeypatch):
    sim, path = named(), tmp_path / "model.onnx"
    path.write_text("old")

    def refuses(*args, **kwargs):
        raise onnx.checker.ValidationError("not today")

    monkeypatch.setattr(onnx.checker, "check_model", refuses)
    for external in (False, True):
        with pytest.raises(qsim.ExportError, match=r"onnx.checker refuses the model, and nothing was written: not today"):
            sim.export(path, external_data=external)
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]
    assert path.read_text() == "old"
    monkeypatch.undo()
    sim.export(path)
    assert onnx.load(path).producer_name == "qsim"


def test_errors_come_before_anything_is_written(tmp_path):
    sim = named()
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*nowhere"):
        sim.export(tmp_path / "nowhere" / "model.onnx")
    with pytest.raises(IsADirectoryError, match="is a folder"):
        sim.export(tmp_path)
    with pytest.raises(
        ValueError, match="got target='tflite'; expected one of 'onnxruntime', 'tensorrt', 'openvino', 'executorch', 'coreml'"
    ):
        sim.export(tmp_path / "model.onnx", "tflite")
    with pytest.raises(qsim.ExportError, match="got opset=99; the installed onnx knows opsets up to"):
        sim.export(tmp_path / "model.onnx", opset=99)
    with pytest.raises(qsim.ExportError, match="got opset=13, and a Q/DQ model as qsim writes it needs 19"):
        sim.export(tmp_path / "model.onnx", opset=13)
    fresh = qsim.QuantSim(Named().eval(), (torch.randn(8, 6), torch.randn(8, 6)), CONFIG)
    with pytest.raises(qsim.NoEncodingError, match="no batch was calibrated"):
        fresh.export(tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_an_unobserved_tensor_is_named(tmp_path):
    sim = named()
    sim.quantizers()["fc.output"].reset()
    sim.quantizers()["fc.output"].scale.fill_(torch.nan)
    sim.quantizers()["fc.output"]._has_encoding = False
    with pytest.raises(qsim.NoEncodingError, match=r"'fc.output'"):
        sim.export(tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_what_the_exporter_cannot_translate_is_an_error_with_its_reason(tmp_path):
    sim = calibrated(nn.Sequential(Forward(lambda self, x: torch.linalg.eigvalsh(x @ x.transpose(1, 2)))), torch.randn(4, 3, 3))
    expected = r"cannot translate this model: ONNX has no aten._linalg_eigh \('_linalg_eigh' in '0' at \w+.py, line \d+\)\. Write it with"
    with pytest.raises(qsim.ExportError, match=expected):
        sim.export(tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_complex_numbers_are_named_as_such(tmp_path):
    """ONNX's "has no unsqueeze" would be puzzling."""
    turn = torch.polar(torch.ones(4), torch.arange(4.0))
    model = nn.Sequential(Forward(lambda self, x: torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (4, 2))) * turn.unsqueeze(0))))
    with pytest.raises(qsim.ExportError, match=r"computes with complex numbers; ONNX has few: write them as pairs"):
        calibrated(model, torch.randn(4, 3, 8)).export(tmp_path / "model.onnx")


def test_pooling_from_open_sizes_says_so(tmp_path):
    sim = calibrated(nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(4)), torch.randn(2, 3, 9, 9))
    with pytest.raises(
        qsim.ExportError, match=r"adaptive average pooling from sizes that are open to \[4, 4\].*'adaptive_avg_pool2d' in '1'"
    ):
        sim.export(tmp_path / "model.onnx", dynamic_shapes=({2: torch.export.Dim("h", min=8), 3: torch.export.Dim("w", min=8)},))


def test_a_model_in_training_mode_is_written_in_eval_mode_and_stays(tmp_path):
    sim, path = simulated("vision", CONFIG), tmp_path / "model.onnx"
    x = NETWORKS["vision"][1](4)
    mine = expected(sim, x)
    before = {name: t.clone() for name, t in sim.state_dict().items()}
    sim.train()
    try:
        sim.export(path, verify=[x])
        assert sim.training
        assert sim.model.dropout.training
    finally:
        sim.eval()
    np.testing.assert_array_equal(computed(path, x)[0], mine[0])
    assert all(torch.equal(t, before[name]) for name, t in sim.state_dict().items())


def test_without_onnx_one_error_says_what_to_install():
    code = """
import sys
sys.modules["onnxscript"] = None
import torch, qsim
sim = qsim.QuantSim(torch.nn.Linear(2, 2).eval(), torch.randn(2, 2))
sim.calibrate([torch.randn(4, 2)], progress=False)
try:
    sim.export("model.onnx")
except ImportError as error:
    print(error)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "pip install qsim[onnx]" in ran.stdout, ran.stderr


@pytest.mark.parametrize(
    "squeezed",
    [lambda y: y.squeeze(1), lambda y: y.squeeze((1, 2)).unsqueeze(-1), lambda y: y.squeeze(-1)],
    ids=["none", "one of two", "one"],
)
@pytest.mark.parametrize("target", ["onnxruntime", "openvino"])
def test_axes_that_are_longer_than_one_are_squeezed_as_torch_does(squeezed, target, tmp_path):
    """It leaves them, as PixArt has it; ONNX refuses."""
    model, x = Forward(lambda m, x: squeezed(m.a(x)), a=nn.Linear(4, 1)).eval(), torch.randn(2, 1, 5, 4).repeat(1, 3, 1, 1)[:, :, :1]
    sim = qsim.QuantSim(model, x, qsim.w4a16(target=target) if target == "openvino" else qsim.int8(target=target))
    sim.calibrate([x], progress=False)
    sim.export(tmp_path / "model.onnx")
    found = computed(tmp_path / "model.onnx", x)[0]
    assert found.shape == sim(x).shape
    np.testing.assert_allclose(found, sim(x).detach().numpy(), atol=1e-3)
