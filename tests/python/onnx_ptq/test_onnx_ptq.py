"""Float ONNX models quantized without a Python model: ONNX Runtime is the oracle."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import qsim
from qsim.onnx.sessions import session


class Network(nn.Module):
    """Convolutions with a branch, a pool, a concatenation and a classifier; a BatchNorm that is folded."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.left, self.right, self.head = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1, bias=False), nn.Linear(16, 4)

    def forward(self, x):
        x = torch.relu(self.norm(self.stem(x)))
        x = torch.max_pool2d(x, 2)
        y = torch.relu(x + self.left(x))
        x = torch.cat([y, torch.sigmoid(self.right(x))], 1)
        return self.head(x.mean((2, 3)))


def batches(seed=0):
    generator = np.random.default_rng(seed)
    return [{"x": generator.normal(size=(8, 3, 16, 16)).astype(np.float32)} for _ in range(3)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.manual_seed(0)
    network = Network().eval()
    nn.init.uniform_(network.norm.running_var, 0.5, 2.0)
    path = tmp_path_factory.mktemp("float") / "float.onnx"
    names = {"input_names": ["x"], "output_names": ["y"]}
    torch.onnx.export(network, (torch.ones(8, 3, 16, 16),), str(path), dynamo=True, verbose=False, **names)
    return path


def test_onnx_runtime_runs_it_on_integers(model, tmp_path):
    report = qsim.quantize_onnx(model, batches(), tmp_path / "int8.onnx", progress=False)
    saved = tmp_path / "optimised.onnx"
    ran = session(tmp_path / "int8.onnx", save=saved)
    kernels = {node.op_type for node in onnx.load(saved).graph.node}
    assert {"QLinearConv", "QLinearAdd", "QLinearConcat", "QLinearSigmoid", "QGemm"} <= kernels
    assert not {"Conv", "FusedConv", "Gemm"} & kernels
    assert report.lint == {}
    assert (report.weights, report.biases) == (4, 3)
    plain, others = session(model), batches(seed=1)
    errors = [(plain.run(None, batch)[0], ran.run(None, batch)[0]) for batch in others]  # data that it was not calibrated on
    signal, noise = sum(float((x**2).sum()) for x, _ in errors), sum(float(((x - y) ** 2).sum()) for x, y in errors)
    assert 10 * np.log10(signal / noise) > 25
    assert report.worst > 25
    assert [value.name for value in onnx.load(tmp_path / "int8.onnx").graph.output] == ["y"]


def test_scales_are_those_of_our_observers(model, tmp_path):
    qsim.quantize_onnx(model, batches(), tmp_path / "int8.onnx", method="minmax", progress=False)
    found = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(tmp_path / "int8.onnx").graph.initializer}
    pixels = np.concatenate([batch["x"] for batch in batches()])
    assert found["x_scale"] == pytest.approx((pixels.max() - pixels.min()) / 255, rel=1e-6)
    weight = next(values for name, values in found.items() if name.endswith("right.weight_quantized"))
    assert weight.dtype == np.int8
    assert np.abs(weight.astype(int)).reshape(8, -1).max(1).min() >= 127


def test_what_stays_in_float_by_the_config(model, tmp_path):
    first = next(node.name for node in onnx.load(model).graph.node if node.op_type == "Conv")
    everything = qsim.quantize_onnx(model, batches(), tmp_path / "all.onnx", progress=False)
    config = qsim.int8().override(first, off=True)
    less = qsim.quantize_onnx(model, batches(), tmp_path / "less.onnx", config=config, progress=False)
    assert less.weights == everything.weights - 1
    with pytest.raises(ValueError, match=f"changes the weight of node '{first}'; expected overrides with off=True alone"):
        qsim.quantize_onnx(model, batches(), tmp_path / "x.onnx", config=qsim.int8().override(first, method="mse"))
    with pytest.raises(ValueError, match="the override 'nothing' matches no node"):
        qsim.quantize_onnx(model, batches(), tmp_path / "x.onnx", config=qsim.int8().override("nothing", off=True))


