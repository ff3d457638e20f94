"""Scales of cached keys and values in checkpoints, as compressed-tensors' own quantized cache has them."""

import dataclasses
import json

import pytest
import torch
from library_checkpoints import save_with_library

import qsim
from qsim.errors import FileFormatError

safetensors = pytest.importorskip("safetensors.torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:QuantSim.bake", "ignore:You passed `quantization_config`")
EXAMPLE = {"input_ids": torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(0))}
CACHES = {"float": qsim.TensorSpec(dtype="float8_e4m3fn"), "int": qsim.TensorSpec(symmetric=True, method="minmax")}
OPERATIONS = {  # where keys and values are read
    "sdpa": ("scaled_dot_product_attention.input[1]", "scaled_dot_product_attention.input[2]"),
    "eager": ("matmul.input[1]", "matmul_2.input[1]"),
}
BASE = qsim.fp8_dynamic()


def llama(seed=0, attention="sdpa"):
    torch.manual_seed(seed)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    config = transformers.LlamaConfig(**sizes, **heads)
    config._attn_implementation = attention
    return transformers.LlamaForCausalLM(config).eval()


def simulated(config, attention="sdpa"):
    sim = qsim.QuantSim(llama(0, attention), EXAMPLE, config)
    sim.calibrate([EXAMPLE], progress=False)
    return sim


def written(folder, kind="float", config=BASE, attention="sdpa"):
    sim = simulated(dataclasses.replace(config, kv_cache=CACHES[kind]), attention)
    sim.save_compressed(folder)
    return sim, safetensors.load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())


def said(folder, config, **changes):
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", CACHES)
def test_what_is_written_is_read(kind, attention, tmp_path):
    sim, state, config = written(tmp_path / "a", kind, attention=attention)
    scheme = config["quantization_config"]["kv_cache_scheme"]
    assert scheme == {"num_bits": 8, "type": kind, "strategy": "tensor", "dynamic": False, "symmetric": True, "group_size": None}
    for i in (0, 1):
        for name, operation in zip(("k_scale", "v_scale"), OPERATIONS[attention], strict=True):
            quantizer = sim.quantizers()[f"model.layers.{i}.self_attn.{operation}"]
            assert torch.equal(state[f"model.layers.{i}.self_attn.{name}"], quantizer.encoding.scale.reshape(1))
    read = qsim.load_checkpoint(tmp_path / "a")
    linear = [name for name, module in sim.model.named_modules() if isinstance(module, torch.nn.Linear)]
    qsim.save_checkpoint(read, tmp_path / "b", linear=linear)
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    again = qsim.QuantSim(llama(1, attention), EXAMPLE, read.config())
    again.load_compressed(read)
    assert torch.equal(again(**EXAMPLE).logits, sim(**EXAMPLE).logits)
    assert not torch.allclose(again(**EXAMPLE).logits, simulated(BASE)(**EXAMPLE).logits)
    generated = [s.generate(**EXAMPLE, max_new_tokens=8, do_sample=False) for s in (again, sim)]
    assert torch.equal(*generated)


@pytest.mark.parametrize("kind", CACHES)
def test_transformers_reads_it(kind, tmp_path):
    """With compressed-tensors' cache, which rounds what is written to it."""
    pytest.importorskip("compressed_tensors")
    sim, _, _ = written(tmp_path, kind)
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        assert torch.equal(read(**EXAMPLE).logits, sim(**EXAMPLE).logits)
        for module in read.modules():
            if hasattr(module, "k_scale"):
                module.quantization_enabled = False
        assert not torch.equal(read(**EXAMPLE).logits, sim(**EXAMPLE).logits)


@pytest.mark.parametrize("kind", CACHES)
def test_what_the_library_writes_is_simulated(kind, tmp_path):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, apply_quantization_config, preset_name_to_scheme

    model = llama()
    scheme = preset_name_to_scheme("FP8_DYNAMIC", ["Linear"])
    cache = QuantizationArgs(num_bits=8, type=kind, symmetric=True, strategy="tensor", dynamic=False)
    layout = {"format": "float-quantized", "quantization_status": "frozen"}
    apply_quantization_config(
        model, QuantizationConfig(config_groups={"group": scheme}, kv_cache_scheme=cache, ignore=["lm_head"], **layout)
    )
    for number, module in enumerate(model.modules()):
        if hasattr(module, "weight_scale"):
            module.weight_scale.data = module.weight.detach().abs().amax(1, keepdim=True) / 448
        if hasattr(module, "k_scale"):
            module.k_scale.data, module.v_scale.data = torch.tensor([0.003 + number / 1e5]), torch.tensor([0.001 + number / 1e5])
    with torch.no_grad():
        logits = model(**EXAMPLE).logits
    save_with_library(model, tmp_path)
    checkpoint = qsim.load_checkpoint(tmp_path)
    sim = qsim.QuantSim(llama(1), EXAMPLE, checkpoint.config())
    sim.load_compressed(checkpoint)
    assert torch.equal(sim(**EXAMPLE).logits, logits)


