"""Packed weights, unpacked bit by bit, and read by the libraries that they are for, where these are installed."""

import json

import pytest
import torch
from torch import nn

import qsim

pytestmark = pytest.mark.filterwarnings("ignore:.*written with zero points", "ignore:You passed `quantization_config`")
X = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
SPECS = {
    "group 32": qsim.TensorSpec(bits=4, axis=1, block_size=32, method="minmax"),
    "group 16 symmetric": qsim.TensorSpec(bits=4, axis=1, block_size=16, symmetric=True, method="minmax"),
    "channel": qsim.TensorSpec(bits=4, axis=0, method="minmax"),
    "unsigned": qsim.TensorSpec(bits=4, axis=1, block_size=32, signed=False, method="minmax"),
    "8 bits": qsim.TensorSpec(bits=8, axis=1, block_size=64, method="minmax"),
    "narrow": qsim.TensorSpec(bits=8, axis=0, symmetric=True, narrow=True, method="minmax"),
}


def simulated(config, width=20):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 3)).eval()
    sim = qsim.QuantSim(model, X, config)
    sim.calibrate([X], progress=False)
    return sim


def unpacked(words, bits, columns):
    """Number by number, in Python's integers."""
    rows = []
    for row in words.tolist():
        bytes_ = b"".join((word % 2**32).to_bytes(4, "little") for word in row)
        number = int.from_bytes(bytes_, "little")
        rows.append([(number >> (bits * i)) % 2**bits - 2 ** (bits - 1) for i in range(columns)])
    return torch.tensor(rows)


@pytest.mark.parametrize("name", SPECS)
def test_what_is_written_is_the_baked_weight(name, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    sim = simulated(qsim.Config(SPECS[name], None).override("2", weight=None))
    sim.save_compressed(tmp_path)
    state = safetensors.load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    scheme, baked = config["config_groups"]["group_0"]["weights"], sim.bake()
    bits, rows, columns = scheme["num_bits"], *state["0.weight_shape"].tolist()
    q, scale = unpacked(state["0.weight_packed"], bits, columns), state["0.weight_scale"]
    zeros = torch.zeros(rows, scale.shape[1]) if scheme["symmetric"] else unpacked(state["0.weight_zero_point"].T, bits, rows).T
    groups = q.unflatten(1, (scale.shape[1], -1))
    assert torch.equal(((groups - zeros[..., None]).float() * scale[..., None]).flatten(1), baked[0].weight)
    assert scheme["group_size"] == SPECS[name].block_size
    assert config["ignore"] == ["2"]
    assert torch.equal(state["2.weight"], sim.model[2].weight)
    assert "0.weight" not in state


def test_the_cure_for_zero_points_is_not_told_where_it_is_none(tmp_path):
    pytest.importorskip("safetensors")
    sim = simulated(qsim.Config(SPECS["group 32"], None).override("2", weight={"bits": 8, "axis": 0, "block_size": None}))
    with pytest.warns(UserWarning, match="'0' and 1 more written with zero points.*no way round it beside weights of other widths") as told:
        sim.save_compressed(tmp_path / "a")
    with pytest.warns(UserWarning, match="written with zero points") as again:
        qsim.save_checkpoint(qsim.load_checkpoint(tmp_path / "a"), tmp_path / "b")
    assert {warning.filename for warning in (*told, *again)} == {__file__}


@pytest.mark.parametrize("name", SPECS)
def test_what_is_written_is_read(name, tmp_path):
    pytest.importorskip("safetensors")
    sim = simulated(qsim.Config(SPECS[name], None).override("2", weight=None))
    sim.save_compressed(tmp_path / "a")
    read = qsim.load_checkpoint(tmp_path / "a")
    assert torch.equal(read.state_dict()["0.weight"], sim.bake()[0].weight)
    qsim.save_checkpoint(read, tmp_path / "b", linear=["0", "2"])
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    torch.manual_seed(1)
    fresh = nn.Sequential(nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, 3)).eval()
    again = qsim.QuantSim(fresh, X, read.config())
    again.load_compressed(tmp_path / "a")
    assert torch.equal(again(X), sim(X))
    assert torch.equal(again.bake()[0].weight, sim.bake()[0].weight)


