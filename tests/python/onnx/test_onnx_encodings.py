"""Encodings out of Q/DQ models, ours and other people's."""

import contextlib

import numpy as np
import onnx
import pytest
import torch
from float_onnx import CHANNELS, images, network
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
from torch import nn

import qsim
from qsim.onnx.encodings import read_onnx_encodings

_TYPES = {"int8": TensorProto.INT8, "uint8": TensorProto.UINT8, "int16": TensorProto.INT16, "float8_e4m3fn": TensorProto.FLOAT8E4M3FN}


class Images(CalibrationDataReader):
    def __init__(self) -> None:
        self._left = iter([{"x": images()}])

    def get_next(self):
        return next(self._left, None)


@pytest.fixture(scope="module")
def by_onnxruntime(tmp_path_factory):
    """A model of ONNX Runtime's own quantizer."""
    folder = tmp_path_factory.mktemp("ort")
    types = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8, "per_channel": True}
    quantize_static(network(folder / "float.onnx"), folder / "qdq.onnx", Images(), quant_format=QuantFormat.QDQ, **types)
    return folder / "qdq.onnx"


def test_models_of_onnxruntime(by_onnxruntime):
    """It calls parameters of a tensor by its name."""
    held = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(by_onnxruntime).graph.initializer}
    file = read_onnx_encodings(by_onnxruntime)
    scaled = {name.removesuffix("_scale") for name in held if name.endswith("_scale")}
    activations = {name for name in scaled if f"{name}_quantized" not in held and name not in held}
    assert {"x", "relu1", "y"} <= activations
    assert set(file.activations) == {*activations, "flat"}
    assert file.encodings["flat"] == file.encodings["pooled"]  # moved values share it
    for name, entry in ((name, file.entries[name]) for name in activations):
        assert np.array_equal(entry.encoding.scale.numpy(), held[f"{name}_scale"].reshape(()))
        assert np.array_equal(entry.encoding.zero_point.numpy(), held[f"{name}_zero_point"].reshape(()))
        assert (entry.encoding.dtype, entry.encoding.quant_min, entry.encoding.quant_max) == ("uint8", 0, 255)
    for name in ("w1", "w2", "w4"):
        encoding = file.parameters[name].encoding
        assert np.array_equal(encoding.scale.numpy(), held[f"{name}_scale"])
        assert (encoding.dtype, encoding.axis) == ("int8", CHANNELS[name])
    assert file.parameters["b1"].encoding.dtype == "int32"


def test_models_of_qsim_keep_the_keys_and_all_fields(tmp_path):
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5)).eval()
    sim = qsim.QuantSim(network, torch.randn(2, 3, 8, 8), qsim.int8(target="onnxruntime"))
    sim.calibrate([torch.randn(8, 3, 8, 8)], progress=False)
    report = sim.export(tmp_path / "model.onnx")
    file = read_onnx_encodings(report.path)
    assert file.encodings == sim.encodings()
    assert list(file.parameters) == ["0.weight", "3.weight"]
    qsim.save_encodings(file, tmp_path / "encodings.json", "qsim")
    other = qsim.QuantSim(network, torch.randn(2, 3, 8, 8), qsim.int8(target="onnxruntime"))
    other.load_encodings(tmp_path / "encodings.json")
    x = torch.randn(4, 3, 8, 8)
    assert torch.equal(other(x), sim(x))
    names = read_onnx_encodings(report.path, tensor_names=True)
    assert names.encodings["input"] == sim.encodings()["input"]
    assert {e.encoding.dtype for e in names.parameters.values()} == {"int8", "int32"}


@pytest.mark.parametrize(
    ("name", "key"), [("0.output_scale", "0.output"), ("0.weight_scale", "0.weight"), ("0.output_zero_point", "0.output")]
)
def test_what_was_changed_after_the_export_is_what_the_nodes_hold(name, key, tmp_path):
    sim = qsim.QuantSim(nn.Sequential(nn.Linear(4, 3)).eval(), torch.randn(8, 4))
    sim.calibrate([torch.randn(8, 4)], progress=False)
    sim.export(tmp_path / "m.onnx")
    before = read_onnx_encodings(tmp_path / "m.onnx").encodings
    model = onnx.load(tmp_path / "m.onnx")
    (held,) = [tensor for tensor in model.graph.initializer if tensor.name == name]
    values = numpy_helper.to_array(held)
    held.CopyFrom(numpy_helper.from_array((values * 4 if values.dtype == np.float32 else values - 3).astype(values.dtype), name))
    onnx.save(model, tmp_path / "changed.onnx")
    with pytest.warns(UserWarning, match=rf"1 of 3 encodings \('{key}'\) are not what its metadata say"):
        found = read_onnx_encodings(tmp_path / "changed.onnx")
    assert [other for other in before if before[other] != found.encodings[other]] == [key]
    assert found.entries[key].role == ("parameter" if "weight" in key else "activation")
    part = found.encodings[key].zero_point if "zero" in name else found.encodings[key].scale
    expected = before[key].zero_point - 3 if "zero" in name else before[key].scale * 4
    assert torch.equal(part, expected)


