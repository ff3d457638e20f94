"""Weights and activations of 8 bits in compressed-tensors' layouts, read back, and by the libraries that they are for."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch
from library_checkpoints import save_with_library
from torch import nn

import qsim
from qsim.errors import FileFormatError

sys.path.append(str(Path(__file__).parents[1]))
from language_model import TOKENS, LanguageModel

safetensors = pytest.importorskip("safetensors.torch")
X = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
STATIC = qsim.w8a8_static()
CONFIGS = {
    "int-quantized": qsim.w8a8_dynamic(),
    "float-quantized": qsim.fp8_dynamic(),
    "int-quantized, static": STATIC,
    "int-quantized, zero points": dataclasses.replace(STATIC, activation=dataclasses.replace(STATIC.activation, symmetric=False)),
    "float-quantized, static": qsim.fp8_static(),
    "float-quantized, one scale": dataclasses.replace(qsim.fp8_static(), weight=qsim.TensorSpec(dtype="float8_e4m3fn")),
    "int-quantized, one scale": dataclasses.replace(STATIC, weight=dataclasses.replace(STATIC.weight, axis=None)),
    "int-quantized, mixed": STATIC.override("2", activation=qsim.w8a8_dynamic().activation),
}
KINDS = {"int-quantized": torch.int8, "float-quantized": torch.float8_e4m3fn}


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, 12), nn.ReLU(), nn.Linear(12, 3)).eval()


def simulated(config, model=None, x=X):
    sim = qsim.QuantSim(network() if model is None else model, x, config)
    sim.calibrate([x], progress=False)
    return sim


@pytest.mark.filterwarnings("ignore:QuantSim.bake")
@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_written_is_what_is_simulated(name, tmp_path):
    sim, layout = simulated(CONFIGS[name]), name.partition(",")[0]
    sim.save_compressed(tmp_path)
    state = safetensors.load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert (config["format"], config["ignore"]) == (layout, ["4"])
    for name, key in (("0", "input"), ("2", "2.input[0]")):
        stored, scale, quantizer = state[f"{name}.weight"], state[f"{name}.weight_scale"], sim.quantizers()[key]
        assert stored.dtype is KINDS[layout]
        assert torch.equal(stored.float() * scale, sim.bake().get_submodule(name).weight)
        (group,) = [group for group in config["config_groups"].values() if group["targets"] in (["Linear"], [name])]
        assert group["weights"]["strategy"] == {1: "tensor", 2: "channel"}[scale.dim()]
        dynamic, strategy = quantizer.spec.is_dynamic, "token" if quantizer.spec.is_dynamic else "tensor"
        assert [group["input_activations"][what] for what in ("dynamic", "strategy")] == [dynamic, strategy]
        assert (f"{name}.input_scale" in state) != dynamic
        assert (f"{name}.input_zero_point" in state) != quantizer.spec.symmetric
        if not dynamic:
            assert torch.equal(state[f"{name}.input_scale"], quantizer.encoding.scale.reshape(1))
        if not quantizer.spec.symmetric:
            assert torch.equal(state[f"{name}.input_zero_point"].int(), quantizer.encoding.zero_point.reshape(1))
    assert torch.equal(state["4.weight"], sim.model[4].weight)


@pytest.mark.filterwarnings("ignore:QuantSim.bake")
@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_written_is_read(name, tmp_path):
    sim = simulated(CONFIGS[name])
    sim.save_compressed(tmp_path / "a")
    read = qsim.load_checkpoint(tmp_path / "a")
    specs = [sim.quantizers()[key].spec for key in ("input", "2.input[0]")]
    assert [read.activations[key].is_dynamic for key in ("0.weight", "2.weight")] == [spec.is_dynamic for spec in specs]
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


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "int-quantized, mixed"])
def test_a_language_model_comes_back(name, tmp_path):
    """Three layers read one tensor, which has one quantizer."""
    sim = simulated(CONFIGS[name], LanguageModel().eval(), TOKENS)
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
    with pytest.raises(FileFormatError, match=r"'0\.weight' has 8 bits of float8_e4m3fn; expected int8"):
        simulated(w8a8.override("0", weight=fp8.weight)).save_compressed(tmp_path)
    with pytest.raises(ValueError, match=r"quantizers are of no weight.*w8a8_dynamic"):
        simulated(w8a8.override("0", weight=None)).save_compressed(tmp_path)
    assert not list(tmp_path.iterdir())


def changed(folder, change):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config["quantization_config"]["config_groups"]["group_0"], config["quantization_config"])
    path.write_text(json.dumps(config))


HOSTILE = {
    r'strategy is .token.; expected "tensor"': lambda group, _: group["input_activations"].update(dynamic=False),
    r"symmetric is false; expected true.*w8a8_static": lambda group, _: group["input_activations"].update(symmetric=False),
    r"no input_scale": lambda group, _: group["input_activations"].update(dynamic=False, strategy="tensor"),
    r"weight_scale has shape .*; expected one for the strategy 'tensor'": lambda group, _: group["weights"].update(strategy="tensor"),
    r"symmetric": lambda group, _: group["weights"].update(symmetric=False),
    r"strategy": lambda group, _: group["weights"].update(strategy="block"),
    r"num_bits": lambda group, _: group["weights"].update(num_bits=4),
    r"type": lambda group, _: group["weights"].update(type="float"),
    r"input_activations": lambda group, _: group.update(input_activations="int8"),
    r"output_activations": lambda group, _: group.update(output_activations={"num_bits": 8}),
    r"format": lambda _, config: config.update(format="marlin-24"),
    r"actorder": lambda group, _: group["weights"].update(actorder="group"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_other_schemes_are_refused_with_what_to_do(what, tmp_path):
    simulated(CONFIGS["int-quantized"]).save_compressed(tmp_path)
    changed(tmp_path, HOSTILE[what])
    with pytest.raises(FileFormatError, match=what):
        qsim.load_checkpoint(tmp_path)


def refuses(folder, name, values, message=None):
    """Whether each of these in place of a tensor is refused, and a file without it."""
    path = folder / "model.safetensors"
    state = safetensors.load_file(path)
    for value in values:
        safetensors.save_file({**state, f"0.{name}": value.contiguous()}, path)
        with pytest.raises(FileFormatError, match=message or name):
            qsim.load_checkpoint(folder)
    without = {key: t for key, t in state.items() if key != f"0.{name}"}
    safetensors.save_file(without, path)
    if without.keys() != state.keys():
        with pytest.raises(FileFormatError, match=f"has no {name}"):
            qsim.load_checkpoint(folder)
    safetensors.save_file(state, path)


@pytest.mark.parametrize("layout", KINDS)
def test_damaged_tensors_are_refused(layout, tmp_path):
    simulated(CONFIGS[layout]).save_compressed(tmp_path)
    state = safetensors.load_file(tmp_path / "model.safetensors")
    scale = state["0.weight_scale"]
    refuses(tmp_path, "weight_scale", [scale[:-1], scale * float("nan"), -scale])
    refuses(tmp_path, "weight", [state["0.weight"].float(), state["0.weight"][:0]])
    refuses(tmp_path, "weight_zero_point", [torch.ones(20, 1, dtype=torch.int8)])


def test_static_activations_without_a_scale_are_not_written(tmp_path):
    simulated(CONFIGS["int-quantized, static"]).save_compressed(tmp_path / "a")
    checkpoint = dataclasses.replace(qsim.load_checkpoint(tmp_path / "a"), encodings={})
    with pytest.raises(
        FileFormatError, match=r"'0\.weight' is multiplied with activations of one scale, and Checkpoint\.encodings has none"
    ):
        qsim.save_checkpoint(checkpoint, tmp_path / "b")


def test_integers_are_not_loaded_as_if_they_were_weights():
    sim = simulated(CONFIGS["int-quantized"])
    state = {name: t.clone() for name, t in sim.model.state_dict().items()}
    checkpoint = qsim.Checkpoint({}, {**state, "4.weight": state["4.weight"].to(torch.int8)}, "compressed-tensors")
    with pytest.raises(ValueError, match=r"'4\.weight' is int8 in the checkpoint, without a scale"):
        sim.load_compressed(checkpoint)
    assert torch.equal(sim.model[4].weight, state["4.weight"])


def test_packed_weights_with_activations_are_not_read_as_if_there_were_none(tmp_path):
    simulated(qsim.w4a16(group=32).override("2", weight=None)).save_compressed(tmp_path)
    changed(tmp_path, lambda group, _: group.update(input_activations={"num_bits": 8, "dynamic": True}))
    with pytest.raises(FileFormatError, match=r"input_activations.*expected null"):
        qsim.load_checkpoint(tmp_path)


def test_damaged_scales_of_activations_are_refused(tmp_path):
    simulated(CONFIGS["int-quantized, static"]).save_compressed(tmp_path)
    scale = safetensors.load_file(tmp_path / "model.safetensors")["0.input_scale"]
    refuses(tmp_path, "input_scale", [scale * 0, scale.double()])
    refuses(tmp_path, "input_scale", [scale.repeat(2)], "number of input scales")
    refuses(tmp_path, "input_zero_point", [torch.ones(1, dtype=torch.int8)])


def test_scales_without_dimensions_are_read(tmp_path):
    """As AutoFP8 and older versions of compressed-tensors wrote them."""
    sim = simulated(CONFIGS["float-quantized, one scale"])
    sim.save_compressed(tmp_path)
    state = safetensors.load_file(tmp_path / "model.safetensors")
    safetensors.save_file({name: t.reshape(()) if "scale" in name else t for name, t in state.items()}, tmp_path / "model.safetensors")
    again = qsim.QuantSim(network(1), X, qsim.load_checkpoint(tmp_path).config())
    again.load_compressed(tmp_path)
    assert torch.equal(again(X), sim(X))


class Merged(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.q, self.k, self.o = nn.Linear(64, 16), nn.Linear(64, 16), nn.Linear(16, 16)

    def forward(self, x):
        x = torch.relu(x) - 0.1
        return self.o(self.q(x) * self.k(x))


@pytest.mark.parametrize("name", ["int-quantized, static", "int-quantized, zero points", "float-quantized, static"])
def test_layers_that_read_one_tensor_with_several_scales_get_the_widest_range(name, tmp_path):
    sim = simulated(CONFIGS[name], Merged().eval())
    sim.save_compressed(tmp_path)
    state = safetensors.load_file(tmp_path / "model.safetensors")
    safetensors.save_file({**state, "k.input_scale": state["k.input_scale"] * 2}, tmp_path / "model.safetensors")
    again = qsim.QuantSim(Merged().eval(), X, qsim.load_checkpoint(tmp_path).config())
    with pytest.warns(UserWarning, match=r"'k.weight', 'q.weight' read one tensor.*widest range"):
        again.load_compressed(tmp_path)
    (key,) = [key for key in again.quantizers() if "input" in key]
    before, after = sim.quantizers()[key].encoding, again.quantizers()[key].encoding
    step = float(after.scale)
    assert torch.allclose(after.scale, 2 * before.scale, rtol=1e-3)
    assert abs(float(after.min - 2 * before.min)) <= step
    assert abs(float(after.max - 2 * before.max)) <= step


def test_activations_that_the_simulation_quantizes_otherwise_are_told(tmp_path):
    simulated(CONFIGS["int-quantized, static"]).save_compressed(tmp_path)
    dynamic, none = simulated(CONFIGS["int-quantized"]), simulated(CONFIGS["int-quantized"].override("*", activation=None))
    before = dynamic(X)
    with pytest.raises(ValueError, match=r"'0\.weight' .* one scale in the checkpoint, a scale from each token in the simulation"):
        dynamic.load_compressed(tmp_path)
    with pytest.raises(ValueError, match=r"'2\.weight' .* one scale in the checkpoint, no quantizer of their own in the simulation"):
        none.load_compressed(tmp_path)
    assert torch.equal(dynamic(X), before)


def test_uncalibrated_activations_are_not_written(tmp_path):
    sim = qsim.QuantSim(network(), X, qsim.w8a8_static())
    with pytest.raises(qsim.errors.NoEncodingError, match="calibrate"):
        sim.save_compressed(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["float-quantized", "float-quantized, static", "int-quantized, zero points"])
def test_a_model_in_bfloat16_is_written_with_rounded_scales(name, tmp_path):
    sim = simulated(CONFIGS[name], network().bfloat16(), X.bfloat16())
    with pytest.raises(ValueError, match=r"call sim\.round_scales"):
        sim.save_compressed(tmp_path)
    sim.round_scales(torch.bfloat16)
    sim.save_compressed(tmp_path)
    again = qsim.QuantSim(network(1).bfloat16(), X.bfloat16(), qsim.load_checkpoint(tmp_path).config())
    again.load_compressed(tmp_path)
    assert torch.equal(again(X.bfloat16()), sim(X.bfloat16()))


@pytest.mark.filterwarnings("ignore:QuantSim.bake")
@pytest.mark.parametrize("name", CONFIGS)
def test_the_library_decompresses_it(name, tmp_path):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.naive_quantized import NaiveQuantizationCompressor
    from compressed_tensors.quantization import QuantizationConfig

    sim = simulated(CONFIGS[name])
    sim.save_compressed(tmp_path)
    config = QuantizationConfig(**json.loads((tmp_path / "config.json").read_text())["quantization_config"])
    state = safetensors.load_file(tmp_path / "model.safetensors")
    own = {key.removeprefix("0."): t for key, t in state.items() if key.startswith("0.")}
    read = NaiveQuantizationCompressor.decompress(own, config.config_groups["group_0"])
    assert torch.equal(read["weight"], sim.bake()[0].weight)


@pytest.mark.filterwarnings("ignore:QuantSim.bake", "ignore:You passed `quantization_config`")
@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "int-quantized, mixed"])
def test_transformers_reads_it(name, tmp_path):
    """Its weights are the baked ones. Its activations are ours too, but for those of int8 with a scale from each token: it divides by
    127.5 where kernels do by 127."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, tie_word_embeddings=False)).eval()
    example = {"input_ids": torch.randint(64, (2, 9)), "use_cache": False}
    sim = simulated(CONFIGS[name], model, example)
    sim.save_compressed(tmp_path)
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        if name != "int-quantized":
            assert torch.equal(read(**example).logits, sim(**example).logits)
        for module in read.modules():
            module.quantization_enabled = False  # of activations: weights stay
        assert torch.equal(read(**example).logits, sim.bake()(**example).logits)


