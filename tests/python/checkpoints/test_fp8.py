"""Checkpoints of "quant_method": "fp8", with scales a tile and scales a weight: read element by element, and by transformers."""

import dataclasses
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
X = torch.randn(5, 300, generator=torch.Generator().manual_seed(0))
E4M3 = torch.float8_e4m3fn
TILED = ("fp8_block()", "fp8_block(48)", "oblong", "powers of two")


def oblong():
    """Tiles that are not square."""
    config = qsim.fp8_block(128)
    return dataclasses.replace(config, weight=dataclasses.replace(config.weight, block_size=(64, 128)))


def powers():
    config = qsim.fp8_block()
    stored = {"scale_format": "float8_e8m0fnu", "scale_rounding": "rceil"}
    return dataclasses.replace(
        config, weight=dataclasses.replace(config.weight, **stored), activation=dataclasses.replace(config.activation, **stored)
    )


CONFIGS = {
    "fp8_block()": qsim.fp8_block(),
    "fp8_block(48)": qsim.fp8_block(48),
    "oblong": oblong(),
    "powers of two": powers(),
    "static": dataclasses.replace(qsim.fp8_static(), weight=qsim.TensorSpec(dtype="float8_e4m3fn")),
    "token": dataclasses.replace(qsim.fp8_dynamic(), weight=qsim.TensorSpec(dtype="float8_e4m3fn")),
}


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(300, 200), nn.ReLU(), nn.Linear(200, 130), nn.ReLU(), nn.Linear(130, 3)).eval()


def simulated(config, model=None, x=X):
    sim = qsim.QuantSim(network() if model is None else model, x, config)
    sim.calibrate([x], progress=False)
    return sim


def written(folder, name="fp8_block()"):
    sim = simulated(CONFIGS[name])
    sim.save_compressed(folder, "fp8")
    return sim, safetensors.load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())


