"""Every format reads as its specification says, and writes what reads back."""

import json
import math
import struct

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from aimet_files import AIMET, CACHE, V0_6_1, V1_0_0, V2_0_0, V2_1_0

import qsim
from qsim.files import FORMATS, Entry
from qsim.files.difference import difference
from qsim.numbers.encoding import grid_of

JSON_FORMATS = [name for name in FORMATS if name != "tensorrt-cache"]


def write(path, content):
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def encoding(scale, zero_point=0, dtype="int8", axis=None, block_size=None, narrow=False):
    low, high = grid_of(dtype)
    scale = torch.as_tensor(scale, dtype=torch.float32)
    zero_point = torch.as_tensor(zero_point, dtype=torch.int32).expand(scale.shape).clone()
    return qsim.Encoding(scale, zero_point, low + narrow, high, axis, block_size, dtype)


@pytest.fixture
def loaded(tmp_path):
    return lambda content: qsim.load_encodings(write(tmp_path / "file", content))


# What AIMET's numbers mean.


@pytest.mark.parametrize("role", ["activation_encodings", "param_encodings"])
def test_grids_of_0_6_1_end_where_the_file_says(loaded, role):
    file = loaded(V0_6_1)
    for name, channels in V0_6_1[role].items():
        if channels[0]["dtype"] == "int":
            found = file.entries[name].encoding
            lows, highs = (torch.tensor([channel[end] for channel in channels]) for end in ("min", "max"))
            torch.testing.assert_close(found.min.reshape(-1), lows, rtol=1e-7, atol=0)
            torch.testing.assert_close(found.max.reshape(-1), highs, rtol=1e-7, atol=0)


def test_reads_0_6_1(loaded):
    file = loaded(V0_6_1)
    assert (file.format, file.version) == ("aimet-0.6.1", "0.6.1")
    assert list(file.activations) == list(V0_6_1["activation_encodings"])
    assert list(file.parameters) == list(V0_6_1["param_encodings"])
    assert file.extra == {name: V0_6_1[name] for name in ("quantizer_args", "excluded_layers")}
    assert file.encodings["input"] == encoding(0.25, 100, "uint8")
    assert file.encodings["conv.weight"] == encoding([0.5, 0.125, 2.0], 0, "int4", axis=0)
    assert file.encodings["strict.weight"] == encoding(0.5, 0, narrow=True)
    assert file.encodings["shifted.weight"] == encoding(0.5, -1)
    assert file.encodings["half"].dtype == "float16"
    assert file.entries["full"].encoding is None
    assert "float32" in file.entries["full"].note


def test_grids_of_1_0_0_begin_at_offset_times_scale(loaded):
    file = loaded(V1_0_0)
    for value in [*V1_0_0["activation_encodings"], *V1_0_0["param_encodings"][:2]]:
        if value["dtype"] == "INT":
            found = file.entries[value["name"]].encoding
            pairs = list(zip(value["offset"], value["scale"], strict=True))
            torch.testing.assert_close(found.min.reshape(-1), torch.tensor([o * s for o, s in pairs]))
            torch.testing.assert_close(found.max.reshape(-1), torch.tensor([(o + 2 ** value["bw"] - 1) * s for o, s in pairs]))


def test_unsigned_32_bits_are_read_as_signed(loaded):
    value = {
        "dtype": "int",
        "bitwidth": 32,
        "is_symmetric": "False",
        "scale": 0.5,
        "offset": -(2**32 - 1),
        "min": -0.5 * (2**32 - 1),
        "max": 0.0,
    }
    found = loaded({"version": "0.6.1", "activation_encodings": {"a": [value]}}).encodings["a"]
    assert found == encoding(0.5, 2**31 - 1, "int32")
    assert (found.min.item(), found.max.item()) == (torch.tensor(value["min"]).item(), 0.0)


def test_reads_1_0_0(loaded):
    file = loaded(V1_0_0)
    assert file.encodings["tanh"] == encoding(0.001, 0, "int16")
    assert file.encodings["fc.weight"] == encoding(V1_0_0["param_encodings"][1]["scale"], 0, "int4", axis=1, block_size=16)
    products = [np.float32(np.float32(s) * n) for s, n in ((0.001, 3), (0.001, 16), (0.002, 7), (0.002, 1))]
    assert file.encodings["lpbq.weight"] == encoding(products, 0, "int4", axis=1, block_size=32)
    assert not file.entries["fc.weight"].layout_given
    assert file.entries["moved"].encoding is None
    assert file.extra == {name: V1_0_0[name] for name in ("quantizer_args", "excluded_layers", "producer")}


