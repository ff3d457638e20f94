"""qsim inspect."""

import json

import numpy as np
import onnx
import pytest
import torch
from command import fields, fine, refused
from float_onnx import cache, images, network, run, steps
from torch import nn

import qsim
from qsim.onnx.from_cache import onnx_from_cache

ENCODINGS = {
    "input": qsim.Encoding(torch.tensor(0.1), torch.tensor(-128, dtype=torch.int32), -128, 127),
    "fc.weight": qsim.Encoding(torch.tensor([0.5, 0.25]), torch.zeros(2, dtype=torch.int32), -128, 127, axis=0),
}


def file_of(path, format):
    roles = {"input": "activation", "fc.weight": "parameter"}
    entries = {name: qsim.files.Entry(encoding, roles[name]) for name, encoding in ENCODINGS.items()}
    qsim.save_encodings(qsim.EncodingFile(entries), path, format)
    return path


@pytest.mark.parametrize("format", ["qsim", "aimet-0.6.1", "aimet-1.0.0", "aimet-2.0.0", "aimet-2.1.0"])
def test_every_format(format, capsys, tmp_path):
    path = file_of(tmp_path / "encodings", format)
    text, found = fine(capsys, "inspect", path), fields(capsys, "inspect", path)
    assert f"format {format}" in text
    assert "fc.weight" in text
    assert "0.25 .. 0.5" in text
    assert found["format"] == format
    for name, encoding in ENCODINGS.items():
        assert np.allclose(found["entries"][name]["scale"], encoding.scale.numpy(), rtol=1e-7)
    if format == "qsim":
        assert {name: entry["dtype"] for name, entry in found["entries"].items()} == {"input": "int8", "fc.weight": "int8"}


def test_entries_without_encoding_tell_why(capsys, tmp_path):
    path = tmp_path / "encodings"
    path.write_text(json.dumps({"version": "2.0.0", "encodings": [{"name": "x", "output_dtype": "float4e2m1", "y_scale": 1.0}]}))
    assert "qsim has no grid" in fine(capsys, "inspect", path)
    assert "qsim has no grid" in fields(capsys, "inspect", path)["entries"]["x"]["note"]


def test_caches(capsys, tmp_path):
    path = cache(tmp_path / "cache", {"input": np.float32(1 / 127)})
    assert "tensorrt-cache, version 8501" in fine(capsys, "inspect", path)
    assert np.float32(fields(capsys, "inspect", path)["entries"]["input"]["scale"]) == np.float32(1 / 127)


def test_models_of_others(capsys, tmp_path):
    model = network(tmp_path / "float.onnx")
    report = onnx_from_cache(qsim.load_encodings(cache(tmp_path / "c", steps(model))), model, tmp_path / "m.bin")
    text, found = fine(capsys, "inspect", report.path), fields(capsys, "inspect", report.path)
    assert "made by hand, target tensorrt" in text
    assert set(found["entries"]) == {*report.tensors, *report.weights}
    assert fields(capsys, "inspect", model)["entries"] == {}
    assert found["in_float"] == {}
    assert "conv2" in " ".join(fields(capsys, "inspect", report.path, "--target", "onnxruntime")["in_float"])


def test_models_of_qsim(capsys, tmp_path):
    sim = qsim.QuantSim(nn.Sequential(nn.Linear(4, 3)), torch.randn(2, 4), qsim.int8(target="onnxruntime"))
    sim.calibrate([torch.randn(8, 4)], progress=False)
    report = sim.export(tmp_path / "model.onnx", input_names=["images"])
    found = fields(capsys, "inspect", report.path)
    assert list(found["entries"]) == list(sim.quantizers())
    assert (found["target"], found["made by"]) == ("onnxruntime", f"qsim {qsim.__version__}")
    assert "images" in fields(capsys, "inspect", report.path, "--tensor-names")["entries"]


def test_numeric_logs(capsys, tmp_path):
    network = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with qsim.numeric_log(network, tmp_path / "log"):
        network(torch.ones(3, 2))
        network(torch.full((3, 2), torch.nan))
    assert "first in step" in fine(capsys, "inspect", tmp_path / "log")
    found = fields(capsys, "inspect", tmp_path / "log")
    assert found["first_nonfinite"] == {"0": 1, "1": 1, "": 1}
    assert found["layers"]["0"]["nans"] == [0, 6]
    assert found["layers"]["0"]["rms"][1] is None  # JSON has no NaN


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "expected a file of encodings, a numeric log or an ONNX model"),
        (b"\x80\x04\x95pickle", "expected a file of encodings, a numeric log or an ONNX model"),
        (b"\x08\x07\x12", "is no ONNX model"),
        (b"TRT-8501-EntropyCalibration2\ninput: 00000000\n", "scale 0"),
        (b'{"version": "9.9"}', "expected format"),
        (b"{" * 20, "is no JSON"),
        (b'{"a":' * 100, "100 levels deep"),
        (b'{"format":"qsim-numeric-log-1","layers":["a"],"first_nonfinite":{}}\n{"step":1}\n', "numeric_log does not write"),
        (b'{"format":"qsim-numeric-log-1"}\n', "numeric_log does not write"),
    ],
)
def test_bad_files(data, expected, capsys, tmp_path):
    (tmp_path / "file").write_bytes(data)
    assert expected in refused(capsys, "inspect", tmp_path / "file")


def test_truncated_models(capsys, tmp_path):
    data = network(tmp_path / "float.onnx").read_bytes()
    (tmp_path / "cut.onnx").write_bytes(data[: len(data) // 2])
    assert "is no ONNX model" in refused(capsys, "inspect", tmp_path / "cut.onnx")
    assert run(tmp_path / "float.onnx").shape == (len(images()), 7)
    assert onnx.load(tmp_path / "float.onnx").producer_name == "hand"
