"""compressed-tensors with several groups: some layers' activations quantized, others' in float; targets by name, pattern and class."""

import dataclasses
import json

import pytest
import torch
from library_checkpoints import save_with_library
from torch import nn

import qsim
from qsim.checkpoints.config_groups import choose, read_groups
from qsim.errors import FileFormatError
from qsim.files.file_place import FilePlace

safetensors = pytest.importorskip("safetensors.torch")
pytestmark = pytest.mark.filterwarnings("ignore:QuantSim.bake", "ignore:You passed `quantization_config`")
X = torch.randn(5, 256, generator=torch.Generator().manual_seed(0))
EXAMPLE = {"input_ids": torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(0)), "use_cache": False}
FOUR = qsim.w4a16(group=32).weight
FLOATS = {"activation": None}
MIXED = {  # a config, and the layouts of the three layers
    "int8 and int8 alone": (qsim.w8a8_dynamic().override("2", **FLOATS), "int pack int"),
    "static int8 and int8 alone": (qsim.w8a8_static().override("4", **FLOATS), "int int pack"),
    "float8 and float8 alone": (qsim.fp8_dynamic().override("2", **FLOATS), "float naive float"),
    "static float8 and 4 bits": (qsim.fp8_static().override("2", weight=FOUR, **FLOATS), "float pack float"),
    "tiles, rows and 4 bits": (
        qsim.fp8_block().override("4", weight=FOUR, **FLOATS).override("2", weight=qsim.fp8_dynamic().weight, **FLOATS),
        "float naive pack",
    ),
    "tiles and a scale a token": (
        qsim.fp8_block().override("2", weight=qsim.fp8_dynamic().weight, activation=qsim.fp8_dynamic().activation),
        "float float float",
    ),
    "the first alone in float": (qsim.fp8_dynamic().override("0", **FLOATS), "naive float float"),
    "float8 alone": (dataclasses.replace(qsim.fp8_dynamic(), activation=None), "naive naive naive"),
    "tiles alone": (dataclasses.replace(qsim.fp8_block(), activation=None), "naive naive naive"),
}


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(256, 192), nn.ReLU(), nn.Linear(192, 160), nn.ReLU(), nn.Linear(160, 128), nn.ReLU(), nn.Linear(128, 3)
    ).eval()


def simulated(config, model=None, x=X):
    sim = qsim.QuantSim(network() if model is None else model, x, config)
    sim.calibrate([x], progress=False)
    return sim


def written(folder, name):
    sim = simulated(MIXED[name][0])
    sim.save_compressed(folder)
    return sim, json.loads((folder / "config.json").read_text())["quantization_config"]


@pytest.mark.parametrize("name", MIXED)
def test_what_is_written_is_read(name, tmp_path):
    sim, said = written(tmp_path / "a", name)
    names = {"int": "int-quantized", "float": "float-quantized", "pack": "pack-quantized", "naive": "naive-quantized"}
    expected = [names[layout] for layout in MIXED[name][1].split()]
    assert said["format"] == (expected[0] if len(set(expected)) == 1 else "mixed-precision")
    for layer, layout in zip(("0", "2", "4"), expected, strict=True):
        (group,) = [group for group in said["config_groups"].values() if group["targets"] == ["Linear"] or layer in group["targets"]]
        assert group.get("format", said["format"]) == layout
        assert (group["input_activations"] is None) == (layout in ("pack-quantized", "naive-quantized"))
    read = qsim.load_checkpoint(tmp_path / "a")
    quantized = [f"{layer}.weight" for layer, layout in zip(("0", "2", "4"), expected, strict=True) if layout[:3] in ("int", "flo")]
    assert list(read.activations) == quantized
    for layer in ("0", "2", "4"):
        assert torch.equal(read.state_dict()[f"{layer}.weight"], sim.bake().get_submodule(layer).weight)
    qsim.save_checkpoint(read, tmp_path / "b", linear=["0", "2", "4", "6"])
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    again = qsim.QuantSim(network(1), X, read.config())
    again.load_compressed(read)
    assert list(again.quantizers()) == list(sim.quantizers())
    assert torch.equal(again(X), sim(X))