def ends_in_onnx(value, shape):
    """The ends of the grid of an entry of AIMET 2.x, as ONNX Runtime finds them: what it makes of very small and very large numbers."""
    kind = getattr(onnx.TensorProto, value["output_dtype"].upper())
    scale = np.array(value["y_scale"], dtype=np.float32)
    zero_point = np.broadcast_to(np.array(value.get("y_zero_point", 0)), scale.shape).flatten()
    constants = [
        onnx.numpy_helper.from_array(scale, "scale"),
        onnx.helper.make_tensor("zero_point", kind, scale.shape, zero_point.tolist()),
    ]
    layout = {key: value[key] for key in ("axis", "block_size") if key in value}
    nodes = [
        onnx.helper.make_node("QuantizeLinear", ["x", "scale", "zero_point"], ["q"], **layout),
        onnx.helper.make_node("DequantizeLinear", ["q", "scale", "zero_point"], ["y"], **layout),
    ]
    tensors = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name in ("x", "y")]
    model = onnx.helper.make_model(
        onnx.helper.make_graph(nodes, "ends", tensors[:1], tensors[1:], constants),
        opset_imports=[onnx.helper.make_opsetid("", 21)],
        ir_version=10,
    )
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return [torch.from_numpy(session.run(None, {"x": np.full(shape, end, np.float32)})[0]) for end in (-1e6, 1e6)]


@pytest.mark.parametrize(
    ("name", "shape"), [("input", (3,)), ("relu", (3,)), ("conv.weight", (3, 2, 1, 1)), ("up.weight", (2, 1, 3)), ("fc.weight", (2, 8))]
)
def test_entries_of_2_0_0_are_what_onnxruntime_makes_of_them(loaded, name, shape):
    (value,) = [value for value in V2_0_0["encodings"] if value["name"] == name]
    found = loaded(V2_0_0).encodings[name]
    for mine, theirs in zip((found.min, found.max), ends_in_onnx(value, shape), strict=True):
        if found.block_size:
            mine = mine.repeat_interleave(found.block_size, found.axis)
        elif found.axis is not None:
            mine = mine.reshape([-1 if a == found.axis % len(shape) else 1 for a in range(len(shape))])
        torch.testing.assert_close(mine.expand(shape), theirs, rtol=0, atol=0)


def test_reads_2_0_0(loaded):
    file = loaded(V2_0_0)
    assert file.encodings["fc.weight"] == encoding([[0.1, 0.2], [0.3, 0.4]], [[8, 7], [6, 5]], "uint4", axis=1, block_size=4)
    assert file.encodings["fc.bias"] == encoding([1e-4, 2e-4], 0, "int32", axis=0)
    assert file.encodings["eight"] == encoding(0.5, 0, "float8_e4m3fn")
    products = torch.tensor([[3.0, 16], [7, 1]]) * torch.tensor([[0.001], [0.002]])
    assert file.encodings["lpbq.weight"] == encoding(products, 0, "int4", axis=1, block_size=4)
    assert {name for name, entry in file.entries.items() if entry.encoding is None} == {"four", "moved"}


def test_one_number_in_a_list_is_one_scale_as_in_onnx(loaded):
    value = {"name": "a", "output_dtype": "uint8", "y_scale": [0.5], "y_zero_point": [3]}
    assert loaded({"version": "2.0.0", "encodings": [value]}).encodings["a"] == encoding(0.5, 3, "uint8")


def test_reads_doubly_quantized_scales_of_2_1_0(loaded):
    file = loaded(V2_1_0)
    x, steps = torch.tensor([[3.0, 5], [11, 9], [7, 16]]), torch.tensor([[0.001], [0.002], [0.003]])
    assert file.encodings["double"] == encoding(x * steps, 0, "int4", axis=1, block_size=32)
    assert file.encodings["blocks"] == encoding([[1.0, 2, 6], [2, 6, 20]], 0, "int4", axis=1, block_size=8)
    assert file.entries["nvfp4"].encoding is None


