"""FP8_BLOCK in compressed-tensors: scales a tile of a weight and a block of a token, as the library itself has them."""

import json

import pytest
import torch
from library_checkpoints import save_with_library
from torch import nn

import qsim
from qsim.errors import FileFormatError

safetensors = pytest.importorskip("safetensors.torch")
pytestmark = pytest.mark.filterwarnings("ignore:QuantSim.bake", "ignore:You passed `quantization_config`")
X = torch.randn(5, 256, generator=torch.Generator().manual_seed(0))
EXAMPLE = {"input_ids": torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(0)), "use_cache": False}


def network(seed=0):
    """Rows that no number of tiles fills."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(256, 200), nn.ReLU(), nn.Linear(200, 130), nn.ReLU(), nn.Linear(130, 3)).eval()


def simulated(config, model=None, x=X):
    sim = qsim.QuantSim(network() if model is None else model, x, config)
    sim.calibrate([x], progress=False)
    return sim


def written(folder, block=128):
    sim = simulated(qsim.fp8_block(block))
    sim.save_compressed(folder)
    return sim, json.loads((folder / "config.json").read_text())["quantization_config"]


def llama():
    """Keys and values have half a tile of rows."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, tie_word_embeddings=False)).eval()


@pytest.mark.parametrize("block", [128, 48])
def test_what_is_written_is_read(block, tmp_path):
    sim, said = written(tmp_path / "a", block)
    (group,) = said["config_groups"].values()
    assert (said["format"], said["ignore"], group["targets"]) == ("float-quantized", ["4"], ["Linear"])
    read = qsim.load_checkpoint(tmp_path / "a")
    assert read.weights["0.weight"].block_size == (block, block)
    assert read.activations["2.weight"] == qsim.fp8_block(block).activation
    assert torch.equal(read.state_dict()["2.weight"], sim.bake()[2].weight)
    qsim.save_checkpoint(read, tmp_path / "b", linear=["0", "2", "4"])
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    again = qsim.QuantSim(network(1), X, read.config())
    again.load_compressed(read)
    assert torch.equal(again(X), sim(X))


def test_it_is_the_same_in_both_formats(tmp_path):
    written(tmp_path / "a")
    first = qsim.load_checkpoint(tmp_path / "a")
    qsim.save_checkpoint(first, tmp_path / "b", "fp8")
    second = qsim.load_checkpoint(tmp_path / "b")
    qsim.save_checkpoint(second, tmp_path / "c", linear=["0", "2", "4"])
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "c/model.safetensors").read_bytes()
    assert (tmp_path / "a/config.json").read_bytes() == (tmp_path / "c/config.json").read_bytes()
    stored = safetensors.load_file(tmp_path / "b/model.safetensors")
    assert torch.equal(stored["0.weight_scale_inv"], safetensors.load_file(tmp_path / "a/model.safetensors")["0.weight_scale"])


def test_it_says_what_the_library_says(tmp_path):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.naive_quantized import FloatQuantizationCompressor
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme

    sim, said = written(tmp_path)
    (group,) = QuantizationConfig(**said).config_groups.values()
    scheme = preset_name_to_scheme("FP8_BLOCK", ["Linear"])
    assert (group.weights, group.input_activations) == (scheme.weights, scheme.input_activations)
    state = safetensors.load_file(tmp_path / "model.safetensors")
    own = {key.removeprefix("0."): t for key, t in state.items() if key.startswith("0.")}
    assert torch.equal(FloatQuantizationCompressor.decompress(own, group)["weight"], sim.bake()[0].weight)