def written_by_the_library(model, example, folder, kind, strategy, symmetric):
    """What the model with static scales returns; the library's own quantization, compression and files."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme, apply_quantization_config

    weights = QuantizationArgs(num_bits=8, type=kind, symmetric=True, strategy=strategy)
    activations = QuantizationArgs(num_bits=8, type=kind, symmetric=symmetric, strategy="tensor", dynamic=False)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=activations)
    layout = {"format": f"{kind}-quantized", "quantization_status": "frozen"}
    apply_quantization_config(model, QuantizationConfig(config_groups={"group": scheme}, ignore=["lm_head"], **layout))
    layers = [module for module in model.modules() if hasattr(module, "quantization_scheme")]
    read = {}
    for layer in layers:
        layer.quantization_enabled = False
        layer.register_forward_pre_hook(lambda module, args: read.update({module: args[0].detach()}))
    model(**example)
    largest = 448 if kind == "float" else 127
    for layer, x in read.items():
        axis = 1 if strategy == "channel" else (0, 1)
        scale = layer.weight.abs().amax(axis, keepdim=True) / largest
        layer.weight_scale.data = scale.detach().reshape(layer.weight_scale.shape)
        layer.input_scale.data = (x.abs().max() / largest if symmetric else (x.max() - x.min()) / 255).reshape(1)
        if not symmetric:
            zero_point = -128 - (x.min() / layer.input_scale).round()
            layer.input_zero_point.data = zero_point.to(layer.input_zero_point.dtype)
        layer.quantization_enabled = True
    logits = model(**example).logits.detach()
    save_with_library(model, folder)
    return logits


@pytest.mark.parametrize("strategy", ["channel", "tensor"])
@pytest.mark.parametrize(("kind", "symmetric"), [("float", True), ("int", True), ("int", False)])
def test_what_the_library_writes_is_simulated(kind, symmetric, strategy, tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    model, fresh = (transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, tie_word_embeddings=False)).eval() for _ in range(2))
    example = {"input_ids": torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(0)), "use_cache": False}
    logits = written_by_the_library(model, example, tmp_path, kind, strategy, symmetric)
    checkpoint = qsim.load_checkpoint(tmp_path)
    sim = qsim.QuantSim(fresh, example, checkpoint.config())
    sim.load_compressed(checkpoint)
    assert torch.equal(sim(**example).logits, logits)


def test_zero_points_of_activations_that_the_config_says_are_there(tmp_path):
    simulated(CONFIGS["int-quantized, zero points"]).save_compressed(tmp_path)
    tensors = safetensors.load_file(tmp_path / "model.safetensors")
    del tensors["0.input_zero_point"]
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(FileFormatError, match="has no input_zero_point, and config_groups says symmetric false"):
        qsim.load_checkpoint(tmp_path)


class CalledTwice(nn.Module):
    """A layer that runs twice in one forward."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(64, 64), nn.Linear(64, 8)

    def forward(self, x):
        return self.head(self.layer(torch.relu(self.layer(x)) + 1))