def test_a_list_of_float_scales_belongs_to_output_channels(loaded):
    lists = {"output_dtype": "int4", "block_size": 4, "per_channel_float_scale": [0.5, 2.0], "per_block_int_scale": [[1, 2], [3, 4]]}
    file = loaded({"version": "2.0.0", "encodings": [{"name": f"blocks along {axis}", "axis": axis, **lists} for axis in (0, 1, -1)]})
    assert file.encodings["blocks along 0"].scale.tolist() == [[0.5, 4.0], [1.5, 8.0]]
    assert file.encodings["blocks along 1"].scale.tolist() == file.encodings["blocks along -1"].scale.tolist() == [[0.5, 1.0], [6.0, 8.0]]


# TensorRT's caches.


def test_reads_a_cache(loaded):
    file = loaded(CACHE)
    assert (file.format, file.version, file.extra) == ("tensorrt-cache", "10300", {"calibrator": "MinMaxCalibration"})
    assert file.encodings["images"].max.item() == 1.0
    assert file.encodings["(Unnamed Layer* 4) [Fully Connected]_output"] == encoding(struct.unpack(">f", bytes.fromhex("3d65992f"))[0])
    assert set(file.activations) == set(file.entries)


def test_the_last_colon_of_a_line_ends_the_name(loaded):
    assert list(loaded("TRT-8501-EntropyCalibration2\r\nscope: a: 3f800000\r\n").entries) == ["scope: a"]


# Writing.


@pytest.mark.parametrize("content", [*AIMET.values(), CACHE], ids=[*AIMET, "cache"])
def test_writing_the_same_format_loses_nothing(tmp_path, content):
    first = qsim.load_encodings(write(tmp_path / "first", content))
    qsim.save_encodings(first, tmp_path / "second")
    second = (tmp_path / "second").read_text()
    assert second == content if isinstance(content, str) else json.loads(second) == content
    assert qsim.load_encodings(tmp_path / "second") == first


def test_0_6_1_has_the_ends_of_the_grid(tmp_path):
    for made in (encoding(0.25, 3), encoding([0.5, 0.125], [-128, 127], axis=0), encoding(0.5, 0, narrow=True), encoding(2.0, 9, "uint4")):
        qsim.save_encodings(qsim.EncodingFile({"a": Entry(made, "parameter")}), tmp_path / "file", "aimet-0.6.1")
        channels = json.loads((tmp_path / "file").read_text())["param_encodings"]["a"]
        assert [channel["min"] for channel in channels] == made.min.reshape(-1).tolist()
        assert [channel["max"] for channel in channels] == made.max.reshape(-1).tolist()
        assert {channel["is_symmetric"] for channel in channels} == {str(made.symmetric)}


def test_a_changed_encoding_is_written_and_not_what_was_read(tmp_path):
    file = qsim.load_encodings(write(tmp_path / "file", V2_0_0))
    changed = dict(file.entries)
    changed["input"] = Entry(encoding(0.5, 3), source=changed["input"].source)
    qsim.save_encodings(qsim.EncodingFile(changed, file.format), tmp_path / "file")
    assert qsim.load_encodings(tmp_path / "file").encodings["input"] == encoding(0.5, 3)


def test_a_renamed_entry_has_its_new_name(tmp_path):
    file = qsim.load_encodings(write(tmp_path / "file", V1_0_0))
    renamed = {f"new.{name}": entry for name, entry in file.entries.items()}
    qsim.save_encodings(qsim.EncodingFile(renamed, file.format), tmp_path / "file")
    assert list(qsim.load_encodings(tmp_path / "file").entries) == list(renamed)


def same_numbers(mine, theirs):
    """Whether two encodings are one grid, whatever integers it is stored as."""
    ends = [(e.scale, e.min, e.max, e.zero_point - float(e.quant_min)) for e in (mine, theirs)]
    return all(torch.equal(a, b) for a, b in zip(*ends, strict=True)) and (mine.axis, mine.block_size) == (theirs.axis, theirs.block_size)


