"""What ONNX Runtime's quantizer and Core ML's converter take in memory."""

import numpy as np
import onnx
import onnxruntime.quantization as ort
import pytest
import torch
from torch import nn

import qsim
from qsim.files import (
    Entry,
    from_tensor_quant_overrides,
    read_coreml_hints,
    tensor_quant_overrides,
    with_coreml_hints,
    without_coreml_hints,
)
from qsim.numbers.encoding import grid_of


def entry(scale, zero_point=0, dtype="int8", axis=None, block_size=None, role=None):
    scale = torch.as_tensor(scale, dtype=torch.float32)
    zero_point = torch.as_tensor(zero_point, dtype=torch.int32).expand(scale.shape).clone()
    return Entry(qsim.Encoding(scale, zero_point, *grid_of(dtype), axis, block_size, dtype), role)


class Batches(ort.CalibrationDataReader):
    def __init__(self, batches):
        self.batches = iter(batches)

    def get_next(self):
        return next(self.batches, None)


def gemm(weight, path):
    """A model of one Gemm, y = x W^T, in float."""
    tensors = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["N", n]) for name, n in zip("xy", weight.shape[::-1], strict=True)
    ]
    node = onnx.helper.make_node("Gemm", ["x", "w"], ["y"], transB=1)
    graph = onnx.helper.make_graph([node], "gemm", tensors[:1], tensors[1:], [onnx.numpy_helper.from_array(weight.numpy(), "w")])
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10), path)


@pytest.mark.parametrize(("activation", "weight"), [("int8", "int8"), ("uint8", "int8"), ("uint16", "int8"), ("uint8", "int4")])
@pytest.mark.parametrize("per_channel", [True, False])
def test_onnxruntime_quantizes_to_the_same_integers(tmp_path, activation, weight, per_channel):
    w = torch.randn(5, 6)
    gemm(w, tmp_path / "float.onnx")
    scale = torch.rand(5) / 20 + 0.01 if per_channel else torch.tensor(0.03)  # no range of the data gives these
    wanted = entry(scale, 0, weight, 0 if per_channel else None)
    file = qsim.EncodingFile({"x": entry(0.017, grid_of(activation)[0] + 100, activation), "w": wanted, "y": entry(0.23, 5, activation)})
    types = {"int8": ort.QuantType.QInt8, "uint8": ort.QuantType.QUInt8, "uint16": ort.QuantType.QUInt16, "int4": ort.QuantType.QInt4}
    ort.quantize_static(
        *(tmp_path / "float.onnx", tmp_path / "int.onnx", Batches([{"x": torch.randn(4, 6).numpy()}])),
        per_channel=per_channel,
        activation_type=types[activation],
        weight_type=types[weight],
        extra_options={"TensorQuantOverrides": tensor_quant_overrides(file)},
    )
    constants = {c.name: onnx.numpy_helper.to_array(c) for c in onnx.load(tmp_path / "int.onnx").graph.initializer}
    low, high = grid_of(weight)
    divisor = (scale[:, None] if per_channel else scale).numpy()
    np.testing.assert_array_equal(constants["w_quantized"].astype(int), np.clip(np.rint(w.numpy() / divisor), low, high).astype(int))
    for name, found in file.entries.items():
        np.testing.assert_array_equal(constants[f"{name}_scale"], found.encoding.scale.numpy())
        np.testing.assert_array_equal(constants[f"{name}_zero_point"].astype(int), found.encoding.zero_point.numpy())


def test_overrides_read_back():
    file = qsim.EncodingFile({"x": entry(0.1, 7, "uint16"), "w": entry([0.1, 0.2], [1, -2], "int4", axis=1, role="parameter")})
    assert from_tensor_quant_overrides(tensor_quant_overrides(file)) == file
    arrays = {"x": [{"quant_type": ort.QuantType.QUInt16, "scale": np.array(0.1, np.float32), "zero_point": np.array([7], np.uint16)}]}
    assert from_tensor_quant_overrides(arrays).encodings["x"] == file.encodings["x"]