def model_of(path, scale, zero_point=0, dtype="int8", shape=(4, 3), constant=False, **attributes):
    """One tensor on one grid."""
    scale, kind = np.asarray(scale, np.float32), _TYPES[dtype]
    zeros = helper.make_tensor("z", kind, scale.shape, np.full(scale.size, zero_point).tolist())
    held = [numpy_helper.from_array(scale, "s"), zeros, *([numpy_helper.from_array(np.ones(shape, np.float32), "x")] if constant else [])]
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], **attributes),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"], **attributes),
    ]
    inputs = [] if constant else [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)]
    graph = helper.make_graph(nodes, "test", inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)], held)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    return path


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"scale": 0.5}, ("int8", None, None, ())),
        ({"scale": [0.5]}, ("int8", None, None, ())),  # one number in a list
        ({"scale": 0.5, "dtype": "uint8", "zero_point": 128}, ("uint8", None, None, ())),
        ({"scale": 0.5, "dtype": "int16"}, ("int16", None, None, ())),
        ({"scale": 0.5, "dtype": "float8_e4m3fn"}, ("float8_e4m3fn", None, None, ())),
        ({"scale": [0.5, 1, 2]}, ("int8", 1, None, (3,))),  # 1 is the default of ONNX
        ({"scale": [0.5, 1, 2, 4], "axis": 0}, ("int8", 0, None, (4,))),
        ({"scale": [[0.5, 1, 2], [1, 2, 4]], "axis": 0, "block_size": 2}, ("int8", 0, 2, (2, 3))),
    ],
)
@pytest.mark.parametrize("constant", [False, True])
def test_layouts(fields, expected, constant, tmp_path):
    (entry,) = read_onnx_encodings(model_of(tmp_path / "m.onnx", constant=constant, **fields)).entries.values()
    encoding = entry.encoding
    assert (encoding.dtype, encoding.axis, encoding.block_size, tuple(encoding.scale.shape)) == expected
    assert np.array_equal(encoding.scale.numpy().ravel(), np.ravel(np.float32(fields["scale"])))
    assert entry.role == ("parameter" if constant else "activation")
    assert int(encoding.zero_point.flatten()[0]) == fields.get("zero_point", 0)


@pytest.mark.parametrize("scale", [0.0, -1.0, np.nan, np.inf, [0.5, 0.0, 1.0]])
def test_scales_that_are_none(scale, tmp_path):
    with pytest.raises(qsim.FileFormatError, match=r"entry 'x': the scale holds .*; expected a number that is positive and finite"):
        read_onnx_encodings(model_of(tmp_path / "m.onnx", scale))


def test_scales_computed_at_run_time_are_noted(tmp_path):
    nodes = [helper.make_node("ReduceMax", ["x"], ["s"], keepdims=0), helper.make_node("QuantizeLinear", ["x", "s"], ["q"])]
    nodes.append(helper.make_node("DequantizeLinear", ["q", "s"], ["y"]))
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [3]) for name in "xy"]
    model = helper.make_model(helper.make_graph(nodes, "test", ends[:1], ends[1:]), opset_imports=[helper.make_opsetid("", 21)])
    onnx.save(model, tmp_path / "m.onnx")
    entry = read_onnx_encodings(tmp_path / "m.onnx").entries["x"]
    assert entry.encoding is None
    assert "when the model runs" in entry.note


def test_one_tensor_on_two_grids_has_two_entries(tmp_path):
    model = onnx.load(model_of(tmp_path / "m.onnx", 0.5))
    model.graph.initializer.append(numpy_helper.from_array(np.float32(0.25), "s2"))
    model.graph.node.append(helper.make_node("QuantizeLinear", ["x", "s2", "z"], ["q2"]))
    onnx.save(model, tmp_path / "m.onnx")
    found = read_onnx_encodings(tmp_path / "m.onnx").encodings
    assert {name: encoding.scale.item() for name, encoding in found.items()} == {"x": 0.5, "q2": 0.25}


@pytest.mark.parametrize("location", ["../secret", "/etc/passwd", ""])
def test_tensors_outside_the_folder_are_refused(location, tmp_path):
    model = onnx.load(model_of(tmp_path / "m.onnx", 0.5))
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(qsim.FileFormatError, match="expected one in the folder of the model"):
        read_onnx_encodings(tmp_path / "m.onnx")


@given(cut=st.integers(0, 10_000), flip=st.integers(0, 10_000), value=st.integers(0, 255), whole=st.booleans())
def test_damaged_models_are_errors_or_other_encodings(by_onnxruntime, tmp_path_factory, cut, flip, value, whole):
    data = bytearray(by_onnxruntime.read_bytes())
    data[flip % len(data)] = value
    path = tmp_path_factory.getbasetemp() / "damaged.onnx"
    path.write_bytes(data if whole else data[: cut % len(data)])
    with contextlib.suppress(qsim.FileFormatError):  # and nothing else
        found = read_onnx_encodings(path)
        assert all(bool((e.scale > 0).all()) for e in found.encodings.values())
