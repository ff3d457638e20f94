"""GGUF files: blocks against scalar loops and llama.cpp's own package, where that is installed; damaged files."""

import struct

import pytest
import torch

import qsim

TYPES = {"F32": (0, 1, 4), "F16": (1, 1, 2), "Q4_0": (2, 32, 18), "Q4_1": (3, 32, 20), "Q8_0": (8, 32, 34), "Q4_K": (12, 256, 144)}
TYPES |= {"Q6_K": (14, 256, 210), "BF16": (30, 1, 2)}
QUANTIZED = [name for name in TYPES if name.startswith("Q")]


def text(value):
    return struct.pack("<Q", len(value)) + value.encode()


def file(tensors, metadata=b"", entries=0):
    """`tensors`: name -> (type, shape with the rows last, bytes)."""
    header, data = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), entries) + metadata, b""
    for name, (kind, shape, raw) in tensors.items():
        header += text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape) + struct.pack("<IQ", kind, len(data))
        data += raw + bytes(-len(raw) % 32)
    return header + bytes(-len(header) % 32) + data


def blocks(name, rows, columns, seed=0):
    """Random blocks, whose float16 are finite."""
    _, elements, size = TYPES[name]
    raw = torch.randint(0, 256, (rows * columns // elements, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    halves = {"Q4_0": [0], "Q4_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q6_K": [208]}[name]
    for at in halves:
        raw[:, at + 1] &= 0xBB  # no exponent of ones
    return raw


def half(block, at):
    return struct.unpack("<e", bytes(block[at : at + 2]))[0]


def scalar(name, block):
    """The values of a block, one by one, as ggml-quants.c writes the formulas."""
    if name in ("Q4_0", "Q4_1"):
        at = 2 if name == "Q4_0" else 4
        q = [block[at + i] & 15 for i in range(16)] + [block[at + i] >> 4 for i in range(16)]
        return [(n - 8, half(block, 0), 0.0) if name == "Q4_0" else (n, half(block, 0), half(block, 2)) for n in q]
    if name == "Q8_0":
        return [(n - 256 if n > 127 else n, half(block, 0), 0.0) for n in block[2:]]
    found = []
    if name == "Q4_K":
        s = block[4:16]
        for j in range(8):  # get_scale_min_k4
            scale, low = s[j] & 63, s[(j + 4) % 12] & 63
            if j > 3:
                scale, low = (s[j + 4] & 15) | (s[j - 4] >> 6) << 4, (s[j + 4] >> 4) | (s[j] >> 6) << 4
            for i in range(32):
                byte = block[16 + 32 * (j // 2) + i]
                found.append((byte >> 4 if j % 2 else byte & 15, (half(block, 0), scale), (half(block, 2), low)))
        return found
    for i in range(256):
        part, j = divmod(i, 128)
        low, high = block[64 * part + j % 64], block[128 + 32 * part + j % 32]
        q = (low >> 4 if j >= 64 else low & 15) | ((high >> (2 * (j // 32))) & 3) << 4
        scale = block[192 + i // 16]
        found.append((q - 32, (half(block, 208), scale - 256 if scale > 127 else scale), 0.0))
    return found


def value(q, scale, offset):
    """In float32, in the order of llama.cpp's code."""
    one = torch.tensor
    step = one(scale[0]) * one(float(scale[1])) if isinstance(scale, tuple) else one(scale)
    if isinstance(offset, tuple):
        return step * q - one(offset[0]) * one(float(offset[1]))
    return step * q + one(offset) if offset else step * q


@pytest.mark.parametrize("name", QUANTIZED)
def test_blocks(name, tmp_path):
    raw = blocks(name, 3, 512)
    path = tmp_path / "model.gguf"
    path.write_bytes(file({"blk.0.weight": (TYPES[name][0], (512, 3), bytes(raw.flatten().tolist()))}))
    weight = qsim.load_checkpoint(path).weights["blk.0.weight"]
    expected = torch.stack([value(*element) for block in raw.tolist() for element in scalar(name, block)]).reshape(3, 512)
    assert torch.equal(weight.dequantize(), expected)
    assert weight.integers.shape == (3, 512)


@pytest.mark.parametrize("name", QUANTIZED)
def test_the_package_reads_the_same(name, tmp_path):
    gguf = pytest.importorskip("gguf")
    path, raw = tmp_path / "model.gguf", blocks(name, 4, 1024, seed=1)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("tokens", ["a", "b", "ä"])
    writer.add_uint32("count", 7)
    kind = gguf.GGMLQuantizationType[name]
    writer.add_tensor("w.weight", raw.reshape(4, -1).numpy(), raw_dtype=kind)
    writer.add_tensor("norm.weight", torch.randn(24).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = qsim.load_checkpoint(path)
    expected = torch.from_numpy(gguf.quants.dequantize(raw.reshape(4, -1).numpy(), kind))
    assert torch.equal(checkpoint.weights["w.weight"].dequantize(), expected)
    assert checkpoint.model_config["count"] == 7
    assert checkpoint.tensors["norm.weight"].shape == (24,)


def test_floats_and_metadata(tmp_path):
    numbers = torch.randn(2, 3, 5)
    stored = {"F32": numbers, "F16": numbers.half(), "BF16": numbers.bfloat16()}
    tensors = {name: (TYPES[name][0], (5, 3, 2), bytes(t.view(torch.uint8).flatten().tolist())) for name, t in stored.items()}
    nested = struct.pack("<IIQIQHHIQ", 9, 9, 2, 2, 2, 1, 2, 2, 0)
    metadata = text("a") + struct.pack("<If", 6, 0.5) + text("b") + struct.pack("<I", 8) + text("llama") + text("c") + nested
    (tmp_path / "m.gguf").write_bytes(file(tensors, metadata, 3))
    checkpoint = qsim.load_checkpoint(tmp_path / "m.gguf")
    assert all(torch.equal(checkpoint.tensors[name], t) and checkpoint.tensors[name].dtype == t.dtype for name, t in stored.items())
    assert checkpoint.model_config == {"a": 0.5, "b": "llama"}
    with pytest.raises(ValueError, match="no packed weights"):
        checkpoint.config()


def test_what_no_simulation_has_is_said(tmp_path):
    raw = bytes(blocks("Q4_K", 1, 256).flatten().tolist())
    (tmp_path / "m.gguf").write_bytes(file({"w.weight": (12, (256, 1), raw)}))
    with pytest.raises(ValueError, match=r"'w\.weight': its groups have minima in float"):
        qsim.load_checkpoint(tmp_path / "m.gguf").config()


GOOD = file({"w.weight": (2, (32, 2), bytes(36)), "v": (0, (3,), bytes(12))}, text("k") + struct.pack("<II", 4, 1), 1)
INFO = GOOD.index(text("w.weight")) + len(text("w.weight"))


def changed(at, format, *values):
    return GOOD[:at] + struct.pack(format, *values) + GOOD[at + struct.calcsize(format) :]


HOSTILE = {
    "a version to come": (changed(4, "<I", 4), "the version is 4"),
    "big-endian": (changed(4, ">I", 3), "the version"),
    "tensors without end": (changed(8, "<Q", 2**60), "it is not complete|is not UTF-8|a name has|occurs twice|dimensions"),
    "entries without end": (changed(16, "<Q", 2**60), "not complete|type of a value|a name has"),
    "a name without end": (changed(24, "<Q", 2**62), "a name has"),
    "no dimensions": (changed(INFO, "<I", 0), "the number of dimensions is 0"),
    "many dimensions": (changed(INFO, "<I", 2**31), "the number of dimensions"),
    "a huge row": (changed(INFO + 4, "<Q", 2**63), "lie upon each other|not complete"),
    "a size that overflows": (changed(INFO + 4, "<QQ", 2**62, 2**62), "lie upon each other|not complete"),
    "no columns": (changed(INFO + 4, "<Q", 0), "whole blocks"),
    "half a block": (changed(INFO + 4, "<Q", 48), "whole blocks"),
    "an unknown type": (changed(INFO + 20, "<I", 99), "the type is 99"),
    "an offset beyond the file": (changed(INFO + 24, "<Q", 2**63), "it is not complete"),
    "an offset between": (changed(INFO + 24, "<Q", 7), "multiple of 32"),
    "no file": (b"", "is empty"),
    "another file": (b"GGML" + GOOD[4:], "the beginning"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files(name, tmp_path):
    data, message = HOSTILE[name]
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(qsim.FileFormatError, match=message):
        qsim.load_checkpoint(tmp_path / "m.gguf")


def test_cut_off_anywhere_and_spoiled_anywhere(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(GOOD)
    assert set(qsim.load_checkpoint(path).weights) == {"w.weight"}
    end = len(GOOD) - (32 - 12)  # behind it is only the padding of the last tensor
    for length in range(end):
        path.write_bytes(GOOD[:length])
        with pytest.raises(qsim.FileFormatError):
            qsim.load_checkpoint(path)
    generator = torch.Generator().manual_seed(0)
    refused = 0
    for _ in range(300):
        at, byte = (int(torch.randint(n, (), generator=generator)) for n in (len(GOOD), 256))
        path.write_bytes(GOOD[:at] + bytes([byte]) + GOOD[at + 1 :])
        try:
            qsim.load_checkpoint(path)
        except qsim.FileFormatError:
            refused += 1
    assert refused > 50


WRITTEN = {
    "Q4_K": {"dtype": "q4_k"},
    "Q6_K": {"dtype": "q6_k"},
    "Q4_0": {"bits": 4, "axis": 1, "block_size": 32, "symmetric": True},
    "Q8_0": {"bits": 8, "axis": 1, "block_size": 32, "symmetric": True, "narrow": True},
}


def simulated(spec, columns=512):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(columns, 24), torch.nn.LayerNorm(24)).eval()
    sim = qsim.QuantSim(model, torch.randn(2, columns), qsim.Config(qsim.TensorSpec(method="mse", **spec), None))
    sim.calibrate([torch.randn(2, columns)], progress=False)
    return sim


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_is_the_baked_weight(name, tmp_path):
    sim, path = simulated(WRITTEN[name]), tmp_path / "model.gguf"
    with pytest.raises(qsim.FileFormatError, match=r"'0\.weight' has . bits in groups of .*call sim\.round_scales"):
        sim.save_compressed(path, "gguf")
    assert not path.exists()
    sim.round_scales(torch.float16)
    sim.save_compressed(path, "gguf")
    checkpoint, baked = qsim.load_checkpoint(path), sim.bake().state_dict()
    assert torch.equal(checkpoint.weights["0.weight"].dequantize(), baked["0.weight"])
    assert all(torch.equal(checkpoint.tensors[key], baked[key]) for key in ("0.bias", "1.weight", "1.bias"))
    again = qsim.QuantSim(sim.bake(), torch.randn(2, 512), checkpoint.config())
    again.load_compressed(checkpoint)
    assert torch.equal(again.bake()[0].weight, baked["0.weight"])
    gguf = pytest.importorskip("gguf")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert tensors["0.weight"].tensor_type == gguf.GGMLQuantizationType[name]
    for key, tensor in tensors.items():
        values = torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        assert torch.equal(values.reshape(baked[key].shape), baked[key])


def test_what_a_file_cannot_hold_is_listed_and_nothing_written(tmp_path):
    pairs = {"asymmetric": ({"bits": 4, "axis": 1, "block_size": 32}, 64), "rows of 96": ({"dtype": "q4_k", "block_size": 32}, 96)}
    for what, (spec, columns) in pairs.items():
        sim = simulated(spec, columns)
        sim.round_scales(torch.float16)
        with pytest.raises(qsim.FileFormatError, match=r"'0\.weight' has"):
            sim.save_compressed(tmp_path / "m.gguf", "gguf")
        assert not list(tmp_path.iterdir()), what
    with pytest.raises(ValueError, match=r"ends in \.gguf"):
        simulated(WRITTEN["Q4_K"]).save_compressed(tmp_path / "folder", "gguf")
    whole = qsim.Checkpoint({}, {"steps": torch.ones(3, dtype=torch.int64)}, "gguf")
    with pytest.raises(qsim.FileFormatError, match="no weight is quantized"):
        qsim.save_checkpoint(whole, tmp_path / "m.gguf", "gguf")


def test_metadata_and_symmetric_weights_are_written_again(tmp_path):
    raw = bytes(blocks("Q4_0", 2, 64).flatten().tolist())
    metadata = (
        text("a") + struct.pack("<If", 6, 0.5) + text("b") + struct.pack("<I", 8) + text("llama") + text("c") + struct.pack("<II", 4, 7)
    )
    (tmp_path / "m.gguf").write_bytes(file({"w.weight": (2, (64, 2), raw), "v": (0, (3,), bytes(12))}, metadata, 3))
    checkpoint = qsim.load_checkpoint(tmp_path / "m.gguf")
    qsim.save_checkpoint(checkpoint, tmp_path / "n.gguf", "gguf")
    again = qsim.load_checkpoint(tmp_path / "n.gguf")
    assert again.model_config == checkpoint.model_config == {"a": 0.5, "b": "llama", "c": 7}
    assert torch.equal(again.weights["w.weight"].dequantize(), checkpoint.weights["w.weight"].dequantize())