def test_a_layer_that_runs_twice_comes_back_with_scales_from_each_token(tmp_path):
    sim = simulated(qsim.w8a8_dynamic(), CalledTwice().eval())
    sim.save_compressed(tmp_path)
    again = qsim.QuantSim(CalledTwice().eval(), X, qsim.load_checkpoint(tmp_path).config())
    again.load_compressed(tmp_path)
    assert torch.equal(again(X), sim(X))


@pytest.mark.parametrize("config", [qsim.w8a8_dynamic(), qsim.w8a8_static()])
@pytest.mark.parametrize("off", ["input", "layer_2.input[0]"])
def test_a_layer_of_which_one_call_reads_floats_is_not_written_as_if_all_were_quantized(off, config, tmp_path):
    sim = simulated(config, CalledTwice().eval())
    sim.disable(off)
    with pytest.raises(ValueError, match=r"'layer\.weight' is multiplied with what '\S+' quantizes, and with floats by 'layer(_2)?'"):
        sim.save_compressed(tmp_path)


def test_a_layer_whose_calls_have_a_range_each_is_told(tmp_path):
    sim = simulated(qsim.w8a8_static(), CalledTwice().eval())
    with pytest.raises(
        ValueError, match=r"'layer\.weight' is multiplied with what 'input' and 'layer_2\.input\[0\]' quantize.*from each token"
    ):
        sim.save_compressed(tmp_path)
