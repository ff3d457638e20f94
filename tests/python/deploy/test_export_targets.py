"""What each target's models look like: what runtimes look for in them, and what they refuse."""

import dataclasses
from collections import Counter

import numpy as np
import onnx
import pytest
import torch
from exported import NETWORKS, computed, constants, expected, exported, nodes, simulated
from onnx import TensorProto
from torch import nn

import qsim
from qsim.trace.runtimes import ONNX_RUNTIMES

QUANTIZE, DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"


def int8(target: str) -> qsim.Config:
    return qsim.int8(target=target)


CASES = [("vision", target) for target in ONNX_RUNTIMES] + [
    ("attention", "tensorrt"),
    ("attention", "onnxruntime"),
    ("recurrent", "onnxruntime"),
]


@pytest.mark.parametrize(("name", "target"), CASES)
def test_models_are_valid_and_compute_what_the_simulation_does(name, target):
    path, report = exported(name, int8(target))
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
    assert (report.target, report.opset) == (target, model.opset_import[0].version)
    assert {entry.domain for entry in model.opset_import} == {""}
    assert {node.domain for node in model.graph.node} == {""}
    read = {name for node in model.graph.node for name in node.input} | {end.name for end in model.graph.output}
    assert {tensor.name for tensor in model.graph.initializer} <= read
    assert {name for node in model.graph.node for name in node.output if name} & read
    x = NETWORKS[name][1](16)
    for mine, theirs in zip(expected(simulated(name, int8(target)), x), computed(path, x), strict=True):
        apart = np.abs(mine - theirs)
        assert np.quantile(apart, 0.99) <= 1e-5  # where the last operation is in float, its sums round in another order


@pytest.mark.parametrize("opset", [19, 21, 23])
def test_opsets(opset, tmp_path):
    sim, path = simulated("perceptron", int8("onnxruntime")), tmp_path / "model.onnx"
    assert sim.export(path, opset=opset).opset == opset
    x = NETWORKS["perceptron"][1](64)
    np.testing.assert_array_equal(expected(sim, x)[0], computed(path, x)[0])


# TensorRT.


def test_tensorrt_has_symmetric_int8_alone_and_biases_in_float():
    for name in ("vision", "attention"):
        path, _ = exported(name, int8("tensorrt"))
        held = constants(path)
        for node in nodes(path).values():
            if node.op_type in (QUANTIZE, DEQUANTIZE):
                scale, zero_point = held[node.input[1]], held[node.input[2]]  # KeyError: computed, not constant
                assert zero_point.dtype == np.int8
                assert not zero_point.any()
                assert (scale > 0).all()
                assert scale.ndim == 0 or node.op_type == DEQUANTIZE  # one scale for an activation
            if node.op_type in ("Conv", "ConvTranspose", "Gemm") and len(node.input) == 3:
                assert held[node.input[2]].dtype == np.float32
    assert not [n for n in held if held[n].dtype == np.int32]


def test_tensorrt_quantizes_both_operands_of_every_product():
    path, report = exported("vision", int8("tensorrt"))
    made = nodes(path)
    products = [node for node in made.values() if node.op_type in ("Conv", "ConvTranspose", "Gemm")]
    assert len(products) == 7
    for node in products:
        ends = [made[name] for name in node.input[:2]]
        ends = [made[name] for end in ends for name in (end.input if end.op_type == "Concat" else end.output)]  # of one scale: see below
        assert {end.op_type for end in ends} == {DEQUANTIZE}
    assert not report.lint


def test_tensorrt_quantizes_the_residual_branch_alone():
    path, _ = exported("vision", int8("tensorrt"))
    made = nodes(path)
    (addition,) = (node for node in made.values() if node.op_type == "Add")
    assert sorted(made[name].op_type for name in addition.input) == ["Conv", DEQUANTIZE]


def test_tensorrt_concatenates_on_one_scale():
    path, _ = exported("vision", int8("tensorrt"))
    made = nodes(path)
    (joined,) = (node for node in made.values() if node.op_type == "Concat" and node.input[0] in made)
    ends = [made[name] for name in joined.input]
    assert [node.op_type for node in ends] == [DEQUANTIZE] * 2
    assert len({tuple(node.input[1:]) for node in ends}) == 1


# What the other targets have.