class Shared(nn.Module):
    """Two layers read one tensor: the model's input, or what a function makes of it."""

    def __init__(self, first):
        super().__init__()
        torch.manual_seed(3)
        self.first = first
        self.a, self.b, self.c = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 8)

    def forward(self, x):
        x = self.first(x)
        return self.c(torch.tanh(self.a(x) * self.b(x)))


@pytest.mark.parametrize("first", [nn.Tanh(), nn.Identity()])
@pytest.mark.parametrize("alone", ["a", "b"])
def test_of_two_layers_that_read_one_tensor_one_reads_it_in_float(alone, first, tmp_path):
    x = torch.randn(5, 64)
    sim = simulated(qsim.fp8_dynamic().override(alone, **FLOATS), Shared(first).eval(), x)
    sim.save_compressed(tmp_path)
    read = qsim.load_checkpoint(tmp_path)
    assert list(read.activations) == ["b.weight" if alone == "a" else "a.weight"]
    again = qsim.QuantSim(Shared(first).eval(), x, read.config())
    again.load_compressed(read)
    assert torch.equal(again(x), sim(x))
    given, weights = first(x), read.state_dict()
    scale = given.abs().amax(1, keepdim=True) / 448
    rounded = (given / scale).to(torch.float8_e4m3fn).float() * scale
    linear = {n: nn.functional.linear(given if n == alone else rounded, weights[f"{n}.weight"], weights[f"{n}.bias"]) for n in ("a", "b")}
    expected = nn.functional.linear(torch.tanh(linear["a"] * linear["b"]), weights["c.weight"], weights["c.bias"])
    assert torch.allclose(again(x), expected, rtol=1e-5, atol=1e-6)


def test_a_simulation_that_quantizes_more_than_the_file_is_told(tmp_path):
    written(tmp_path, "float8 and float8 alone")
    sim = simulated(qsim.fp8_dynamic())
    with pytest.raises(ValueError, match=r"'2\.weight' is multiplied with floats in .*config\.override\('2', activation=None"):
        sim.load_compressed(tmp_path)


def test_scales_of_other_blocks_are_told(tmp_path):
    simulated(qsim.fp8_block()).save_compressed(tmp_path)
    config = qsim.load_checkpoint(tmp_path).config()
    tokens = qsim.QuantSim(network(), X, config.override("2", activation={"block_size": None}))
    with pytest.raises(
        ValueError,
        match=r"'2\.weight' .* a scale for each 128 values of a token in the checkpoint, a scale from each token in the simulation",
    ):
        tokens.load_compressed(tmp_path)


def llama():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, tie_word_embeddings=False)).eval()


LANGUAGE = {
    "float8 alone": dataclasses.replace(qsim.fp8_dynamic(), activation=None),
    "float8 and float8 alone": qsim.fp8_static().override("*.mlp.*", activation=None),
    "tiles and 4 bits": qsim.fp8_block().override("*.mlp.*", weight=FOUR, activation=None),
    "tiles and a scale a token": qsim.fp8_block().override("*.q_proj", weight=qsim.fp8().weight, activation=qsim.fp8_dynamic().activation),
}