def test_values_that_are_not_finite_are_told(model, tmp_path):
    data = batches()
    data[1]["x"][0, 0, 0, 0] = np.nan
    report = qsim.quantize_onnx(model, data, tmp_path / "int8.onnx", progress=False)
    assert any("'x' met" in note and "1 NaN" in note for note in report.notes)


def test_errors(model, tmp_path):
    out = tmp_path / "int8.onnx"
    with pytest.raises(ValueError, match="got target='tensorrt'; expected 'onnxruntime'"):
        qsim.quantize_onnx(model, batches(), out, "tensorrt")
    with pytest.raises(TypeError, match="used up after one pass"):
        qsim.quantize_onnx(model, iter(batches()), out)
    with pytest.raises(qsim.CalibrationError, match="got no batch"):
        qsim.quantize_onnx(model, [], out)
    with pytest.raises(ValueError, match="expected integers of 8 bits"):
        qsim.quantize_onnx(model, batches(), out, config="int4")
    assert not out.exists()
    qsim.quantize_onnx(model, batches(), out, progress=False)
    with pytest.raises(qsim.FileFormatError, match="has QuantizeLinear or DequantizeLinear already"):
        qsim.quantize_onnx(out, batches(), tmp_path / "twice.onnx")


def test_a_model_without_any_integer_kernel(tmp_path):
    node = onnx.helper.make_node("Exp", ["x"], ["y"])
    ends = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2]) for name in "xy"]
    proto = onnx.helper.make_model(
        onnx.helper.make_graph([node], "g", ends[:1], ends[1:]), opset_imports=[onnx.helper.make_opsetid("", 19)]
    )
    proto.ir_version = min(proto.ir_version, 10)
    onnx.save(proto, tmp_path / "exp.onnx")
    assert onnxruntime.InferenceSession(tmp_path / "exp.onnx") is not None
    with pytest.raises(ValueError, match="has no operation that an integer kernel takes"):
        qsim.quantize_onnx(tmp_path / "exp.onnx", [{"x": np.ones(2, np.float32)}], tmp_path / "out.onnx")


@pytest.mark.parametrize("outside", [True, False])
def test_operations_within_other_graphs_are_told_of(outside, tmp_path):
    """Which branch runs is known with the data alone."""
    float32, helper = onnx.TensorProto.FLOAT, onnx.helper
    branches = {
        f"{name}_branch": helper.make_graph([node], name, [], [helper.make_tensor_value_info(node.output[0], float32, None)])
        for name, node in (("then", helper.make_node("MatMul", ["h", "w"], ["p"])), ("else", helper.make_node("Relu", ["h"], ["q"])))
    }
    nodes = [
        helper.make_node("MatMul" if outside else "Sub", ["x", "w"], ["h"]),
        helper.make_node("ReduceSum", ["h"], ["sum"], keepdims=0),
        helper.make_node("Greater", ["sum", "zero"], ["is_positive"]),
        helper.make_node("If", ["is_positive"], ["y"], name="choice", **branches),
    ]
    ends = [[helper.make_tensor_value_info(name, float32, [4, 4])] for name in "xy"]
    weight = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    constants = [onnx.numpy_helper.from_array(weight, "w"), onnx.numpy_helper.from_array(np.float32(0), "zero")]
    made = helper.make_model(helper.make_graph(nodes, "g", *ends, constants), opset_imports=[helper.make_opsetid("", 19)])
    made.ir_version = 9
    onnx.save(made, tmp_path / "float.onnx")
    data = [{"x": weight * 2}]
    if outside:
        report = qsim.quantize_onnx(tmp_path / "float.onnx", data, tmp_path / "int8.onnx", progress=False)
        assert "operations within 'choice' (MatMul) stay in float: which of them run depends on the data" in report.notes
    else:
        with pytest.raises(ValueError, match=r"no operation that an integer kernel takes, .* outside of 'choice' \(MatMul\), whose"):
            qsim.quantize_onnx(tmp_path / "float.onnx", data, tmp_path / "int8.onnx", progress=False)