QINT8 = {"quant_type": ort.QuantType.QInt8, "scale": 0.5, "zero_point": 0}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (QINT8, "a list with one dict"),
        ([], "a list with one dict"),
        ([{**QINT8, "quant_type": "QInt8"}], "'quant_type' is 'QInt8'"),
        ([{**QINT8, "quant_type": ort.QuantType.QFLOAT8E4M3FN}], "'quant_type' is"),
        ([{**QINT8, "scale": float("nan")}], "'scale' holds nan"),
        ([{**QINT8, "zero_point": 200}], "zero point 200"),
        ([{**QINT8, "symmetric": True}], "an option is 'symmetric'"),
        ([{"quant_type": ort.QuantType.QInt8}], "has no 'scale'"),
        ([QINT8, QINT8], "has 2 channels and no 'axis'"),
        ([{**QINT8, "axis": 0}, {**QINT8, "axis": 1}], "differ in 'quant_type' or 'axis'"),
        ([{**QINT8, "scale": np.ones(2)}], "'scale' holds"),
    ],
)
def test_overrides_that_are_no_encodings(override, words):
    with pytest.raises(qsim.FileFormatError, match=words):
        from_tensor_quant_overrides({"t": override})


@pytest.mark.parametrize(
    "wrong",
    [entry(0.1, 0, "int6"), entry(1.0, 0, "float16"), entry([[0.1]], 0, "int4", 1, 4), Entry(None, note="float32: it is not quantized")],
)
def test_encodings_that_onnxruntime_has_not(wrong):
    with pytest.raises(qsim.FileFormatError, match=r"entry 't': .*file\.without\('t'\)"):
        tensor_quant_overrides(qsim.EncodingFile({"t": wrong}))