def test_onnxruntime_has_int32_biases_with_the_scale_of_the_products():
    path, _ = exported("vision", int8("onnxruntime"))
    made, held, sim = nodes(path), constants(path), simulated("vision", int8("onnxruntime"))
    (stem,) = (node for node in made.values() if node.name == "stem.Conv")
    bias = made[stem.input[2]]
    scale = sim.encodings()["input"].scale * sim.encodings()["stem.weight"].scale
    np.testing.assert_array_equal(held[bias.input[1]], scale.numpy())
    assert held[bias.input[0]].dtype == np.int32
    in_float = sim.model.stem.bias.detach().double().numpy()
    assert (np.abs(held[bias.input[0]] * scale.double().numpy() - in_float) <= scale.double().numpy() / 2 * 1.000001).all()


def test_openvino_has_unsigned_activations_and_biases_in_float():
    path, _ = exported("vision", int8("openvino"))
    held = constants(path)
    types = Counter(str(held[node.input[2]].dtype) for node in nodes(path).values() if node.op_type == QUANTIZE)
    assert set(types) == {"uint8"}
    assert not [name for name, value in held.items() if value.dtype == np.int32]


def test_weights_are_integers_and_nothing_else():
    sim = simulated("vision", int8("onnxruntime"))
    path, report = exported("vision", int8("onnxruntime"))
    held = constants(path)
    for key, quantizer in sim.quantizers().items():
        if key.endswith("weight"):
            weight, encoding = sim.model.get_parameter(key).detach().double(), quantizer.encoding
            shape = [-1 if i == encoding.axis else 1 for i in range(weight.dim())] if encoding.axis is not None else []
            integers = (weight / encoding.scale.double().reshape(shape)).round().clamp(-128, 127)
            np.testing.assert_array_equal(held[report.names[key]], integers.numpy())
    assert not any(value.dtype == np.float32 and value.ndim > 1 for value in held.values())


# What targets refuse.


class Two(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def calibrated(config: qsim.Config) -> qsim.QuantSim:
    torch.manual_seed(0)
    sim = qsim.QuantSim(Two().eval(), torch.randn(2, 8), config)
    sim.calibrate([torch.randn(32, 8)], progress=False)
    return sim


def test_all_that_a_target_cannot_express_is_one_error(tmp_path):
    config = int8("tensorrt").override("2", activation={"bits": 16}, weight={"symmetric": False, "signed": False})
    config = dataclasses.replace(config, bias=True)
    with pytest.raises(qsim.ExportError) as caught:
        calibrated(config).export(tmp_path / "model.onnx")
    message = str(caught.value)
    assert "cannot express 4 tensors" in message
    for part in (
        "'2.input[0]': an activation in int16",
        "use int8",
        "'2.weight': a constant in uint8",
        "'0.bias': an int32 bias",
        "'2.bias'",
    ):
        assert part in message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("target", "changes", "reason"),
    [
        ("coreml", {"bits": 16}, "in int16, which coreml does not take"),
        ("onnxruntime", {"dtype": "float8_e4m3fn"}, "in float8_e4m3fn, which onnxruntime does not take"),
        ("openvino", {"axis": 1, "method": "minmax"}, "one scale per channel"),
    ],
)
def test_each_refusal_says_why(target, changes, reason, tmp_path):
    with pytest.raises(qsim.ExportError, match=reason):
        calibrated(int8(target).override("0", activation=changes)).export(tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_weights_with_nan_are_refused(tmp_path):
    sim = calibrated(int8("onnxruntime"))
    with torch.no_grad():
        sim.model[0].weight[0, 0] = torch.nan
    with pytest.raises(qsim.ExportError, match=r"'0.weight': holds NaN or Inf"):
        sim.export(tmp_path / "model.onnx")


def test_weights_of_four_bits_for_onnxruntime_are_two_in_a_byte_only_in_blocks(tmp_path):
    blocks = qsim.TensorSpec(bits=4, symmetric=True, axis=1, block_size=4)
    for weight, kind in ((blocks, TensorProto.INT4), (qsim.TensorSpec(bits=4, symmetric=True, axis=0), TensorProto.INT8)):
        sim = calibrated(qsim.Config(weight, target="onnxruntime"))
        report = sim.export(tmp_path / "model.onnx")
        held = {tensor.name: tensor for tensor in onnx.load(tmp_path / "model.onnx").graph.initializer}
        assert held[report.names["0.weight"]].data_type == kind
        x = torch.randn(512, 8)
        np.testing.assert_array_equal(expected(sim, x)[0], computed(tmp_path / "model.onnx", x)[0])
