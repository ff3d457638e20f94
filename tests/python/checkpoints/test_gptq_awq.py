"""GPTQ and AWQ checkpoints against their published layouts, number by number in Python's integers; and through simulations."""

import json
import re
import warnings

import pytest
import torch
from torch import nn

import qsim

safetensors = pytest.importorskip("safetensors.torch")
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # AutoAWQ, packing_utils.py
pytestmark = pytest.mark.filterwarnings("ignore:.*written with zero points")
X = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))


def write(folder, tensors, quantization):
    folder.mkdir(exist_ok=True)
    safetensors.save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "quantization_config": quantization}))
    return folder


def word(numbers, bits):
    """One after the other from the lowest bits on, as int32 words."""
    stream = sum(int(number) << (bits * i) for i, number in enumerate(numbers))
    words = [(stream >> (32 * i)) & 0xFFFFFFFF for i in range(-(-len(numbers) * bits // 32))]
    return [w - 2**32 if w >= 2**31 else w for w in words]


def layer(bits, rows, columns, size, seed=0, lowest_zero=1):
    generator = torch.Generator().manual_seed(seed)
    groups = -(-columns // size)
    q = torch.randint(0, 2**bits, (rows, columns), generator=generator)
    zeros = torch.randint(lowest_zero, 2**bits, (rows, groups), generator=generator)
    return q, zeros, (torch.rand(rows, groups, generator=generator) + 0.01).half()


def gptq(bits, rows, columns, size, less=1, shuffle=False, lowest_zero=1):
    """Tensors of a layer, and the weight that they mean: out of loops."""
    q, zeros, scale = layer(bits, rows, columns, size, lowest_zero=lowest_zero)
    order = torch.arange(columns) // size
    if shuffle:
        order = order[torch.randperm(columns, generator=torch.Generator().manual_seed(5))]
    tensors = {
        "fc.qweight": torch.tensor([word(row, bits) for row in q], dtype=torch.int32).T,
        "fc.qzeros": torch.tensor([word([(z - less) % 2**bits for z in column], bits) for column in zeros.T], dtype=torch.int32),
        "fc.scales": scale.T,
        "fc.g_idx": order.int(),
        "fc.bias": torch.randn(rows),
    }
    weight = [[(int(q[o, i]) - int(zeros[o, order[i]])) * float(scale[o, order[i]]) for i in range(columns)] for o in range(rows)]
    return tensors, torch.tensor(weight)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("shuffle", [False, True], ids=["in order", "desc_act"])
@pytest.mark.parametrize("layout", ["gptq", "gptq_v2"])
def test_gptq_is_read_and_written(bits, shuffle, layout, tmp_path):
    tensors, weight = gptq(bits, 32, 96, 32, int(layout == "gptq"), shuffle, lowest_zero=int(layout == "gptq"))
    config = {"quant_method": "gptq", "bits": bits, "group_size": 32, "desc_act": shuffle, "sym": False, "checkpoint_format": layout}
    checkpoint = qsim.load_checkpoint(write(tmp_path / "in", tensors, config))
    assert torch.equal(checkpoint.state_dict()["fc.weight"], weight)
    assert checkpoint.model_config == {"model_type": "own"}
    qsim.save_checkpoint(checkpoint, tmp_path / "out", layout)
    again = safetensors.load_file(tmp_path / "out" / "model.safetensors")
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], t) and again[name].dtype == t.dtype for name, t in tensors.items())
    written = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert {key: written[key] for key in config} == config


def test_a_zero_point_of_zero_is_told(tmp_path):
    tensors, weight = gptq(4, 32, 64, 32, lowest_zero=0)
    folder = write(tmp_path / "in", tensors, {"quant_method": "gptq", "bits": 4, "group_size": 32})
    with pytest.warns(UserWarning, match="auto-gptq reads 0"):
        checkpoint = qsim.load_checkpoint(folder)
    assert torch.equal(checkpoint.weights["fc.weight"].dequantize(), weight)
    with pytest.raises(qsim.FileFormatError, match="zero points of 0, which readers of 'gptq' disagree on"):
        qsim.save_checkpoint(checkpoint, tmp_path / "out", "gptq")
    qsim.save_checkpoint(checkpoint, tmp_path / "out", "gptq_v2")
    again = qsim.load_checkpoint(tmp_path / "out")
    assert again.format == "gptq_v2"
    assert torch.equal(again.weights["fc.weight"].dequantize(), weight)


def test_gptq_without_order_and_a_short_group(tmp_path):
    tensors, weight = gptq(4, 8, 80, 32)
    del tensors["fc.g_idx"]
    folder = write(tmp_path / "in", tensors, {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False})
    assert torch.equal(qsim.load_checkpoint(folder).weights["fc.weight"].dequantize(), weight)


def test_awq_is_read_and_written(tmp_path):
    q, zeros, scale = layer(4, 16, 64, 32, lowest_zero=0)

    def packed(numbers):  # [rows, 8 n]: nibble i of a word is the channel AWQ_ORDER[i] of its eight
        return torch.tensor([[word([row[8 * k + i] for i in AWQ_ORDER], 4)[0] for k in range(len(row) // 8)] for row in numbers])

    tensors = {"fc.qweight": packed(q.T).int(), "fc.qzeros": packed(zeros.T).int(), "fc.scales": scale.T, "norm.weight": torch.ones(3)}
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    checkpoint = qsim.load_checkpoint(write(tmp_path / "in", tensors, config))
    expected = [[(int(q[o, i]) - int(zeros[o, i // 32])) * float(scale[o, i // 32]) for i in range(64)] for o in range(16)]
    assert torch.equal(checkpoint.state_dict()["fc.weight"], torch.tensor(expected))
    qsim.save_checkpoint(checkpoint, tmp_path / "out", "awq")
    again = safetensors.load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(again[name], t) for name, t in tensors.items())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"] == config


@pytest.mark.parametrize("format", ["gptq_v2", "awq", "compressed-tensors"])
@pytest.mark.parametrize("spec", ["symmetric", "asymmetric", "channel"])
def test_simulations_go_through_files(format, spec, tmp_path):
    specs = {
        "symmetric": qsim.TensorSpec(bits=4, symmetric=True, axis=1, block_size=16, method="mse"),
        "asymmetric": qsim.TensorSpec(bits=4, axis=1, block_size=16, method="minmax"),
        "channel": qsim.TensorSpec(bits=4, axis=0, method="minmax"),
    }
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16)).eval()
    sim = qsim.QuantSim(model, X, qsim.Config(specs[spec], None))
    sim.calibrate([X], progress=False)
    if format != "compressed-tensors":
        with pytest.raises(ValueError, match=r"(?s)'0\.weight' has scales that are no numbers of float16.*'2\.weight'"):
            sim.save_compressed(tmp_path / "early", format)
        assert not (tmp_path / "early").exists()
        sim.round_scales(torch.float16)
    sim.save_compressed(tmp_path, format)
    checkpoint = qsim.load_checkpoint(tmp_path)
    baked = sim.bake().state_dict()
    assert all(torch.equal(t, baked[name]) for name, t in checkpoint.state_dict().items())
    fresh = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16)).eval()
    again = qsim.QuantSim(fresh, X, checkpoint.config())
    again.load_compressed(checkpoint)
    assert torch.equal(again(X), sim(X))
    again.save_compressed(tmp_path / "again", format)
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()


def test_what_does_not_fit_is_listed_and_nothing_changed(tmp_path):
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16)).eval()
    sim = qsim.QuantSim(model, X, qsim.w4a16(group=16).override(position="last", weight=qsim.TensorSpec(bits=4, axis=0)))
    sim.calibrate([X], progress=False)
    sim.save_compressed(tmp_path)
    other = qsim.QuantSim(nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 16)).eval(), X, qsim.w4a16(group=32))
    before = {name: t.clone() for name, t in other.state_dict().items()}
    with pytest.raises(ValueError, match=r"(?s)'0\.weight': has shape \(32, 64\); expected \(24, 64\).*'2\.weight' is quantized"):
        other.load_compressed(tmp_path)
    assert all(torch.equal(t, before[name]) or t.isnan().all() for name, t in other.state_dict().items())
    eight = qsim.QuantSim(model, X, qsim.Config(qsim.TensorSpec(bits=8, axis=0), None))
    with pytest.raises(ValueError, match=r"'0\.weight': the file has int4 on \[-8, 7\], the quantizer int8"):
        eight.load_compressed(tmp_path)


HOSTILE = {
    "words of another type": ({"fc.qweight": torch.zeros(12, 32)}, "qweight is float32 of shape"),
    "empty": ({"fc.qweight": torch.zeros(0, 32, dtype=torch.int32)}, "not empty"),
    "no scales": ({"fc.scales": None}, "has no scales"),
    "scales of another layer": ({"fc.scales": torch.ones(3, 31).half()}, "the shape of scales"),
    "zero points of another layer": ({"fc.qzeros": torch.zeros(2, 4, dtype=torch.int32)}, "the shape of qzeros"),
    "another width": ({"fc.g_idx": torch.arange(192).int() // 32}, "by its tensors"),
    "no width": ({"fc.g_idx": torch.arange(95).int() // 32}, "rows of qweight"),
    "groups beyond the scales": ({"fc.g_idx": torch.arange(96).int() // 16}, "the number of groups"),
    "wild groups": ({"fc.g_idx": torch.full((96,), 2**31 - 1, dtype=torch.int32)}, "the number of groups"),
    "negative groups": ({"fc.g_idx": torch.arange(96).int() // 32 - 1}, "does not put 32 of 96"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_layers(name, tmp_path):
    changes, message = HOSTILE[name]
    tensors = {key: t for key, t in {**gptq(4, 32, 96, 32)[0], **changes}.items() if t is not None}
    with pytest.raises(qsim.FileFormatError, match=message):
        qsim.load_checkpoint(write(tmp_path, tensors, {"quant_method": "gptq", "bits": 4, "group_size": 32}))


CONFIGS = {
    "no config": ({}, "how the weights are packed"),
    "another method": ({"quant_method": "bitsandbytes"}, "quant_method is 'bitsandbytes'"),
    "a method that is a list": ({"quant_method": ["gptq"]}, "quant_method is"),
    "another layout": ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "expected 'gptq' or 'gptq_v2'"),
    "other bits": ({"quant_method": "gptq", "bits": 8}, "expected 8"),
    "gemv": ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "expected 'gemm'"),
    "no groups": ({"quant_method": "compressed-tensors", "config_groups": {}}, "config_groups"),
    "float": ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 8, "type": "float"}}}}, "of 4 or 8"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_hostile_configs(name, tmp_path):
    quantization, message = CONFIGS[name]
    with pytest.raises(qsim.FileFormatError, match=message):
        qsim.load_checkpoint(write(tmp_path, gptq(4, 32, 96, 32)[0], quantization))


def test_damaged_folders(tmp_path):
    folder = write(tmp_path, gptq(4, 32, 96, 32)[0], {"quant_method": "gptq", "bits": 4})
    data = (folder / "model.safetensors").read_bytes()
    for damaged in (data[:-1], data[:40], b"", b"\xff" * 8 + data[8:], data[:8] + b"[" + data[9:]):
        (folder / "model.safetensors").write_bytes(damaged)
        with pytest.raises(qsim.FileFormatError, match="is no safetensors file"):
            qsim.load_checkpoint(folder)
    (folder / "model.safetensors").write_bytes(data)
    index = folder / "model.safetensors.index.json"
    for shards in ({"a": "../model.safetensors"}, {"a": "/etc/passwd"}, {"a": 3}, []):
        index.write_text(json.dumps({"weight_map": shards}))
        with pytest.raises(qsim.FileFormatError, match=r"weight_map|a shard"):
            qsim.load_checkpoint(folder)
    index.write_text(json.dumps({"weight_map": {"a": "missing.safetensors"}}))
    with pytest.raises(FileNotFoundError, match=r"missing\.safetensors"):
        qsim.load_checkpoint(folder)
    index.unlink()
    (folder / "config.json").write_text("{")
    with pytest.raises(qsim.FileFormatError, match="is no JSON"):
        qsim.load_checkpoint(folder)
    with pytest.raises(FileNotFoundError, match="there is no"):
        qsim.load_checkpoint(tmp_path / "nowhere")
    (tmp_path / "file").write_bytes(b"PK")
    with pytest.raises(qsim.FileFormatError, match="expected a GGUF file, or the folder"):
        qsim.load_checkpoint(tmp_path / "file")


def test_shards(tmp_path):
    tensors, weight = gptq(4, 32, 96, 32)
    folder = write(tmp_path, tensors, {"quant_method": "gptq", "bits": 4, "group_size": 32})
    (folder / "model.safetensors").unlink()
    names = {name: f"model-{i % 2 + 1}-of-2.safetensors" for i, name in enumerate(tensors)}
    for shard in set(names.values()):
        safetensors.save_file({name: t.contiguous() for name, t in tensors.items() if names[name] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert torch.equal(qsim.load_checkpoint(folder).weights["fc.weight"].dequantize(), weight)


@pytest.mark.parametrize("linear", [["a", "fc", "b.0"], None])
@pytest.mark.parametrize(("format", "key"), [("gptq", "dynamic"), ("awq", "modules_to_not_convert")])
def test_layers_in_float_are_named(format, key, linear, tmp_path):
    weight = qsim.PackedWeight(torch.ones(8, 32, dtype=torch.int8), torch.ones(8, 1), torch.zeros(8, 1, dtype=torch.int32), 4)
    floats = {name: torch.ones(4, 4) for name in ("a.weight", "b.0.weight")}
    qsim.save_checkpoint(qsim.Checkpoint({"fc.weight": weight}, floats, format), tmp_path, format, linear=linear)
    said = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert said[key] == {"gptq": {r"-:^a$": {}, r"-:^b\.0$": {}}, "awq": ["a", "b.0"]}[format]
    assert not said.get("lm_head")
    assert qsim.load_checkpoint(tmp_path).tensors.keys() == floats.keys()


@pytest.mark.parametrize("format", ["gptq", "awq"])
def test_what_readers_mistake_is_said(format, tmp_path):
    weight = qsim.PackedWeight(torch.ones(8, 32, dtype=torch.int8), torch.ones(8, 1), torch.zeros(8, 1, dtype=torch.int32), 4)
    weights = {"lm_head.weight": weight, "mlp.gate_proj.weight": weight}
    checkpoint = qsim.Checkpoint(weights, {"mlp.gate.weight": torch.ones(4, 4)}, format)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        qsim.save_checkpoint(checkpoint, tmp_path, format)
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]["lm_head"] is True
    expected = ["'lm_head' is written packed", "'mlp.gate' is written in float and 'mlp.gate_proj' packed"] if format == "awq" else []
    assert len(told) == len(expected)
    assert all(text in str(warning.message) for text, warning in zip(expected, told, strict=True))


@pytest.mark.parametrize("format", ["gptq", "awq"])
def test_transformers_converts_what_is_packed(format, tmp_path):
    quantizers = pytest.importorskip("transformers.quantizers.quantizers_utils")
    model = nn.ModuleDict({name: nn.ModuleList(nn.Linear(32, 32) for _ in range(2)) for name in ("q_proj", "o_proj")})
    weight = qsim.PackedWeight(torch.ones(8, 32, dtype=torch.int8), torch.ones(8, 1), torch.zeros(8, 1, dtype=torch.int32), 4)
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    packed = {"q_proj.1", "o_proj.0"}
    checkpoint = qsim.Checkpoint({f"{name}.weight": weight for name in packed}, {}, format)
    qsim.save_checkpoint(checkpoint, tmp_path, format, linear=linear)
    said = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    if format == "awq":
        assert {name for name in linear if quantizers.should_convert_module(name, said["modules_to_not_convert"])} == packed
    else:  # as GPTQModel and vLLM match them
        left = [pattern.removeprefix("-:") for pattern in said["dynamic"]]
        assert {name for name in linear if not any(re.match(pattern, name) for pattern in left)} == packed


@pytest.mark.parametrize(
    "said", [{"format": "gptq_v2"}, {"checkpoint_format": "gptq_v2"}, {"format": "GPTQ_V2", "checkpoint_format": "gptq_v2"}]
)
def test_the_layout_has_two_keys(said, tmp_path):
    tensors, weight = gptq(4, 32, 96, 32, less=0)
    checkpoint = qsim.load_checkpoint(write(tmp_path, tensors, {"quant_method": "gptq", "bits": 4, "group_size": 32, **said}))
    assert checkpoint.format == "gptq_v2"
    assert torch.equal(checkpoint.state_dict()["fc.weight"], weight)


CONTRADICTIONS = {
    "layouts": ({"format": "gptq", "checkpoint_format": "gptq_v2"}, "format 'gptq' and checkpoint_format 'gptq_v2'"),
    "layouts of awq": ({"quant_method": "awq", "format": "gemv", "version": "gemm"}, "format 'gemv' and version 'gemm'"),
    "widths of awq": ({"quant_method": "awq", "w_bit": 3}, "bits 4 and w_bit 3"),
    "another layout of awq": ({"quant_method": "awq", "format": "gemv"}, "expected 'gemm'"),
    "groups without order": ({"desc_act": True}, "has no g_idx"),
    "patterns": ({"dynamic": ["-:a"]}, "dynamic of quantization_config"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_contradictions_are_refused(name, tmp_path):
    said, message = CONTRADICTIONS[name]
    tensors = gptq(4, 32, 96, 32)[0]
    del tensors["fc.g_idx"]
    with pytest.raises(qsim.FileFormatError, match=message):
        qsim.load_checkpoint(write(tmp_path, tensors, {"quant_method": "gptq", "bits": 4, "group_size": 32, **said}))


@pytest.mark.parametrize("format", ["compressed-tensors", "gptq", "awq"])
def test_a_layer_that_is_the_model_is_refused(format, tmp_path):
    sim = qsim.QuantSim(nn.Linear(64, 32).eval(), X, qsim.Config(qsim.w4a16(group=32).weight, None))
    sim.calibrate([X], progress=False)
    sim.round_scales(torch.float16)
    with pytest.raises(qsim.FileFormatError, match=r"'weight' is by its name the weight of no module.*nn\.Sequential"):
        sim.save_compressed(tmp_path / "new", format)
    assert not any(tmp_path.iterdir())