EXPRESSIBLE = {
    "per tensor": ({"a": Entry(encoding(0.1, 17), "activation"), "b": Entry(encoding(1 / 3, 200, "uint8"), "activation")}, JSON_FORMATS),
    "symmetric": ({"a": Entry(encoding(1e-30), "activation"), "b": Entry(encoding(3e38 / 127), "activation")}, FORMATS),
    "per channel": ({"w.weight": Entry(encoding([0.1, 0.2, 0.7], 0, "int4", axis=0), "parameter")}, JSON_FORMATS),
    "int16": ({"a": Entry(encoding(1e-5, -3, "int16"), "activation")}, JSON_FORMATS),
    "narrow": ({"w.weight": Entry(encoding([0.1, 0.2], 0, axis=0, narrow=True), "parameter")}, ["qsim", "aimet-0.6.1"]),
    "six bits": ({"a": Entry(encoding(0.1, 5, "int6"), "activation")}, ["qsim", "aimet-0.6.1", "aimet-1.0.0"]),
    "bias": ({"b": Entry(encoding([1e-6, 2e-6], 0, "int32", axis=0), "parameter")}, JSON_FORMATS),
    "blocks": (
        {"w": Entry(encoding([[0.1, 0.2], [0.3, 0.4]], 0, "int4", axis=1, block_size=8), "parameter")},
        ["qsim", "aimet-2.0.0", "aimet-2.1.0"],
    ),
    "blocks along 0": (
        {"w": Entry(encoding([[0.1, 0.2]], 0, "int8", axis=0, block_size=8), "parameter")},
        ["qsim", "aimet-2.0.0", "aimet-2.1.0"],
    ),
    "float8": ({"a": Entry(encoding(0.1, 0, "float8_e5m2"), "activation")}, ["qsim", "aimet-2.0.0", "aimet-2.1.0"]),
    "float16": ({"a": Entry(encoding(1.0, 0, "float16"), "activation")}, ["qsim", "aimet-0.6.1", "aimet-1.0.0"]),
    "bfloat16": ({"a": Entry(encoding(1.0, 0, "bfloat16"), "activation")}, ["qsim"]),
    "tiles": ({"w": Entry(encoding([[0.1, 0.2]], 0, "int8", axis=(0, 1), block_size=(4, 8)), "parameter")}, ["qsim"]),
}


@pytest.mark.parametrize("case", EXPRESSIBLE)
def test_what_a_format_can_express_reads_back_to_the_same_bits(tmp_path, case):
    entries, formats = EXPRESSIBLE[case]
    for format in formats:
        qsim.save_encodings(qsim.EncodingFile(entries), tmp_path / "file", format)
        again = qsim.load_encodings(tmp_path / "file")
        assert again.format == format
        assert again.entries.keys() == entries.keys()
        for name, entry in entries.items():
            assert same_numbers(again.encodings[name], entry.encoding), (format, name)
            assert again.entries[name].role in (entry.role, None)


SILENT = {("float16", "aimet-2.0.0"), ("float16", "aimet-2.1.0"), ("float16", "tensorrt-cache")}
SILENT |= {("bfloat16", format) for _, format in SILENT}


@pytest.mark.parametrize("case", EXPRESSIBLE)
def test_what_a_format_cannot_express_is_an_error_with_the_name_and_a_way_out(tmp_path, case):
    entries, formats = EXPRESSIBLE[case]
    for format in FORMATS:
        if format in formats or (case == "blocks" and format == "aimet-1.0.0"):
            continue
        if (case, format) in SILENT or (format == "tensorrt-cache" and entries[next(iter(entries))].role == "parameter"):
            qsim.save_encodings(qsim.EncodingFile(entries), tmp_path / "empty", format)
            assert not qsim.load_encodings(tmp_path / "empty").entries
            continue
        with pytest.raises(qsim.FileFormatError, match=rf"file'.*entry '{next(iter(entries))}': .*(use format=|file\.without|simulation)"):
            qsim.save_encodings(qsim.EncodingFile(entries), tmp_path / "file", format)
        assert list(tmp_path.glob("*file*")) == [], format