def test_what_it_cannot_hold_is_listed_and_nothing_written(tmp_path):
    sim = simulated(qsim.Config(qsim.TensorSpec(bits=3, axis=1, block_size=48), None))
    with pytest.raises(ValueError, match=r"(?s)'0\.weight' has 3 bits; expected 4 or 8.*'2\.weight' has 3 bits"):
        sim.save_compressed(tmp_path)
    with pytest.raises(ValueError, match="which groups of 48 do not divide"):
        simulated(qsim.Config(qsim.TensorSpec(bits=4, axis=1, block_size=48), None)).save_compressed(tmp_path)
    with pytest.raises(ValueError, match=r"quantizers are of no weight.*activation=None"):
        simulated(qsim.w4a8()).save_compressed(tmp_path)
    with pytest.raises(ValueError, match="no weight is quantized"):
        simulated(qsim.Config(None, None)).save_compressed(tmp_path)
    with pytest.raises(ValueError, match="expected integers of 2 to 8 bits"):
        simulated(qsim.Config(qsim.TensorSpec(bits=12, axis=0), None)).save_compressed(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", SPECS)
def test_the_library_unpacks_it(name, tmp_path):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationConfig

    safetensors = pytest.importorskip("safetensors.torch")
    sim = simulated(qsim.Config(SPECS[name], None).override("2", weight=None))
    sim.save_compressed(tmp_path)
    config = QuantizationConfig(**json.loads((tmp_path / "config.json").read_text())["quantization_config"])
    state = safetensors.load_file(tmp_path / "model.safetensors")
    own = {key.removeprefix("0."): t for key, t in state.items() if key.startswith("0.")}
    read = PackedQuantizationCompressor.decompress(own, config.config_groups["group_0"])
    assert torch.equal(read["weight"], sim.bake()[0].weight)


@pytest.mark.parametrize("name", ["group 16 symmetric", "narrow", "group 32", "8 bits"])
def test_transformers_reads_it(name, tmp_path):
    """Zero points as the warning says: the file's layout is right, but 0.18 to 0.20 make room for zero points that are not packed."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, tie_word_embeddings=False)).eval()
    ids = torch.randint(64, (2, 9))
    config = qsim.Config(SPECS[name], None).override("lm_head", weight=None).override("*.embed_tokens", weight=None)
    sim = qsim.QuantSim(model, {"input_ids": ids}, config)
    sim.calibrate([{"input_ids": ids}], progress=False)
    options = {}
    if SPECS[name].symmetric:
        sim.save_compressed(tmp_path)
    else:
        with pytest.warns(UserWarning, match=r"'model\.layers\.0.*q_proj' and 13 more written with zero points.*dequantize=True") as told:
            sim.save_compressed(tmp_path)
        assert told[0].filename == __file__
        options["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=True)
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, **options).eval()
    with torch.no_grad():
        assert torch.equal(read(input_ids=ids).logits, sim.bake()(input_ids=ids).logits)
        assert not torch.equal(read(input_ids=ids).logits, model(input_ids=ids).logits)


def test_a_weight_of_two_layers_is_refused_by_both_names(tmp_path):
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval()
    model[2].weight = model[0].weight
    sim = qsim.QuantSim(model, X, qsim.Config(SPECS["group 32"], None))
    sim.calibrate([X], progress=False)
    with pytest.raises(ValueError, match=r"(?s)'0.weight' is shared with another module: leave .*'2.weight' is shared") as told:
        sim.save_compressed(tmp_path)
    assert str(told.value).count('Config.override("0", weight=None)') == 2


def packed(symmetric, shuffled):
    generator = torch.Generator().manual_seed(0)
    integers = torch.randint(-8, 8, (8, 64), dtype=torch.int8, generator=generator)
    zero_point = torch.full((8, 2), 0 if symmetric else 3, dtype=torch.int32)
    order = (torch.randperm(64, generator=generator) // 32).int() if shuffled else None
    return qsim.PackedWeight(integers, torch.rand(8, 2, generator=generator), zero_point, 4, 32, order)


@pytest.mark.parametrize(
    ("symmetric", "shuffled", "part", "said", "message"),
    [
        (False, False, "weight_zero_point", {}, "has no weight_zero_point"),
        (True, True, "weight_g_idx", {}, "has no weight_g_idx"),
        (True, True, "weight_g_idx", {"actorder": "dynamic"}, "has no weight_g_idx"),
        (False, False, None, {"symmetric": True}, "weight_zero_point is not 0 everywhere, though config_groups says symmetric"),
    ],
)
def test_parts_that_the_config_says_are_there(symmetric, shuffled, part, said, message, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    weight = packed(symmetric, shuffled)
    qsim.save_checkpoint(qsim.Checkpoint({"fc.weight": weight}, {}, "compressed-tensors"), tmp_path)
    assert torch.equal(qsim.load_checkpoint(tmp_path).state_dict()["fc.weight"], weight.dequantize())
    tensors = safetensors.load_file(tmp_path / "model.safetensors")
    safetensors.save_file({name: t for name, t in tensors.items() if name != f"fc.{part}"}, tmp_path / "model.safetensors")
    document = json.loads((tmp_path / "config.json").read_text())
    document["quantization_config"]["config_groups"]["group_0"]["weights"] |= said
    (tmp_path / "config.json").write_text(json.dumps(document))
    with pytest.raises(qsim.FileFormatError, match=message):
        qsim.load_checkpoint(tmp_path)


def test_folded_batch_norms_are_told(tmp_path):
    pytest.importorskip("safetensors")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 3)).eval()
    model[1].running_mean.fill_(2)
    sim = qsim.QuantSim(model, X, qsim.w4a16(group=32))
    sim.calibrate([X], progress=False)
    with pytest.warns(UserWarning, match=r"BatchNorm '1' is folded in what is written.*sim\.bake\(\)") as told:
        sim.save_compressed(tmp_path)
    assert told[0].filename == __file__
    plain = sim.bake()
    plain.load_state_dict(qsim.load_checkpoint(tmp_path).state_dict(), strict=False)
    assert torch.equal(plain(X), sim(X))
