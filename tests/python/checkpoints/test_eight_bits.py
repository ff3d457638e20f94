"""Weights and activations of 8 bits in compressed-tensors' layouts, read back, and by the libraries that they are for."""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import qsim
from qsim.errors import FileFormatError

sys.path.append(str(Path(__file__).parents[1]))
from language_model import TOKENS, LanguageModel

safetensors = pytest.importorskip("safetensors.torch")
X = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
CONFIGS = {"int-quantized": qsim.w8a8_dynamic(), "float-quantized": qsim.fp8_dynamic()}
KINDS = {"int-quantized": torch.int8, "float-quantized": torch.float8_e4m3fn}


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, 12), nn.ReLU(), nn.Linear(12, 3)).eval()


def simulated(config, model=None, x=X):
    sim = qsim.QuantSim(network() if model is None else model, x, config)
    sim.calibrate([x], progress=False)
    return sim


@pytest.mark.parametrize("layout", CONFIGS)
def test_what_is_written_is_the_baked_weight(layout, tmp_path):
    sim = simulated(CONFIGS[layout])
    sim.save_compressed(tmp_path)
    state = safetensors.load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert (config["format"], config["ignore"], list(config["config_groups"])) == (layout, ["4"], ["group_0"])
    group = config["config_groups"]["group_0"]
    assert group["input_activations"] == {**group["weights"], "strategy": "token", "dynamic": True}
    for name in ("0", "2"):
        stored, scale = state[f"{name}.weight"], state[f"{name}.weight_scale"]
        assert stored.dtype is KINDS[layout]
        assert torch.equal(stored.float() * scale, sim.bake().get_submodule(name).weight)
    assert torch.equal(state["4.weight"], sim.model[4].weight)


@pytest.mark.filterwarnings("ignore:QuantSim.bake")
@pytest.mark.parametrize("layout", CONFIGS)
def test_what_is_written_is_read(layout, tmp_path):
    sim = simulated(CONFIGS[layout])
    sim.save_compressed(tmp_path / "a")
    read = qsim.load_checkpoint(tmp_path / "a")
    assert read.activations == dict.fromkeys(["0.weight", "2.weight"], CONFIGS[layout].activation)
    assert torch.equal(read.state_dict()["2.weight"], sim.bake()[2].weight)
    qsim.save_checkpoint(read, tmp_path / "b", linear=["0", "2", "4"])
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    again = qsim.QuantSim(network(1), X, read.config())
    again.load_compressed(tmp_path / "a")
    assert list(again.quantizers()) == list(sim.quantizers())
    assert torch.equal(again(X), sim(X))
    for format in ("gptq", "awq", "gguf"):
        with pytest.raises(FileFormatError, match="is multiplied with quantized activations"):
            qsim.save_checkpoint(read, tmp_path / "c.gguf", format)


@pytest.mark.parametrize("layout", CONFIGS)
def test_a_language_model_comes_back(layout, tmp_path):
    """Three layers read one tensor, which has one quantizer."""
    sim = simulated(CONFIGS[layout], LanguageModel().eval(), TOKENS)
    sim.save_compressed(tmp_path)
    again = qsim.QuantSim(LanguageModel().eval(), TOKENS, qsim.load_checkpoint(tmp_path).config())
    again.load_compressed(tmp_path)
    assert torch.equal(again(TOKENS)["logits"], sim(TOKENS)["logits"])


def test_what_the_layouts_cannot_hold_is_told(tmp_path):
    w8a8, fp8 = qsim.w8a8_dynamic(), qsim.fp8_dynamic()
    with pytest.raises(FileFormatError, match=r"'0\.weight' has 4 bits of int8; expected int8 beside activations of that kind"):
        simulated(w8a8.override("0", weight={"bits": 4, "narrow": False})).save_compressed(tmp_path)
    with pytest.raises(FileFormatError, match=r"'0\.weight' has groups or zero points"):
        simulated(w8a8.override("0", weight={"axis": 1, "block_size": 32})).save_compressed(tmp_path)
    with pytest.raises(FileFormatError, match=r"'2\.weight' would be 'pack-quantized' beside 'int-quantized'"):
        simulated(w8a8.override("2", activation=None)).save_compressed(tmp_path)
    with pytest.raises(ValueError, match=r"'0\.weight' is float8_e4m3fn; expected integers"):
        simulated(fp8.override("*", activation=None)).save_compressed(tmp_path)
    with pytest.raises(ValueError, match=r"quantizers are of no weight.*w8a8_dynamic"):
        simulated(w8a8.override("0", weight=None)).save_compressed(tmp_path)
    assert not list(tmp_path.iterdir())


