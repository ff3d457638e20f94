"""Formats other than int8, other granularities and other dtypes of the model: each computes in ONNX Runtime what the simulation says."""

import dataclasses

import numpy as np
import onnx
import pytest
import torch
from exported import computed, constants, expected, nodes
from models import Forward
from onnx import TensorProto
from torch import Tensor, nn

import qsim

X = torch.randn(512, 16, generator=torch.Generator().manual_seed(3)) * 3


class Layers(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 20))


def calibrated(config: qsim.Config, model: nn.Module | None = None, x: Tensor = X) -> qsim.QuantSim:
    torch.manual_seed(0)
    model = Layers() if model is None else model
    sim = qsim.QuantSim(model.to(x.dtype).eval(), x[:2], config)
    sim.calibrate([x[:64]], progress=False)
    return sim


def types(path) -> dict[str, int]:
    return {tensor.name: tensor.data_type for tensor in onnx.load(path).graph.initializer}


def test_int16_needs_opset_21(tmp_path):
    sim, path = calibrated(qsim.int16(target="onnxruntime")), tmp_path / "model.onnx"
    with pytest.raises(qsim.ExportError, match=r"got opset=20, and '0.weight' \(int16\) needs 21; .*Leave opset out"):
        sim.export(path, opset=20)
    assert not path.exists()
    report = sim.export(path)
    assert report.opset == 21
    assert types(path)[report.names["0.weight"]] == TensorProto.INT16
    steps = (expected(sim, X)[0] - computed(path, X)[0]) / sim.encodings()["2.output"].scale.item()
    assert np.abs(steps).max() < 1.5  # sums of float32 are not exact to 16 bits
    assert (np.abs(steps) > 0.5).mean() < 0.02


WITH_BIASES = {
    "linear": (lambda: Layers(), X),
    "grouped": (lambda: nn.Sequential(nn.Conv2d(4, 8, 3, groups=2), nn.ReLU(), nn.Conv2d(8, 4, 1)), X.reshape(-1, 4, 16, 16)),
    "transposed": (lambda: nn.Sequential(nn.ConvTranspose2d(4, 6, 2, 2), nn.ReLU(), nn.Conv2d(6, 4, 1)), X.reshape(-1, 4, 16, 16)),
}


@pytest.mark.parametrize("dead_channel", [False, True])
@pytest.mark.parametrize("name", WITH_BIASES)
def test_no_bias_overflows_in_what_onnxruntime_makes_of_it(name, dead_channel, tmp_path):
    made, x = WITH_BIASES[name]
    torch.manual_seed(0)
    model, path = made(), tmp_path / "model.onnx"
    with torch.no_grad():
        if dead_channel:
            model[0].weight[:, 1] *= 1e-4
            model[0].weight[1] *= 1e-4
        else:
            model[0].bias.mul_(1e4)
    sim = calibrated(qsim.int16(target="onnxruntime"), model, x)
    report = sim.export(path, verify=[x])
    assert any(name.endswith("_int32") for name in types(path))
    for pair in (("simulation", "optimised"), ("on integers", "optimised")):
        assert report.verification.differences[pair]["output"].largest <= 1.5  # sums of float32 are not exact to 16 bits


def test_biases_of_eight_bits_that_onnxruntime_makes_overflow_are_told(tmp_path):
    model, config = Layers(), qsim.int8(target="onnxruntime")
    with torch.no_grad():
        model[0].weight[1] *= 1e-9
    report = calibrated(dataclasses.replace(config, bias=False), model).export(tmp_path / "model.onnx")
    assert any("biases of 0.Gemm int32, where they overflow" in note for note in report.notes)
    report = calibrated(config, model).export(tmp_path / "model.onnx")
    assert not any("overflow" in note for note in report.notes)


