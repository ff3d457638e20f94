"""qsim convert."""

import numpy as np
import pytest
import torch
from command import fine, refused
from float_onnx import cache, images, inputs_of, network, run, steps
from torch import nn

import qsim

AIMET = ["aimet-0.6.1", "aimet-1.0.0", "aimet-2.0.0", "aimet-2.1.0"]


@pytest.fixture
def old(tmp_path):
    return cache(tmp_path / "old.cache", {"x": np.float32(0.1), "relu": np.float32(0.3)})


@pytest.mark.parametrize("format", ["qsim", *AIMET])
def test_a_cache_goes_to_every_format_and_back_to_the_same_bytes(format, old, capsys, tmp_path):
    assert f"wrote 2 encodings as {format}" in fine(capsys, "convert", old, tmp_path / "there", "--format", format)
    assert qsim.load_encodings(tmp_path / "there").format == format
    fine(capsys, "convert", tmp_path / "there", tmp_path / "back.cache")
    assert (tmp_path / "back.cache").read_bytes() == old.read_bytes()


def test_a_cache_and_its_model_become_a_qdq_model(capsys, tmp_path):
    model = network(tmp_path / "float.onnx")
    file = cache(tmp_path / "old.cache", steps(model))
    assert "8 tensors quantized" in fine(capsys, "convert", file, tmp_path / "int8.onnx", "--model", model)
    constants = inputs_of(tmp_path / "int8.onnx")
    assert constants["relu1_scale"] == steps(model)["relu1"]
    assert np.abs(run(tmp_path / "int8.onnx") - run(model)).max() < 0.1 * np.abs(run(model)).max()
    fine(capsys, "convert", tmp_path / "int8.onnx", tmp_path / "again.cache")  # and back
    found = qsim.load_encodings(tmp_path / "again.cache").encodings
    assert {name: encoding.scale.item() for name, encoding in found.items()} == {n: float(steps(model)[n]) for n in found}
    assert len(found) == 8
    assert len(images()) == len(run(model))


@pytest.mark.parametrize("format", ["qsim", *AIMET])
def test_out_of_a_model_into_any_format(format, capsys, tmp_path):
    sim = qsim.QuantSim(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), torch.randn(2, 4), qsim.int8(target="onnxruntime"))
    sim.calibrate([torch.randn(8, 4)], progress=False)
    sim.export(tmp_path / "model.onnx")
    fine(capsys, "convert", tmp_path / "model.onnx", tmp_path / "out", "--format", format)
    sim.save_encodings(tmp_path / "direct", format)
    got, expected = (qsim.load_encodings(tmp_path / name).encodings for name in ("out", "direct"))
    assert got == {name: encoding for name, encoding in expected.items() if not name.endswith(".bias")}


def test_without_and_version(old, capsys, tmp_path):
    fine(capsys, "convert", old, tmp_path / "new.cache", "--without", "rel*", "--cache-version", "10300")
    assert (tmp_path / "new.cache").read_text() == "TRT-10300-EntropyCalibration2\nx: 3dcccccd\n"


def test_what_cannot_be_done_leaves_the_output_as_it_was(old, capsys, tmp_path):
    model, out = network(tmp_path / "float.onnx"), tmp_path / "out.cache"
    out.write_text("before")
    asymmetric = qsim.Encoding(torch.tensor(0.1), torch.tensor(3, dtype=torch.int32), -128, 127)
    qsim.save_encodings(qsim.EncodingFile({"x": qsim.files.Entry(asymmetric, "activation")}), tmp_path / "e.json")
    assert "zero point 3" in refused(capsys, "convert", tmp_path / "e.json", out)
    assert "no entry matches 'nothing'" in refused(capsys, "convert", old, out, "--without", "nothing")
    assert "TRT-<version>" in refused(capsys, "convert", old, out, "--cache-version", "a b")
    assert out.read_text() == "before"
    missing = tmp_path / "missing"
    assert "give the float model" in refused(capsys, "convert", old, missing / "m.onnx")
    assert "there is no folder" in refused(capsys, "convert", old, missing / "m.onnx", "--model", model)
    assert "expected OUT to end in .onnx" in refused(capsys, "convert", old, out, "--model", model)
    assert "expected one of" in refused(capsys, "convert", old, out, "--format", "aimet-9")
    assert "expected --format tensorrt-cache" in refused(capsys, "convert", old, tmp_path / "e", "--cache-version", "1")
    assert "no tensor that can be quantized" in refused(capsys, "convert", old, tmp_path / "m.onnx", "--model", _other(tmp_path))
    assert "expected 'tensorrt-cache'" in refused(capsys, "convert", tmp_path / "e.json", tmp_path / "m.onnx", "--model", model)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["e.json", "float.onnx", "old.cache", "other.onnx", "out.cache"]


def _other(folder):
    """A model without the tensors of the cache."""
    from onnx import TensorProto, helper, save

    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("in", "out")]
    graph = helper.make_graph([helper.make_node("Relu", ["in"], ["out"])], "test", ends[:1], ends[1:])
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), folder / "other.onnx")
    return folder / "other.onnx"


def test_packed_weights_go_from_folder_to_folder(capsys, tmp_path):
    pytest.importorskip("safetensors")
    x = torch.randn(4, 64)
    sim = qsim.QuantSim(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8)).eval(), x, qsim.w4a16(group=32))
    sim.calibrate([x], progress=False)
    sim.round_scales(torch.float16)
    sim.save_compressed(tmp_path / "a")
    assert "wrote 1 weight as gptq" in fine(capsys, "convert", tmp_path / "a", tmp_path / "b", "--format", "gptq")
    fine(capsys, "convert", tmp_path / "b", tmp_path / "c")
    weights = [qsim.load_checkpoint(tmp_path / name).state_dict()["0.weight"] for name in "abc"]
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])
    assert "no other option" in refused(capsys, "convert", tmp_path / "a", tmp_path / "d", "--format", "qsim")