def changed(folder, change):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config["quantization_config"]["config_groups"]["group_0"], config["quantization_config"])
    path.write_text(json.dumps(config))


HOSTILE = {
    r"dynamic is false; expected true.*scheme='W8A8'": lambda group, _: group["input_activations"].update(dynamic=False),
    r"symmetric": lambda group, _: group["weights"].update(symmetric=False),
    r"strategy": lambda group, _: group["weights"].update(strategy="tensor"),
    r"num_bits": lambda group, _: group["weights"].update(num_bits=4),
    r"type": lambda group, _: group["weights"].update(type="float"),
    r"input_activations": lambda group, _: group.update(input_activations=None),
    r"output_activations": lambda group, _: group.update(output_activations={"num_bits": 8}),
    r"format": lambda _, config: config.update(format="naive-quantized"),
    r"actorder": lambda group, _: group["weights"].update(actorder="group"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_other_schemes_are_refused_with_what_to_do(what, tmp_path):
    simulated(CONFIGS["int-quantized"]).save_compressed(tmp_path)
    changed(tmp_path, HOSTILE[what])
    with pytest.raises(FileFormatError, match=what):
        qsim.load_checkpoint(tmp_path)


@pytest.mark.parametrize("layout", CONFIGS)
def test_damaged_tensors_are_refused(layout, tmp_path):
    simulated(CONFIGS[layout]).save_compressed(tmp_path)
    state = safetensors.load_file(tmp_path / "model.safetensors")
    scale = state["0.weight_scale"]
    for name, value in {
        "weight_scale": scale[:-1],
        "weight_scale ": scale * float("nan"),
        "weight_scale  ": -scale,
        "weight": state["0.weight"].float(),
        "weight ": state["0.weight"][:0],
        "weight_zero_point": torch.ones(20, 1, dtype=torch.int8),
    }.items():
        safetensors.save_file({**state, f"0.{name.strip()}": value.contiguous()}, tmp_path / "model.safetensors")
        with pytest.raises(FileFormatError, match=name.strip()):
            qsim.load_checkpoint(tmp_path)
    del state["0.weight"]
    safetensors.save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(FileFormatError, match="has no weight"):
        qsim.load_checkpoint(tmp_path)


def test_packed_weights_with_activations_are_not_read_as_if_there_were_none(tmp_path):
    simulated(qsim.w4a16(group=32).override("2", weight=None)).save_compressed(tmp_path)
    changed(tmp_path, lambda group, _: group.update(input_activations={"num_bits": 8, "dynamic": True}))
    with pytest.raises(FileFormatError, match=r"input_activations.*expected null"):
        qsim.load_checkpoint(tmp_path)


@pytest.mark.filterwarnings("ignore:QuantSim.bake")
@pytest.mark.parametrize("layout", CONFIGS)
def test_the_library_decompresses_it(layout, tmp_path):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.naive_quantized import NaiveQuantizationCompressor
    from compressed_tensors.quantization import QuantizationConfig

    sim = simulated(CONFIGS[layout])
    sim.save_compressed(tmp_path)
    config = QuantizationConfig(**json.loads((tmp_path / "config.json").read_text())["quantization_config"])
    state = safetensors.load_file(tmp_path / "model.safetensors")
    own = {key.removeprefix("0."): t for key, t in state.items() if key.startswith("0.")}
    read = NaiveQuantizationCompressor.decompress(own, config.config_groups["group_0"])
    assert torch.equal(read["weight"], sim.bake()[0].weight)


@pytest.mark.filterwarnings("ignore:QuantSim.bake", "ignore:You passed `quantization_config`")
@pytest.mark.parametrize("layout", CONFIGS)
def test_transformers_reads_it(layout, tmp_path):
    """Its weights are the baked ones. Of float8 its activations are ours too; of int8 it divides by 127.5 where kernels do by 127."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, tie_word_embeddings=False)).eval()
    example = {"input_ids": torch.randint(64, (2, 9)), "use_cache": False}
    sim = simulated(CONFIGS[layout], model, example)
    sim.save_compressed(tmp_path)
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        if layout == "float-quantized":
            assert torch.equal(read(**example).logits, sim(**example).logits)
        for module in read.modules():
            module.quantization_enabled = False  # of activations: weights stay
        assert torch.equal(read(**example).logits, sim.bake()(**example).logits)