def test_transformers_reads_it(tmp_path):
    """Weights are the baked ones; activations are rounded as here, so logits are the simulation's bit for bit."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    model = llama()
    sim = simulated(qsim.fp8_block(), model, EXAMPLE)
    sim.save_compressed(tmp_path)
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        assert torch.equal(read(**EXAMPLE).logits, sim(**EXAMPLE).logits)
        assert not torch.equal(read(**EXAMPLE).logits, sim.bake()(**EXAMPLE).logits)


def test_what_the_library_writes_is_simulated(tmp_path):
    """Its own quantization, compression and files."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme

    model = llama()
    scheme = preset_name_to_scheme("FP8_BLOCK", ["Linear"])
    layout = {"format": "float-quantized", "quantization_status": "frozen"}
    apply_quantization_config(model, QuantizationConfig(config_groups={"group": scheme}, ignore=["lm_head"], **layout))
    for layer in model.modules():
        if hasattr(layer, "quantization_scheme"):
            down, across = layer.weight_scale.shape
            tiles = [[layer.weight[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128] for j in range(across)] for i in range(down)]
            layer.weight_scale.data = torch.tensor([[float(tile.abs().max()) / 448 for tile in row] for row in tiles])
    with torch.no_grad():
        logits = model(**EXAMPLE).logits
    save_with_library(model, tmp_path)
    checkpoint = qsim.load_checkpoint(tmp_path)
    sim = qsim.QuantSim(llama(), EXAMPLE, checkpoint.config())
    sim.load_compressed(checkpoint)
    assert torch.equal(sim(**EXAMPLE).logits, logits)
    qsim.save_checkpoint(checkpoint, tmp_path / "again", linear=[name for name, m in llama().named_modules() if isinstance(m, nn.Linear)])
    stored = [safetensors.load_file(folder / "model.safetensors") for folder in (tmp_path, tmp_path / "again")]
    assert stored[0].keys() == stored[1].keys()
    assert all(torch.equal(t.float(), stored[1][name].float()) and t.dtype == stored[1][name].dtype for name, t in stored[0].items())


def test_older_files_write_tiles_as_text(tmp_path):
    _, said = written(tmp_path)
    changed(tmp_path, said, "weights", block_structure="128x128")
    assert qsim.load_checkpoint(tmp_path).weights["0.weight"].block_size == (128, 128)


def changed(folder, said, part, **values):
    copy = json.loads(json.dumps(said))
    copy["config_groups"]["group_0"][part].update(values)
    (folder / "config.json").write_text(json.dumps({"quantization_config": copy}))


HOSTILE = {
    r"block_structure is 128; expected two positive integers": ("weights", {"block_structure": 128}),
    r"block_structure is \[128, 0\]": ("weights", {"block_structure": [128, 0]}),
    r"block_structure is '0x128'": ("weights", {"block_structure": "0x128"}),
    r"block_structure is '128x128x128'": ("weights", {"block_structure": "128x128x128"}),
    r"block_structure is null": ("weights", {"block_structure": None}),
    r"block_structure is \[128, 128\]; expected null": ("weights", {"strategy": "channel"}),
    r"weight_scale has shape \(2, 2\) for \(200, 256\) weights; expected \(4, 2\) for the strategy 'block' of 64 x 128": (
        "weights",
        {"block_structure": [64, 128]},
    ),
    r"group_size is 64; expected 128": ("input_activations", {"group_size": 64}),
    r"group_size is null; expected 128": ("input_activations", {"group_size": None}),
    r"strategy is 'token'; expected .group": ("input_activations", {"strategy": "token"}),
    r"dynamic is false; expected true": ("input_activations", {"dynamic": False}),
    r"symmetric is false": ("input_activations", {"symmetric": False}),
    r"type is 'int'; expected .float": ("input_activations", {"type": "int"}),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_other_schemes_are_refused_with_what_to_do(what, tmp_path):
    part, values = HOSTILE[what]
    _, said = written(tmp_path)
    changed(tmp_path, said, part, **values)
    with pytest.raises(FileFormatError, match=what):
        qsim.load_checkpoint(tmp_path)


def test_tiles_stand_beside_blocks_of_tokens(tmp_path):
    block = qsim.fp8_block()
    for override, message in (
        ({"activation": qsim.fp8_dynamic().activation}, r"'2\.weight' has tiles of \(128, 128\) beside activations with no blocks"),
        ({"activation": {"block_size": 64}}, r"'2\.weight' has tiles of \(128, 128\) beside activations with blocks of 64"),
        ({"weight": qsim.fp8_dynamic().weight}, r"'2\.weight' has no tiles beside activations with blocks of 128"),
        ({"activation": {"scale_format": "float8_e8m0fnu", "scale_rounding": "rceil"}}, r"'2\.weight' is multiplied with activations that"),
    ):
        with pytest.raises(ValueError, match=message):
            simulated(block.override("2", **override)).save_compressed(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_model_in_bfloat16_is_written_with_rounded_scales(tmp_path):
    sim = simulated(qsim.fp8_block(), network().bfloat16(), X.bfloat16())
    with pytest.raises(ValueError, match=r"call sim\.round_scales"):
        sim.save_compressed(tmp_path)
    sim.round_scales(torch.bfloat16)
    sim.save_compressed(tmp_path)
    again = qsim.QuantSim(network(1).bfloat16(), X.bfloat16(), qsim.load_checkpoint(tmp_path).config())
    again.load_compressed(tmp_path)
    assert torch.equal(again(X.bfloat16()), sim(X.bfloat16()))