@pytest.mark.parametrize("name", LANGUAGE)
def test_transformers_reads_it(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    sim = simulated(LANGUAGE[name], llama(), EXAMPLE)
    sim.save_compressed(tmp_path)
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        assert torch.equal(read(**EXAMPLE).logits, sim(**EXAMPLE).logits)


def test_what_the_library_writes_by_patterns_is_simulated(tmp_path):
    """A pattern comes before a class: what is of the second group here has no quantized activations."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme, apply_quantization_config

    model = llama()
    weights = QuantizationArgs(num_bits=8, type="float", symmetric=True, strategy="channel")
    tokens = QuantizationArgs(num_bits=8, type="float", symmetric=True, strategy="token", dynamic=True)
    groups = {
        "all": QuantizationScheme(targets=["Linear"], weights=weights, input_activations=tokens),
        "some": QuantizationScheme(targets=[r"re:.*mlp\.(gate|up)_proj$"], weights=weights),
    }
    apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=["lm_head"], quantization_status="frozen"))
    for layer in model.modules():
        if hasattr(layer, "quantization_scheme"):
            layer.weight_scale.data = layer.weight.detach().abs().amax(1, keepdim=True) / 448
    with torch.no_grad():
        logits = model(**EXAMPLE).logits
    save_with_library(model, tmp_path)
    checkpoint = qsim.load_checkpoint(tmp_path)
    floats = {name for name in checkpoint.weights if name not in checkpoint.activations}
    assert floats == {f"model.layers.{i}.mlp.{kind}_proj.weight" for i in (0, 1) for kind in ("gate", "up")}
    sim = qsim.QuantSim(llama(), EXAMPLE, checkpoint.config())
    sim.load_compressed(checkpoint)
    assert torch.equal(sim(**EXAMPLE).logits, logits)


def groups(**targets):
    quantization = {"config_groups": {name: {"targets": of, "weights": {"num_bits": 8}} for name, of in targets.items()}}
    return {group.place.entry: group for group in read_groups(quantization, "pack-quantized", "mixed-precision", FilePlace("config.json"))}


def test_names_come_before_patterns_and_patterns_before_classes():
    found = groups(classes=["Linear"], patterns=["re:.*mlp", "re:model.layers.1"], names=["a.mlp.up", "head"])
    modules = {"a.mlp.up", "a.mlp.down", "model.layers.1.q", "model.layers.0.q", "head"}

    def chosen(module):
        return [group.place.entry for group in choose(module, list(found.values()), modules)]

    assert chosen("a.mlp.up") == ["names"]
    assert chosen("a.mlp.down") == ["patterns"]
    assert chosen("model.layers.1.q") == ["patterns"]
    assert chosen("model.layers.0.q") == ["classes"]
    assert chosen("head") == ["names"]
    only = groups(one=["re:a"], two=["re:b", "head"])
    assert [group.place.entry for group in choose("c", list(only.values()), modules)] == ["one", "two"]  # their tensors have to tell


def test_groups_that_nothing_tells_apart_are_an_error(tmp_path):
    _, said = written(tmp_path, "float8 and float8 alone")
    for group in said["config_groups"].values():
        group["targets"] = ["re:.*"]
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": said}))
    with pytest.raises(FileFormatError, match=r"entry '0': config_groups has several ways to quantize its activations; expected one"):
        qsim.load_checkpoint(tmp_path)


def test_what_is_left_out_is_not_quantized_and_what_is_named_is(tmp_path):
    _, said = written(tmp_path, "float8 and float8 alone")
    first = said["config_groups"]["group_0"]
    for changes, message in (
        ({"ignore": ["6", "2"]}, r"entry '2': is quantized, and 'ignore' of quantization_config has it"),
        ({"ignore": ["6", "re:[24]$"]}, r"entry '2': is quantized, and 'ignore'"),
        ({"ignore": "6"}, r"ignore is '6'; expected a list of names"),
        ({"ignore": ["re:("]}, r"one of ignore is 're:\('; expected a regular expression"),
        (
            {"ignore": [], "config_groups": {**said["config_groups"], "more": {**first, "targets": ["6"]}}},
            r"entry '6': has a weight in float",
        ),
    ):
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {**said, **changes}}))
        with pytest.raises(FileFormatError, match=message):
            qsim.load_checkpoint(tmp_path)


HOSTILE = {
    r"format is null; expected that of the group, where all together are 'mixed-precision'": {"format": None},
    r"format is 'mixed-precision'; expected that of the group": {"format": "mixed-precision"},
    r"format is 'marlin-24'; expected 'pack-quantized' or 'int-quantized' or 'float-quantized' or": {"format": "marlin-24"},
    r"one of targets is 're:\('; expected a regular expression": {"targets": ["re:("]},
    r"expected a regular expression behind 're:': it has 2003 characters": {"targets": ["re:" + "a" * 2000]},
    r"targets is 'Linear'; expected a list of names": {"targets": "Linear"},
    r"weights of config_groups is null": {"weights": None},
    r"output_activations is an object with": {"output_activations": {"num_bits": 8}},
    r"entry '0': has weight_scale; expected what its group": {
        "format": "pack-quantized",
        "weights": {"num_bits": 4},
        "input_activations": None,
    },
}


@pytest.mark.parametrize("what", HOSTILE)
def test_damaged_groups_are_refused(what, tmp_path):
    _, said = written(tmp_path, "float8 and float8 alone")
    said["config_groups"]["group_0"].update(HOSTILE[what])
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": said}))
    with pytest.raises(FileFormatError, match=what):
        qsim.load_checkpoint(tmp_path)