@pytest.mark.parametrize("kind", CACHES)
def test_a_cache_alone_is_written_and_read(kind, tmp_path):
    """Beside weights in float: compressed-tensors has no groups then, and calls the format "dense"."""
    pytest.importorskip("compressed_tensors")
    sim, state, config = written(tmp_path / "a", kind, qsim.Config(None, None, target=BASE.target))
    assert not any(name.endswith(("weight_scale", "weight_packed")) for name in state)
    assert (config["quantization_config"]["config_groups"], config["quantization_config"]["format"]) == ({}, "dense")
    checkpoint = qsim.load_checkpoint(tmp_path / "a")
    again = qsim.QuantSim(llama(1), EXAMPLE, checkpoint.config())
    again.load_compressed(checkpoint)
    assert torch.equal(again(**EXAMPLE).logits, sim(**EXAMPLE).logits)
    assert not torch.equal(again(**EXAMPLE).logits, llama()(**EXAMPLE).logits)
    qsim.save_checkpoint(checkpoint, tmp_path / "b")
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a", dtype=torch.float32).eval()
    with torch.no_grad():
        assert torch.equal(read(**EXAMPLE).logits, sim(**EXAMPLE).logits)
    for format in ("fp8", "gptq", "gguf"):
        with pytest.raises(FileFormatError, match="'kv_cache' is quantized, and the format has no place for that"):
            sim.save_compressed(tmp_path / f"c.{format}", format)


def test_a_cache_alone_as_the_library_writes_it(tmp_path):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, apply_quantization_config

    model = llama()
    cache = QuantizationArgs(num_bits=8, type="float", symmetric=True, strategy="tensor", dynamic=False)
    apply_quantization_config(model, QuantizationConfig(config_groups={}, kv_cache_scheme=cache, quantization_status="frozen"))
    for number, module in enumerate(model.modules()):
        if hasattr(module, "k_scale"):
            module.k_scale.data, module.v_scale.data = torch.tensor([0.003 + number / 1e5]), torch.tensor([0.001 + number / 1e5])
    with torch.no_grad():
        logits = model(**EXAMPLE).logits
    save_with_library(model, tmp_path)
    sim = qsim.QuantSim(llama(1), EXAMPLE, qsim.load_checkpoint(tmp_path).config())
    sim.load_compressed(tmp_path)
    assert torch.equal(sim(**EXAMPLE).logits, logits)
    path = tmp_path / "model.safetensors"
    state = safetensors.load_file(path)
    safetensors.save_file({**state, "model.layers.0.mlp.up_proj.weight_scale": torch.ones(96, 1)}, path)
    with pytest.raises(FileFormatError, match=r"up_proj\.weight_scale': is a part of a quantized layer whose weight is not there"):
        qsim.load_checkpoint(tmp_path)


def test_a_model_in_bfloat16_is_written_with_rounded_scales(tmp_path):
    """transformers has the scales of a cache in the model's type."""
    pytest.importorskip("compressed_tensors")
    sim = qsim.QuantSim(llama().bfloat16(), EXAMPLE, dataclasses.replace(BASE, kv_cache=CACHES["float"]))
    sim.calibrate([EXAMPLE], progress=False)
    with pytest.raises(ValueError, match=r"input\[1\]' is torch\.bfloat16 with scales of float32, .*call sim\.round_scales"):
        sim.save_compressed(tmp_path)
    sim.round_scales(torch.bfloat16)
    sim.save_compressed(tmp_path)
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    scale = sim.quantizers()["model.layers.1.self_attn.scaled_dot_product_attention.input[2]"].encoding.scale
    assert torch.equal(read.get_submodule("model.layers.1.self_attn").v_scale.float(), scale.reshape(1))
    again = qsim.QuantSim(llama(1).bfloat16(), EXAMPLE, qsim.load_checkpoint(tmp_path).config())
    again.load_compressed(tmp_path)
    assert torch.equal(again(**EXAMPLE).logits, sim(**EXAMPLE).logits)


def test_older_names_are_read(tmp_path):
    _, state, config = written(tmp_path)
    renamed = {key.replace("k_scale", "k_proj.output_scale").replace("v_scale", "v_proj.output_scale"): t for key, t in state.items()}
    safetensors.save_file(renamed, tmp_path / "model.safetensors")
    read = qsim.load_checkpoint(tmp_path)
    assert float(read.encodings["model.layers.1.self_attn.v_scale"].scale) == float(state["model.layers.1.self_attn.v_scale"])
    said(tmp_path, config, kv_cache_scheme="static")
    assert qsim.load_checkpoint(tmp_path).kv_cache == read.kv_cache