def test_blocks_of_1_0_0_are_listed_row_by_row(tmp_path):
    entries = {"w": Entry(encoding([[0.1, 0.2], [0.3, 0.4]], 0, "int4", axis=1, block_size=8), "parameter")}
    qsim.save_encodings(qsim.EncodingFile(entries), tmp_path / "file", "aimet-1.0.0")
    flat = qsim.load_encodings(tmp_path / "file").entries["w"]
    assert flat.encoding == encoding([0.1, 0.2, 0.3, 0.4], 0, "int4", axis=1, block_size=8)
    with pytest.raises(qsim.FileFormatError, match=r"'w': has blocks whose layout .*sim\.load_encodings"):
        qsim.save_encodings(qsim.load_encodings(tmp_path / "file"), tmp_path / "other", "aimet-2.0.0")


@pytest.mark.parametrize("first", AIMET)
@pytest.mark.parametrize("second", JSON_FORMATS)
def test_files_of_aimet_convert_where_the_formats_overlap(tmp_path, first, second):
    file = qsim.load_encodings(write(tmp_path / "file", AIMET[first]))
    common = [
        name for name, entry in file.entries.items() if entry.layout_given or entry.encoding is None or entry.encoding.block_size is None
    ]
    plain = [
        name
        for name in common
        if file.entries[name].encoding is not None and file.encodings[name].dtype in ("int8", "uint8", "uint16", "int16")
    ]
    kept = {name: file.entries[name] for name in plain if name != "strict.weight"}
    assert len(kept) > 2
    qsim.save_encodings(qsim.EncodingFile(kept, file.format, file.version, file.extra), tmp_path / "converted", second)
    again = qsim.load_encodings(tmp_path / "converted")
    assert again.format == second
    assert dict(again.extra) == dict(file.extra)
    for name, entry in kept.items():
        found, expected = again.encodings[name], entry.encoding
        if second in ("aimet-0.6.1", "aimet-1.0.0") and expected.axis is not None:
            assert found.axis == 0  # the format does not tell
            expected = qsim.Encoding(expected.scale, expected.zero_point, expected.quant_min, expected.quant_max, 0, None, expected.dtype)
        assert same_numbers(found, expected), name


def test_lpbq_of_2_0_0_stays_lpbq_in_2_1_0(tmp_path):
    file = qsim.load_encodings(write(tmp_path / "file", V2_0_0))
    qsim.save_encodings(file, tmp_path / "file", "aimet-2.1.0")
    written = json.loads((tmp_path / "file").read_text())
    assert written == {**V2_0_0, "version": "2.1.0"}


def test_all_positive_float32_survive(tmp_path):
    bits = torch.randint(1, 0x7F800000, (2000,), dtype=torch.int32)
    scale = torch.cat([bits, torch.tensor([1, 0x7FFFFF, 0x800000, 0x7F7FFFFF], dtype=torch.int32)]).view(torch.float32)
    file = qsim.EncodingFile({"w": Entry(encoding(scale, axis=0), "parameter")})
    for format in JSON_FORMATS:
        qsim.save_encodings(file, tmp_path / "file", format)
        assert torch.equal(qsim.load_encodings(tmp_path / "file").encodings["w"].scale.view(torch.int32), scale.view(torch.int32))
    entries = {f"t{i}": Entry(encoding(value), "activation") for i, value in enumerate(scale[-300:])}
    qsim.save_encodings(qsim.EncodingFile(entries), tmp_path / "file", "tensorrt-cache")
    again = qsim.load_encodings(tmp_path / "file").encodings
    assert all(torch.equal(again[name].scale.view(torch.int32), entry.encoding.scale.view(torch.int32)) for name, entry in entries.items())


def test_float64_survives_in_qsim(tmp_path):
    wide = qsim.Encoding(torch.tensor(math.pi, dtype=torch.float64), torch.tensor(0, dtype=torch.int32), -128, 127)
    qsim.save_encodings(qsim.EncodingFile({"a": Entry(wide)}), tmp_path / "file")
    assert qsim.load_encodings(tmp_path / "file").encodings["a"] == wide


def test_grids_with_other_ends_differ():
    found = [qsim.Encoding(torch.tensor(0.5), torch.tensor(0, dtype=torch.int32), *ends) for ends in ((-128, 127), (-64, 63), (-128, 127))]
    assert difference(found[0], found[1]) == (math.inf, "-128 to 127, and -64 to 63")
    assert difference(found[0], found[2]) == (0.0, "")
