"""Calibration caches become Q/DQ models."""

import dataclasses

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from float_onnx import CHANNELS, SHAPES, cache, images, inputs_of, network, run, steps

import qsim
from qsim.onnx.encodings import read_onnx_encodings
from qsim.onnx.from_cache import onnx_from_cache

QUANTIZED = ["x", "relu1", "relu2", "up", "pooled", "flat", "fc1", "fc2"]
FLOAT = {"conv1": "one kernel", "conv2": "reads the other operand", "sum": "one kernel", "product": "one kernel", "y": "only leaves"}


@pytest.fixture
def made(tmp_path):
    model = network(tmp_path / "float.onnx")
    file = qsim.load_encodings(cache(tmp_path / "old.cache", {**steps(model), "(Unnamed Layer* 3) [Constant]_output": np.float32(1)}))
    return model, file, onnx_from_cache(file, model, tmp_path / "int8.onnx")


def test_tensors_have_the_scales_of_the_cache_to_the_bit(made):
    model, _, report = made
    written, constants = onnx.load(report.path), inputs_of(report.path)
    quantizers = {node.input[0]: node for node in written.graph.node if node.op_type == "QuantizeLinear"}
    assert sorted(quantizers) == sorted(QUANTIZED) == sorted(report.tensors)
    for name, scale in steps(model).items():
        if name in quantizers:
            _, step, zero_point = quantizers[name].input
            assert constants[step].tobytes() == scale.tobytes()
            assert constants[zero_point].dtype == np.int8
            assert constants[zero_point] == 0


def test_what_is_left_in_float_is_told(made):
    _, _, report = made
    assert set(report.skipped) == {*FLOAT, "(Unnamed Layer* 3) [Constant]_output"}
    assert all(reason in report.skipped[name] for name, reason in FLOAT.items())
    assert "no such tensor" in str(report)


@pytest.mark.parametrize("name", CHANNELS)
def test_weights_are_int8_per_output_channel(made, name):
    model, _, report = made
    w, stored = inputs_of(model)[name], inputs_of(report.path)
    axis = CHANNELS[name]
    largest = np.abs(np.moveaxis(w, axis, 0)).reshape(w.shape[axis], -1).max(1)
    assert np.array_equal(stored[f"{name}_scale"], largest / np.float32(127))
    back = stored[f"{name}_quantized"] * np.expand_dims(stored[f"{name}_scale"], [i for i in range(w.ndim) if i != axis])
    assert np.abs(stored[f"{name}_quantized"].astype(int)).max() == 127
    assert (np.abs(back - w) <= 0.501 * stored[f"{name}_scale"].max()).all()
    assert name not in stored  # the float weights are gone
    assert name in report.weights


def test_biases_stay_in_float(made):
    model, _, report = made
    for name in ("b1", "b4", "b6"):
        assert np.array_equal(inputs_of(model)[name], inputs_of(report.path)[name])


def test_onnxruntime_computes_what_the_scales_say(made):
    """PyTorch's own fake-quantization at the same tensors is the oracle."""
    model, _, report = made
    scales, held = steps(model), {name: torch.tensor(values) for name, values in inputs_of(model).items()}

    def q(name: str, t: torch.Tensor) -> torch.Tensor:
        return torch.fake_quantize_per_tensor_affine(t, float(scales[name]), 0, -128, 127)

    def w(name: str) -> torch.Tensor:
        t, axis = held[name], CHANNELS[name]
        scale = t.abs().amax([i for i in range(len(SHAPES[name])) if i != axis]) / 127
        return torch.fake_quantize_per_channel_affine(t, scale, torch.zeros(len(scale), dtype=torch.int32), axis, -127, 127)

    x = q("relu1", F.relu(F.conv2d(q("x", torch.tensor(images())), w("w1"), held["b1"], padding=1)))
    x = q("relu2", F.relu(F.conv2d(x, w("w2"), padding=1) + x))
    x = q("flat", q("pooled", q("up", F.conv_transpose2d(x, w("w3"), stride=2)).mean((2, 3))))
    x = q("fc2", q("fc1", F.linear(x, w("w4"), held["b4"])) @ w("w5")) @ w("w6") + held["b6"]
    np.testing.assert_allclose(run(report.path), x.numpy(), atol=1e-5)
    assert not np.allclose(run(report.path), run(model), atol=1e-3)  # the quantizers do something


def test_the_scales_read_back(made):
    _, file, report = made
    found = read_onnx_encodings(report.path)
    assert {name: found.encodings[name] for name in QUANTIZED} == {name: file.encodings[name] for name in QUANTIZED}
    assert sorted(found.parameters) == sorted(CHANNELS)


def test_models_of_old_opsets_are_converted(tmp_path):
    model = network(tmp_path / "old.onnx", opset=11)
    report = onnx_from_cache(qsim.load_encodings(cache(tmp_path / "c", steps(model))), model, tmp_path / "int8.onnx")
    assert {opset.version for opset in onnx.load(report.path).opset_import} == {13}
    assert np.abs(run(report.path) - run(model)).max() < 0.1 * np.abs(run(model)).max()


def test_channels_of_zeros(tmp_path):
    model = onnx.load(network(tmp_path / "float.onnx"))
    for tensor in model.graph.initializer:
        if tensor.name == "w1":
            values = onnx.numpy_helper.to_array(tensor).copy()
            values[2] = 0
            tensor.CopyFrom(onnx.numpy_helper.from_array(values, "w1"))
    onnx.save(model, tmp_path / "zero.onnx")
    file = qsim.load_encodings(cache(tmp_path / "c", steps(tmp_path / "zero.onnx")))
    report = onnx_from_cache(file, tmp_path / "zero.onnx", tmp_path / "int8.onnx")
    assert inputs_of(report.path)["w1_scale"][2] > 0
    assert np.isfinite(run(report.path)).all()


def test_what_does_not_fit_is_an_error_and_nothing_is_written(made, tmp_path):
    model, file, report = made
    out = tmp_path / "out.onnx"
    others = qsim.load_encodings(cache(tmp_path / "other.cache", {"nothing": np.float32(1)}))
    with pytest.raises(qsim.FileFormatError, match=r"no tensor that can be quantized among the 1 of the cache, such as 'nothing'"):
        onnx_from_cache(others, model, out)
    with pytest.raises(qsim.FileFormatError, match="has QuantizeLinear already"):
        onnx_from_cache(file, report.path, out)
    with pytest.raises(ValueError, match="got a file of the format 'qsim'; expected 'tensorrt-cache'"):
        onnx_from_cache(dataclasses.replace(file, format="qsim"), model, out)
    assert not out.exists()


def test_a_tensor_that_the_model_returns_too_stays_as_it_was(tmp_path):
    path = network(tmp_path / "float.onnx")
    model = onnx.load(path)
    model.graph.output.append(onnx.ValueInfoProto(name="relu1"))
    onnx.save(onnx.shape_inference.infer_shapes(model), path)
    scales = {"relu1": np.float32(0.5)}
    report = onnx_from_cache(qsim.load_encodings(cache(tmp_path / "c", scales)), path, tmp_path / "int8.onnx")
    with_output = onnx.load(report.path)
    assert [value.name for value in with_output.graph.output] == ["y", "relu1"]
    (quantizer,) = (node for node in with_output.graph.node if node.op_type == "QuantizeLinear")
    assert quantizer.input[0] == "relu1"