HOSTILE = {
    r"kv_cache_scheme': dynamic is true; expected false, and no other cache is read: take kv_cache_scheme out": {"dynamic": True},
    r"strategy is 'attn_head'": {"strategy": "attn_head"},
    r"strategy is 'token'": {"strategy": "token"},
    r"num_bits is 4; expected 8": {"num_bits": 4},
    r"type is 'e5m2'": {"type": "e5m2"},
    r"symmetric is false": {"symmetric": False},
}


@pytest.mark.parametrize("what", HOSTILE)
def test_other_caches_are_refused(what, tmp_path):
    _, _, config = written(tmp_path)
    said(tmp_path, config, kv_cache_scheme={**config["quantization_config"]["kv_cache_scheme"], **HOSTILE[what]})
    with pytest.raises(FileFormatError, match=what):
        qsim.load_checkpoint(tmp_path)


def test_damaged_scales_are_refused(tmp_path):
    _, state, config = written(tmp_path)
    keys = "model.layers.0.self_attn.k_scale"
    without = {name: t for name, t in state.items() if not name.endswith(("k_scale", "v_scale"))}
    for changed, message in (
        ({**state, keys: torch.zeros(1)}, "k_scale has numbers that are not positive"),
        ({**state, keys: torch.ones(2)}, "the number of scales in k_scale is 2; expected 1"),
        ({**state, keys: torch.ones(1, dtype=torch.int8)}, "k_scale is int8"),
        ({**state, keys.replace("scale", "zero_point"): torch.ones(1, dtype=torch.int8)}, "k_zero_point is not 0"),
        ({name: t for name, t in state.items() if name != keys}, "has no k_scale"),
        ({**state, keys.replace("k_scale", "k_proj.output_scale"): torch.ones(1)}, "expected one of them"),
        (without, "no attention has k_scale and v_scale"),
    ):
        safetensors.save_file(changed, tmp_path / "model.safetensors")
        with pytest.raises(FileFormatError, match=message):
            qsim.load_checkpoint(tmp_path)
    safetensors.save_file(state, tmp_path / "model.safetensors")
    said(tmp_path, config, kv_cache_scheme=[8])
    with pytest.raises(FileFormatError, match=r"kv_cache_scheme is .*; expected null or an object"):
        qsim.load_checkpoint(tmp_path)


def test_caches_that_do_not_fit_are_told(tmp_path):
    written(tmp_path)
    checkpoint = qsim.load_checkpoint(tmp_path)
    config = checkpoint.config()
    for cache, message in (
        (None, r"'model\.layers\.0\.self_attn\.k_scale' is the scale of a cache that the simulation does not quantize"),
        (8, r"'model\.layers\.0\.self_attn\.k_scale': "),
        (CACHES["int"], r"'model\.layers\.0\.self_attn\.k_scale': the file has float8_e4m3fn"),
        ((None, CACHES["float"]), r"'model\.layers\.1\.self_attn\.k_scale' is the scale of a cache that"),
    ):
        with pytest.raises(ValueError, match=message):
            qsim.QuantSim(llama(), EXAMPLE, dataclasses.replace(config, kv_cache=cache)).load_compressed(checkpoint)
    one = {name: encoding for name, encoding in checkpoint.encodings.items() if "layers.1" not in name}
    with pytest.raises(ValueError, match=r"'model\.layers\.1\.self_attn\.k_scale' is not in the checkpoint, and the simulation quantizes"):
        qsim.QuantSim(llama(), EXAMPLE, config).load_compressed(dataclasses.replace(checkpoint, encodings=one))


def test_what_no_file_holds_is_told(tmp_path):
    for cache in (8, qsim.TensorSpec(bits=8), (CACHES["float"], CACHES["int"]), (None, CACHES["float"])):
        with pytest.raises(ValueError, match="quantizers are of no weight"):
            simulated(dataclasses.replace(BASE, kv_cache=cache)).save_compressed(tmp_path / "no")
    for format in ("gptq", "awq", "gguf", "fp8"):
        sim = simulated(dataclasses.replace(qsim.w4a16(group=32), kv_cache=CACHES["float"]))
        with pytest.raises(FileFormatError, match=r"'kv_cache' is quantized, and the format has no place for that"):
            sim.save_compressed(tmp_path / "no.gguf", format)
    assert not list(tmp_path.iterdir())
    written(tmp_path / "yes", "int", qsim.w4a16(group=32))
    with pytest.raises(qsim.errors.NoEncodingError, match="calibrate"):
        qsim.QuantSim(llama(), EXAMPLE, dataclasses.replace(BASE, kv_cache=CACHES["float"])).save_compressed(tmp_path / "no")
