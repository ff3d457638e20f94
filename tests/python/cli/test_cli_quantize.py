"""`qsim quantize`, `compare` and `completion`."""

import numpy as np
import onnxruntime
import pytest
import torch
from command import fine, refused, run
from torch import nn

import qsim


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)).eval()
    names = {"input_names": ["x"], "output_names": ["y"], "dynamic_shapes": ({0: torch.export.Dim("batch")},)}
    torch.onnx.export(net, (torch.ones(2, 3, 8, 8),), str(folder / "float.onnx"), dynamo=True, verbose=False, **names)
    np.savez(folder / "data.npz", x=np.random.default_rng(0).normal(size=(32, 3, 8, 8)).astype(np.float32))
    return folder


def test_quantize(folder, capsys):
    out = folder / "int8.onnx"
    arguments = ["quantize", folder / "float.onnx", "--data", folder / "data.npz", "--batch-size", 8, "--output", out]
    text = fine(capsys, *arguments, "--target", "onnxruntime", "--sqnr", 20)
    assert "quantized 4 activations, 2 weights, 2 biases" in text
    assert "float / optimised" in text
    y = onnxruntime.InferenceSession(out).run(None, {"x": np.zeros((5, 3, 8, 8), np.float32)})[0]
    assert y.shape == (5, 4)
    code, text, _ = run(capsys, *arguments, "--sqnr", 200)
    assert (code, "200 were asked for" in text) == (1, True)
    again = folder / "minmax.onnx"
    fine(capsys, *arguments[:-1], again, "--method", "minmax")
    assert fine(capsys, "compare", out, out).endswith(" tensors in both, 0 differ\n")
    code, text, _ = run(capsys, "compare", out, again)
    assert (code, "scale differs by" in text or "zero point differs by" in text) == (1, True)


def test_what_cannot_be_quantized(folder, capsys, tmp_path):
    model, data = folder / "float.onnx", folder / "data.npz"
    assert "is the float model" in refused(capsys, "quantize", model, "--data", data, "--output", model)
    assert "there is no folder" in refused(capsys, "quantize", model, "--data", data, "--output", tmp_path / "no" / "m.onnx")
    assert "expected one of 'onnxruntime'" in refused(
        capsys, "quantize", model, "--data", data, "--output", tmp_path / "m.onnx", "--target", "tflite"
    )
    np.savez(tmp_path / "other.npz", x=np.zeros((1, 1, 8, 8), np.float32))
    assert "the model takes float32 of" in refused(
        capsys, "quantize", model, "--data", tmp_path / "other.npz", "--output", tmp_path / "m.onnx"
    )
    assert not (tmp_path / "m.onnx").exists()


def test_compare_encodings(capsys, tmp_path):
    sims = [qsim.QuantSim(nn.Linear(3, 2), torch.ones(1, 3)) for _ in range(2)]
    for number, sim in enumerate(sims):
        sim.calibrate([torch.linspace(-1, 1 + number, 12).reshape(4, 3)], progress=False)
        sim.save_encodings(tmp_path / f"{number}.json")
    code, text, _ = run(capsys, "compare", tmp_path / "0.json", tmp_path / "1.json")
    assert code == 1
    assert "input" in text


def test_completion(capsys):
    pytest.importorskip("shtab")
    text = fine(capsys, "completion", "bash")
    assert "quantize" in text
    assert "--batch-size" in text


def test_a_float_model_has_nothing_to_compare(folder, capsys, tmp_path):
    """What a first user tries: the model beside its integers."""
    for command in (
        ["compare", folder / "float.onnx", folder / "float.onnx"],
        ["report", folder / "float.onnx", "--output", tmp_path / "page.html"],
    ):
        message = refused(capsys, *command)
        assert "float.onnx': has no QuantizeLinear and no DequantizeLinear: it is a float model" in message
        assert "qsim verify INT8.onnx --data BATCH.npz --reference FLOAT.onnx" in message
    assert not list(tmp_path.iterdir())