@pytest.mark.parametrize("signed", [True, False])
def test_blocks_of_four_bits(signed, tmp_path):
    weight = qsim.TensorSpec(bits=4, symmetric=signed, signed=signed, axis=1, block_size=8)
    sim, path = calibrated(qsim.Config(weight, target="openvino")), tmp_path / "model.onnx"
    report = sim.export(path)
    assert report.opset == 21
    assert types(path)[report.names["0.weight"]] == (TensorProto.INT4 if signed else TensorProto.UINT4)
    held = constants(path)
    assert held["0.weight_scale"].shape == (24, 2)
    np.testing.assert_allclose(computed(path, X)[0], expected(sim, X)[0], atol=1e-5)


def test_tiles_become_blocks_along_one_axis(tmp_path):
    weight = qsim.TensorSpec(bits=4, symmetric=True, axis=(0, 1), block_size=(8, 8))
    sim, path = calibrated(qsim.Config(weight, None, target="onnxruntime")), tmp_path / "model.onnx"
    sim.export(path)
    assert constants(path)["0.weight_scale"].shape == (24, 2)
    np.testing.assert_allclose(computed(path, X)[0], expected(sim, X)[0], atol=1e-5)


def test_a_last_block_may_be_short(tmp_path):
    weight = qsim.TensorSpec(bits=8, symmetric=True, axis=1, block_size=7)
    sim, path = calibrated(qsim.Config(weight, None, target="onnxruntime")), tmp_path / "model.onnx"
    sim.export(path)
    assert constants(path)["0.weight_scale"].shape == (24, 3)
    np.testing.assert_allclose(computed(path, X)[0], expected(sim, X)[0], atol=1e-5)


def test_grids_that_are_narrower_than_their_type_are_clipped(tmp_path):
    config = qsim.int8(target="onnxruntime")
    for activation in ({"bits": 6}, {"symmetric": True, "signed": True, "narrow": True}):
        sim, path = calibrated(config.override(activation=activation)), tmp_path / "model.onnx"
        sim.export(path)
        x = X * 10  # beyond the grid
        np.testing.assert_array_equal(expected(sim, x)[0], computed(path, x)[0])
        assert "Clip" in {node.op_type for node in nodes(path).values()}


def test_float16_overflows_to_inf_unless_it_saturates(tmp_path):
    model = Forward(lambda self, x: x * 3.0)
    for saturate in (None, True):
        config = qsim.fp16(target="onnxruntime").override(activation={"saturate": saturate})
        sim, path = calibrated(config, model, torch.randn(64, 4)), tmp_path / "model.onnx"
        sim.export(path)
        x = torch.tensor([[1e4, 3e4, -3e4, 1e-7], [1.0001, -65504.0, torch.inf, 7e4]])
        mine, theirs = expected(sim, x)[0], computed(path, x)[0]
        np.testing.assert_array_equal(mine, theirs)
        assert np.isinf(mine).any() == (saturate is None)


def test_float16_weights_take_half_the_bytes(tmp_path):
    sim = calibrated(qsim.fp16(target="onnxruntime"))
    report = sim.export(tmp_path / "model.onnx")
    assert types(tmp_path / "model.onnx")[report.names["0.weight"]] == TensorProto.FLOAT16
    np.testing.assert_allclose(computed(tmp_path / "model.onnx", X)[0], expected(sim, X)[0], rtol=1e-3, atol=1e-3)


def test_float8_with_a_scale(tmp_path):
    sim, path = calibrated(qsim.fp8(target="tensorrt")), tmp_path / "model.onnx"
    report = sim.export(path)
    assert report.opset == 19
    assert types(path)[report.names["0.weight"]] == TensorProto.FLOAT8E4M3FN
    mine, theirs = expected(sim, X * 5)[0], computed(path, X * 5)[0]
    np.testing.assert_allclose(mine, theirs, atol=1e-4 * np.abs(mine).max())


def test_weights_of_float8_alone(tmp_path):
    weight = qsim.TensorSpec(dtype="float8_e4m3fn", axis=0)
    sim, path = calibrated(qsim.Config(weight, None, target="openvino")), tmp_path / "model.onnx"
    sim.export(path)
    np.testing.assert_allclose(computed(path, X)[0], expected(sim, X)[0], atol=1e-5)