def test_without_onnxruntime(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime.quantization", None)
    with pytest.raises(ImportError, match=r"pip install qsim\[onnx\]"):
        tensor_quant_overrides(qsim.EncodingFile({}))


# Core ML.


def converted(weight, hints):
    """Integers and what they stand for, as Core ML Tools 9 makes them of hints: divide, round, add the zero point, clip to the integers
    that signs and width ask for."""
    scale, zero_point = hints["quantization_scale"], hints.get("zero_point")
    for axis, (n, parts) in enumerate(zip(weight.shape, scale.shape, strict=True)):
        scale = scale.repeat_interleave(n // parts, axis)
        zero_point = None if zero_point is None else zero_point.repeat_interleave(n // parts, axis)
    offset = torch.zeros(()) if zero_point is None else zero_point.float()
    integers = (weight / scale).round() + offset
    bits = hints["quantization_n_bits"].item()
    unsigned = integers.min() >= 0 and offset.min() >= 0
    low, high = grid_of(f"{'u' if unsigned else ''}int{bits}")
    return (integers.clip(low, high) - offset) * scale


LAYOUTS = {
    "tensor": (0.1, None, None),
    "channel 0": (torch.rand(6) + 0.05, 0, None),
    "channel 1": (torch.rand(4) + 0.05, 1, None),
    "blocks": (torch.rand(6, 2, 3, 3) + 0.05, 1, 2),
    "tiles": (torch.rand(2, 2, 3, 3) + 0.05, (0, 1), (3, 2)),
}


@pytest.mark.parametrize("weight", [torch.randn(6, 4, 3, 3), torch.rand(6, 4, 3, 3) * 9], ids=["both signs", "positive, clipped"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("dtype", "zero_point"), [("int8", 0), ("int4", 0), ("uint8", 17), ("int8", -100), ("uint4", 8), ("uint8", 0), ("int8", 100)]
)
def test_core_ml_makes_the_same_weights(layout, dtype, zero_point, weight):
    scale, axis, size = LAYOUTS[layout]
    file = qsim.EncodingFile({"conv.weight": entry(scale, zero_point, dtype, axis, size), "conv.output": entry(1.0, role="activation")})
    state = {"conv.weight": weight, "conv.bias": torch.zeros(6)}
    with_hints = with_coreml_hints(state, file)
    assert without_coreml_hints(with_hints) == state
    found = file.encodings["conv.weight"]
    prefix = "conv._COREML_/weight/"
    hints = {name.removeprefix(prefix): value for name, value in with_hints.items() if name.startswith(prefix)}
    expected = qsim.ops.fake_quantize(weight, found.scale, found.zero_point, found.quant_min, found.quant_max, axis=axis, block_size=size)
    assert hints["compression_type"].tolist() == [3]
    assert torch.equal(converted(weight, hints), expected)
    again = read_coreml_hints(with_hints).encodings["conv.weight"]
    assert torch.equal(again.scale, found.scale)
    assert (again.axis, again.block_size) == (found.axis, found.block_size)
    assert torch.equal(again.zero_point - again.quant_min, found.zero_point - found.quant_min)


def test_hints_of_a_simulation(tmp_path):
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    sim = qsim.QuantSim(model, torch.zeros(1, 6), qsim.int8(target="coreml"))
    sim.calibrate([torch.randn(8, 6)], progress=False)
    sim.save_encodings(tmp_path / "file")
    hints = with_coreml_hints(model.state_dict(), qsim.load_encodings(tmp_path / "file"))
    assert hints["_COREML_/metadata_version"].tolist() == 1
    expected = {key: encoding for key, encoding in sim.encodings().items() if key.endswith("weight")}
    assert read_coreml_hints(hints).encodings == expected
    root = with_coreml_hints({"weight": torch.zeros(2, 2)}, qsim.EncodingFile({"weight": entry(0.1)}))
    assert "_COREML_/weight/quantization_scale" in root
    assert list(read_coreml_hints(root).entries) == ["weight"]


HINTS = {
    "w": torch.ones(4, 4),
    "_COREML_/metadata_version": torch.tensor(1),
    "_COREML_/w/compression_type": torch.tensor([3]),
    "_COREML_/w/quantization_n_bits": torch.tensor(8),
    "_COREML_/w/quantization_scale": torch.ones(4, 1),
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"w": None}, "no such parameter"),
        ({"_COREML_/metadata_version": torch.tensor(2)}, "metadata_version' is 2; expected 1"),
        ({"_COREML_/w/compression_type": torch.tensor([2])}, r"'compression_type' is \[2\]"),
        ({"_COREML_/w/compression_type": None}, "has no 'compression_type'"),
        ({"_COREML_/w/quantization_n_bits": torch.tensor(3)}, r"'quantization_n_bits' is \[3\]; expected 4 or 8"),
        ({"_COREML_/w/quantization_scale": torch.ones(4)}, r"scales of shape \(4,\) for a tensor of shape \(4, 4\)"),
        ({"_COREML_/w/quantization_scale": torch.ones(3, 1)}, "blocks that fill it"),
        ({"_COREML_/w/quantization_scale": -torch.ones(4, 1)}, "positive"),
        ({"_COREML_/w/zero_point": torch.ones(4, 1)}, "zero point of torch.float32"),
        ({"_COREML_/w/zero_point": torch.ones(2, 1, dtype=torch.int8)}, "one for each scale"),
        ({"_COREML_/w/lut": torch.ones(1)}, "a hint is 'lut'"),
    ],
)
def test_hints_that_contradict_themselves(changes, words):
    state = {name: value for name, value in {**HINTS, **changes}.items() if value is not None}
    with pytest.raises(qsim.FileFormatError, match=words):
        read_coreml_hints(state)


@pytest.mark.parametrize(
    ("name", "wrong", "words"),
    [
        ("fc.weigth", entry(0.1), r"no tensor of the state dict \(close to it: 'fc.weight'\)"),
        ("fc.weight", entry(0.1, 0, "int16"), "is int16"),
        ("fc.weight", entry(0.1, 0, "float8_e5m2"), "is float8_e5m2"),
        ("fc.weight", entry(torch.ones(6, 3), 0, "int8", 1, 2), "blocks that fill it"),
        ("fc.weight", Entry(None, note="float32: it is not quantized"), "float32"),
    ],
)
def test_encodings_that_core_ml_has_not(name, wrong, words):
    with pytest.raises(qsim.FileFormatError, match=words):
        with_coreml_hints({"fc.weight": torch.ones(6, 5)}, qsim.EncodingFile({name: wrong}))