def scale_of_each(scale, shape, tile):
    """The scale of every element, element by element."""
    rows, columns = tile or shape
    return torch.tensor(
        [[float(scale.flatten()[i // rows * -(-shape[1] // columns) + j // columns]) for j in range(shape[1])] for i in range(shape[0])]
    )


def rounded_blocks(x, size, powers=False):
    """Activations with a scale for each block of a token, block by block, in float64: e4m3's numbers are exact there."""
    out = torch.empty_like(x, dtype=torch.float64)
    for token in range(len(x)):
        for start in range(0, x.shape[1], size):
            block = x[token, start : start + size]
            scale = block.abs().max() / 448
            scale = torch.exp2(torch.log2(scale.double()).ceil()).float() if powers else scale
            scale = torch.ones(()) if block.abs().max() == 0 else scale
            out[token, start : start + size] = (block / scale).to(E4M3).double() * scale.double()
    return out


@pytest.mark.filterwarnings("ignore:QuantSim.bake")
@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_written_is_what_is_simulated(name, tmp_path):
    sim, state, config = written(tmp_path, name)
    said, tile = config["quantization_config"], CONFIGS[name].weight.block_size
    assert said["quant_method"] == "fp8"
    assert said["activation_scheme"] == ("static" if name == "static" else "dynamic")
    assert said["modules_to_not_convert" if tile else "ignored_layers"] == ["4"]
    assert said.get("weight_block_size") == (None if tile is None else list(tile))
    assert said.get("scale_fmt") == ("ue8m0" if name == "powers of two" else None)
    for layer in ("0", "2"):
        q, scale = state[f"{layer}.weight"], state[f"{layer}.weight_scale_inv" if tile else f"{layer}.weight_scale"]
        assert (q.dtype, scale.dtype) == (E4M3, torch.float32)
        assert torch.equal(q.float() * scale_of_each(scale, q.shape, tile), sim.bake().get_submodule(layer).weight)
        assert (f"{layer}.input_scale" in state) == (name == "static")
    assert torch.equal(state["4.weight"], sim.model[4].weight)


@pytest.mark.parametrize("name", TILED)
def test_weights_are_rounded_by_tiles(name, tmp_path):
    """From the float weights, without qsim."""
    _, state, _ = written(tmp_path, name)
    (rows, columns), weight = CONFIGS[name].weight.block_size, network()[0].weight.detach()
    for i in range(-(-200 // rows)):
        for j in range(-(-300 // columns)):
            place = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scale = weight[place].abs().max() / 448
            scale = torch.exp2(torch.log2(scale.double()).ceil()).float() if name == "powers of two" else scale
            assert torch.equal(state["0.weight_scale_inv"][i, j], scale)
            assert torch.equal(state["0.weight"][place].float(), (weight[place] / scale).to(E4M3).float())


@pytest.mark.filterwarnings("ignore:QuantSim.bake")
@pytest.mark.parametrize("name", TILED)
def test_layers_read_blocks_of_tokens(name):
    sim, x = simulated(CONFIGS[name]), torch.cat([X, torch.zeros(1, 300)])
    baked, size = sim.bake(), CONFIGS[name].activation.block_size
    hidden = rounded_blocks(x, size, name == "powers of two") @ baked[0].weight.double().T + baked[0].bias.double()
    seen = []
    sim.model[0].register_forward_hook(lambda module, args, out: seen.append(out.detach()))
    got = sim(x)
    assert torch.allclose(seen[0].double(), hidden, rtol=1e-5, atol=1e-5)
    second = rounded_blocks(seen[0].relu(), size, name == "powers of two") @ baked[2].weight.double().T + baked[2].bias.double()
    expected = second.relu() @ baked[4].weight.double().T + baked[4].bias.double()
    assert torch.allclose(got.double(), expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(got.double(), network()(x).double(), rtol=1e-3, atol=1e-4)


@pytest.mark.filterwarnings("ignore:QuantSim.bake")
@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_written_is_read(name, tmp_path):
    sim, _, _ = written(tmp_path / "a", name)
    read = qsim.load_checkpoint(tmp_path / "a")
    assert read.format == "fp8"
    assert list(read.activations) == ["0.weight", "2.weight"]
    assert torch.equal(read.state_dict()["2.weight"], sim.bake()[2].weight)
    qsim.save_checkpoint(read, tmp_path / "b", "fp8")
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    again = qsim.QuantSim(network(1), X, read.config())
    again.load_compressed(tmp_path / "a")
    assert torch.equal(again(X), sim(X))
    again.save_compressed(tmp_path / "c", "fp8")
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "c/model.safetensors").read_bytes()
    for format in ("gptq", "awq", "gguf"):
        with pytest.raises(FileFormatError, match="is multiplied with quantized activations"):
            qsim.save_checkpoint(read, tmp_path / "d.gguf", format)
    unquantized = dataclasses.replace(read, activations={}, encodings={})
    for format in ("gptq", "awq", "gguf"):
        with pytest.raises(FileFormatError, match=r"'0\.weight' (is|has) (float8|one scale for)"):
            qsim.save_checkpoint(unquantized, tmp_path / "d.gguf", format)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e8m0fnu])
def test_scales_of_other_types_are_kept_to_the_bit(dtype, tmp_path):
    """Qwen3's are in bfloat16, DeepSeek-V4's in E8M0."""
    _, state, config = written(tmp_path / "a", "powers of two" if dtype == torch.float8_e8m0fnu else "fp8_block()")
    scaled = {name: t.to(dtype) if name.endswith("scale_inv") else t for name, t in state.items()}
    safetensors.save_file(scaled, tmp_path / "a/model.safetensors", metadata={"format": "pt"})
    read = qsim.load_checkpoint(tmp_path / "a")
    qsim.save_checkpoint(read, tmp_path / "b", "fp8")
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()
    again = qsim.QuantSim(network(1), X, read.config())
    again.load_compressed(read)
    assert torch.equal(again.quantizers()["0.weight"].encoding.scale, scaled["0.weight_scale_inv"].float())
    assert config["quantization_config"]["weight_block_size"] == [128, 128]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_language_model_comes_back(name, tmp_path):
    """Three layers read one tensor, which has one quantizer; in bfloat16 too, for readers keep scales in float32."""
    for dtype in (torch.float32, torch.bfloat16):
        sim = simulated(CONFIGS[name], LanguageModel().eval().to(dtype), TOKENS)
        sim.save_compressed(tmp_path, "fp8")
        again = qsim.QuantSim(LanguageModel().eval().to(dtype), TOKENS, qsim.load_checkpoint(tmp_path).config())
        again.load_compressed(tmp_path)
        assert torch.equal(again(TOKENS)["logits"], sim(TOKENS)["logits"])


@pytest.mark.parametrize("name", ["static", "token"])
def test_names_that_transformers_gives_are_read(name, tmp_path):
    sim, state, _ = written(tmp_path, name)
    theirs = {"weight_scale": "weight_scale_inv", "input_scale": "activation_scale"}
    renamed = {}
    for key, t in state.items():
        module, _, own = key.rpartition(".")
        renamed[f"{module}.{theirs.get(own, own)}"] = t.reshape(()) if own in theirs else t
    safetensors.save_file(renamed, tmp_path / "model.safetensors")
    again = qsim.QuantSim(network(1), X, qsim.load_checkpoint(tmp_path).config())
    again.load_compressed(tmp_path)
    assert torch.equal(again(X), sim(X))


def with_activation(config, **changes):
    return dataclasses.replace(config, activation=dataclasses.replace(config.activation, **changes))


def test_what_the_format_cannot_hold_is_told(tmp_path):
    block, one = qsim.fp8_block(), CONFIGS["static"]
    e8m0 = {"scale_format": "float8_e8m0fnu", "scale_rounding": "rceil"}
    for config, message in (
        (qsim.fp8_dynamic(), r"'0\.weight' has a scale a row or group; expected one a tile, qsim\.fp8_block\(\)"),
        (block.override("2", activation=None), r"'2\.weight' is multiplied with floats"),
        (
            block.override("2", weight={"block_size": (64, 64)}, activation={"block_size": 64}),
            r"'2\.weight' has tiles of \(64, 64\) beside activations with a scale for each 64 values, others tiles of \(128, 128\)",
        ),
        (block.override("2", activation={"block_size": 64}), r"'2\.weight' has tiles of \(128, 128\) beside activations with blocks of 64"),
        (block.override("2", activation={"block_size": None}), r"'2\.weight' has tiles of \(128, 128\) beside activations with no blocks"),
        (
            one.override("2", activation=qsim.fp8_dynamic().activation),
            r"'2\.weight' .* with a scale for each token, others one scale beside",
        ),
        (qsim.w8a8_dynamic(), r"'0\.weight' is int8; expected a matrix of float8_e4m3fn"),
        (qsim.w4a16(group=None), r"'0\.weight' is multiplied with floats"),
        (with_activation(block, **e8m0), r"'0\.weight' has scales that are no powers of two"),
        (with_activation(block, scale_format="float8_e8m0fnu"), r"quantizers are of no weight"),
        (with_activation(block, dtype="float8_e5m2"), r"quantizers are of no weight"),
    ):
        with pytest.raises(ValueError, match=message):
            simulated(config).save_compressed(tmp_path, "fp8")
    assert not list(tmp_path.iterdir())


HOSTILE = {
    r"weight_block_size is 128": {"weight_block_size": 128},
    r"weight_block_size is \[0, 128\]": {"weight_block_size": [0, 128]},
    r"weight_block_size is \[128\]": {"weight_block_size": [128]},
    r"weight_block_size is \[true, 128\]": {"weight_block_size": [True, 128]},
    r"entry '0': the shape of weight_scale_inv is \(2, 3\); expected \(4, 5\)": {"weight_block_size": [64, 64]},
    r"entry '0': the number of scales in weight_scale_inv is 6; expected 1": {"weight_block_size": None},
    r"fmt of quantization_config is 'e5m2'; expected 'e4m3'": {"fmt": "e5m2"},
    r"activation_scheme is 'static'; expected 'dynamic' beside weight_block_size": {"activation_scheme": "static"},
    r"activation_scheme of quantization_config is \[": {"activation_scheme": ["dynamic"]},
    r"scale_fmt of quantization_config is 'e5m3'": {"scale_fmt": "e5m3"},
    r"no powers of two": {"scale_fmt": "ue8m0"},
    r"modules_to_not_convert is 'lm_head'; expected a list of names": {"modules_to_not_convert": "lm_head"},
    r"entry '2': is quantized, and quantization_config lists '2' as left in float": {"modules_to_not_convert": ["4", "2"]},
    r"kv_cache_scheme": {"kv_cache_scheme": "static"},
    r"quant_method is 'fp9'": {"quant_method": "fp9"},
}


@pytest.mark.parametrize("what", HOSTILE)
def test_configs_that_say_something_else_are_refused(what, tmp_path):
    _, _, config = written(tmp_path)
    config["quantization_config"] |= HOSTILE[what]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(FileFormatError, match=what):
        qsim.load_checkpoint(tmp_path)


def replaced(folder, state, changes):
    """Read with some tensors changed, or left out where they are None."""
    safetensors.save_file({k: t.contiguous() for k, t in {**state, **changes}.items() if t is not None}, folder / "model.safetensors")
    return qsim.load_checkpoint(folder)


def test_damaged_tensors_are_refused(tmp_path):
    _, state, _ = written(tmp_path)
    weight, scale = state["0.weight"], state["0.weight_scale_inv"]
    broken = weight.float()
    broken[3, 7] = float("nan")
    for changes, message in (
        ({"0.weight_scale_inv": None}, "entry '0': has no weight_scale_inv"),
        ({"0.weight": None}, "entry '0': has no weight"),
        ({"0.weight": weight.float()}, "entry '0': weight is float32"),
        ({"0.weight": weight.view(torch.int8)}, "entry '0': weight is int8"),
        ({"0.weight": weight.view(torch.float8_e5m2)}, "entry '0': weight is float8_e5m2"),
        ({"0.weight": weight[:0]}, "entry '0': weight is float8_e4m3fn of shape"),
        ({"0.weight": weight[:128]}, r"the shape of weight_scale_inv is \(2, 3\); expected \(1, 3\)"),
        ({"0.weight": broken.to(E4M3)}, "weight has NaN"),
        ({"0.weight_scale_inv": scale.T}, r"the shape of weight_scale_inv is \(3, 2\)"),
        ({"0.weight_scale_inv": scale * float("inf")}, "not positive and finite"),
        ({"0.weight_scale_inv": -scale}, "not positive and finite"),
        ({"0.weight_scale_inv": scale.double()}, "weight_scale_inv is float64"),
        ({"0.weight_scale": scale.clone()}, "entry '0': has weight_scale_inv and weight_scale; expected one of them"),
        ({"0.input_scale": torch.ones(1)}, "has input_scale, and activation_scheme is 'dynamic'"),
        ({"experts.gate_up_proj": weight[None].clone()}, "'experts.gate_up_proj': is float8_e4m3fn, and no layer"),
        ({"4.weight": state["4.weight"].to(E4M3)}, "entry '4': is quantized, and quantization_config lists '4'"),
        ({"4.input_scale": torch.ones(1)}, r"entry '4\.input_scale': is a part of a quantized layer whose weight is not there"),
    ):
        with pytest.raises(FileFormatError, match=message):
            replaced(tmp_path, state, changes)
    assert len(replaced(tmp_path, state, {}).weights) == 2


def test_damaged_scales_of_a_tensor_are_refused(tmp_path):
    _, state, _ = written(tmp_path, "static")
    for changes, message in (
        ({"0.input_scale": None}, "has no input_scale, and activation_scheme is 'static'"),
        ({"0.input_scale": torch.zeros(1)}, "input_scale has numbers that are not positive"),
        ({"0.input_scale": torch.ones(2)}, "the number of input scales is 2; expected 1"),
        ({"0.weight_scale": torch.ones(200, 1)}, "the number of scales in weight_scale is 200; expected 1"),
        ({"0.weight_scale": None}, "has no weight_scale"),
    ):
        with pytest.raises(FileFormatError, match=message):
            replaced(tmp_path, state, changes)


def llama(**changes):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, tie_word_embeddings=False, **changes)).eval()


@pytest.mark.filterwarnings("ignore:QuantSim.bake", "ignore:You passed `quantization_config`")
def test_transformers_reads_it(tmp_path):
    """On the CPU it dequantizes."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    example = {"input_ids": torch.randint(64, (2, 9)), "use_cache": False}
    sim = simulated(qsim.fp8_block(), llama(), example)
    sim.save_compressed(tmp_path, "fp8")
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    baked = sim.bake()
    with torch.no_grad():
        for name, weight in baked.state_dict().items():
            assert torch.equal(read.state_dict()[name], weight)
        assert torch.equal(read(**example).logits, baked(**example).logits)
        assert not torch.equal(read(**example).logits, sim(**example).logits)  # activations are quantized on GPUs alone


def test_what_transformers_quantizes_is_read_as_it_dequantizes_it(tmp_path):
    transformers = pytest.importorskip("transformers")
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    for scale_fmt in ("float", "ue8m0"):
        said = transformers.FineGrainedFP8Config(weight_block_size=(64, 32), modules_to_not_convert=["head"], scale_fmt=scale_fmt)
        quantizer = FineGrainedFP8HfQuantizer(said)
        float_weight = torch.randn(192, 96)
        state = Fp8Quantize(quantizer).convert({"layer.weight": float_weight})
        safetensors.save_file({**state, "head.weight": torch.randn(4, 192)}, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": said.to_dict()}))
        read = qsim.load_checkpoint(tmp_path)
        expected = Fp8Dequantize(quantizer)._dequantize_one(state["layer.weight"], state["layer.weight_scale_inv"], torch.float32)
        assert torch.equal(read.weights["layer.weight"].dequantize(), expected)
        assert read.activations["layer.weight"].block_size == 32
        assert (read.activations["layer.weight"].scale_format is None) == (scale_fmt == "float")