def test_a_transposed_weight_is_stored_transposed(tmp_path):
    x = torch.randn(64, 5, 16)
    sim, path = calibrated(qsim.int8(target="tensorrt"), x=x), tmp_path / "model.onnx"
    report = sim.export(path)
    made, held = nodes(path), constants(path)
    assert "Transpose" not in {node.op_type for node in made.values()}
    assert held[report.names["0.weight"]].shape == (16, 24)
    products = [node for node in made.values() if node.op_type == "MatMul"]
    assert [made[node.input[1]].attribute[0].i for node in products] == [1, 1]  # the axis of the output channels
    np.testing.assert_allclose(computed(path, x)[0], expected(sim, x)[0], atol=1e-5)


@pytest.mark.parametrize(("dtype", "opset"), [(torch.float16, 19), (torch.bfloat16, 22)])
def test_models_of_half_precision(dtype, opset, tmp_path):
    """Sums differ in half precision, so the model moves values alone: the quantizers themselves are compared."""
    x = X.to(dtype)
    sim, path = (
        calibrated(qsim.int8(target="onnxruntime"), Forward(lambda self, x: x.reshape(-1, 4, 4).transpose(1, 2)), x),
        tmp_path / "m.onnx",
    )
    assert sim.export(path).opset == opset
    if dtype is torch.float16:  # NumPy has no bfloat16
        np.testing.assert_array_equal(expected(sim, x)[0], computed(path, x)[0])


def test_activations_per_channel_stay_where_their_axis_is(tmp_path):
    def forward(self, x):
        return self.fc(x.transpose(1, 2)).transpose(1, 2).flatten(1)

    x = torch.randn(64, 16, 5) * torch.arange(1.0, 17.0)[:, None]
    config = qsim.int8(target="onnxruntime").override("input", activation={"axis": 1, "method": "minmax"})
    config = config.override("fc", activation={"axis": 2, "method": "minmax"})
    sim, path = calibrated(config, Forward(forward, fc=nn.Linear(16, 6)), x), tmp_path / "model.onnx"
    sim.export(path)
    assert {sim.encodings()[key].scale.shape for key in ("input", "fc.output")} == {(16,), (6,)}
    np.testing.assert_allclose(sim.evaluate(x, integer=True).numpy(), expected(sim, x)[0], atol=1e-5)
    np.testing.assert_array_equal(computed(path, x)[0], expected(sim, x)[0])


def test_float64_is_refused(tmp_path):
    sim = calibrated(qsim.int8(target="onnxruntime"), x=X.double())
    with pytest.raises(qsim.ExportError, match=r"is float64, which ONNX does not quantize.*model.float\(\)"):
        sim.export(tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_what_is_off_leaves_no_trace_but_a_note(tmp_path):
    sim, path = calibrated(qsim.int8(target="onnxruntime")), tmp_path / "model.onnx"
    sim.disable("0.output", "2.weight")
    report = sim.export(path)
    assert any("2 quantizers, switched off: 0.output, 2.weight" in note for note in report.notes)
    assert not {"0.output", "2.weight"} & set(report.names)
    assert {name: "goes unquantized" in why for name, why in report.lint.items()} == {"0.Gemm": True}
    np.testing.assert_allclose(computed(path, X)[0], expected(sim, X)[0], atol=1e-5)


def test_a_shared_weight_is_stored_once(tmp_path):
    layer = nn.Linear(16, 16)
    sim, path = calibrated(qsim.int8(target="onnxruntime"), nn.Sequential(layer, nn.ReLU(), layer)), tmp_path / "model.onnx"
    sim.export(path)
    assert len([name for name, value in constants(path).items() if value.dtype == np.int8 and value.ndim == 2]) == 1
    np.testing.assert_array_equal(computed(path, X)[0], expected(sim, X)[0])
