"""Files of mixtures of experts: a weight for each expert under published names, read back into one parameter, to the bit."""

import dataclasses
import json
import re

import pytest
import torch
from torch import nn

import qsim
from qsim.checkpoints.published_names import published

safetensors = pytest.importorskip("safetensors.torch")
transformers = pytest.importorskip("transformers", minversion="5.0")
from mixtures import EXAMPLE, mixture, simulated  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:QuantSim.bake", "ignore:qsim.*written with zero points", "ignore:.*stays in float beside")
PACKED = "compressed-tensors"
FOUR = qsim.TensorSpec(bits=4, axis=0, symmetric=True, method="minmax")
ZEROS = dataclasses.replace(FOUR, symmetric=False, axis=1, block_size=16)
FLOAT8 = qsim.TensorSpec(dtype="float8_e4m3fn", method="minmax")
CASES = {  # a config, how experts are computed, the format
    "groups": (qsim.w4a16(group=32), "grouped_mm", PACKED),
    "rows": (qsim.Config(FOUR, None, target=qsim.w4a16().target), "grouped_mm", PACKED),
    "zero points": (dataclasses.replace(qsim.w4a16(), weight=ZEROS), "batched_mm", PACKED),
    "gptq": (qsim.w4a16(group=32), "grouped_mm", "gptq"),
    "awq": (qsim.w4a16(group=32), "grouped_mm", "awq"),
    "fp8 weights": (qsim.fp8_dynamic(), "grouped_mm", PACKED),
    "fp8": (qsim.fp8_dynamic(), "batched_mm", PACKED),
    "fp8, a loop": (qsim.fp8_dynamic(), "eager", PACKED),
    "int8": (qsim.w8a8_dynamic(), "batched_mm", PACKED),
    "int8, one scale": (qsim.w8a8_static(), "batched_mm", PACKED),
    "tiles": (qsim.fp8_block(32), "batched_mm", "fp8"),
    "tiles, a loop": (qsim.fp8_block(32), "eager", PACKED),
    "one scale": (dataclasses.replace(qsim.fp8_static(), weight=FLOAT8), "batched_mm", "fp8"),
    "cache": (dataclasses.replace(qsim.fp8_dynamic(), kv_cache=qsim.TensorSpec(dtype="float8_e4m3fn")), "batched_mm", PACKED),
}


def written(folder, family, case):
    config, how, format = CASES[case]
    sim = simulated(mixture(family, how), config)
    if format in ("gptq", "awq"):
        sim.round_scales(torch.float16)
    sim.save_compressed(folder, format)
    return sim, how, format


def loaded(folder, family, how):
    model = mixture(family, how, seed=1)
    sim = qsim.QuantSim(model, EXAMPLE, qsim.load_checkpoint(folder).for_model(model).config())
    sim.load_compressed(folder)
    return sim


def logits(model):
    with torch.no_grad():
        return model(**EXAMPLE).logits


def said(folder):
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def same(state, other):
    return state.keys() == other.keys() and all(t.dtype == other[name].dtype and torch.equal(t, other[name]) for name, t in state.items())


def bits(folder):
    state = safetensors.load_file(folder / "model.safetensors")
    return {name: t.view(torch.uint8) if t.is_floating_point() and t.itemsize == 1 else t for name, t in state.items()}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", ["mixtral", "qwen3", "deepseek"])
def test_every_round_trip_is_to_the_bit(family, case, tmp_path):
    if (family, case) == ("deepseek", "cache"):
        pytest.skip("its cache is of latents, which no simulation quantizes")
    sim, how, format = written(tmp_path / "a", family, case)
    again = loaded(tmp_path / "a", family, how)
    assert torch.equal(logits(again), logits(sim))
    again.save_compressed(tmp_path / "b", format)
    assert same(bits(tmp_path / "b"), bits(tmp_path / "a"))
    assert said(tmp_path / "b") == said(tmp_path / "a")


@pytest.mark.parametrize("case", ["groups", "rows", "tiles", "one scale"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3", "olmoe", "deepseek"])
def test_names_and_numbers_are_those_that_transformers_publishes(family, case, tmp_path):
    sim = written(tmp_path / "packed", family, case)[0]
    sim.bake().save_pretrained(tmp_path / "float")
    expected = safetensors.load_file(tmp_path / "float" / "model.safetensors")
    found = qsim.load_checkpoint(tmp_path / "packed")
    assert same(found.state_dict(), expected)
    assert any(re.search(r"\.experts\.3\.\w+\.weight$", name) for name in found.weights)
    model = mixture(family, seed=1)
    model.load_state_dict(found.for_model(model).state_dict())
    assert same(model.state_dict(), sim.bake().state_dict())


def test_each_expert_has_the_scales_of_its_rows(tmp_path):
    sim = written(tmp_path, "mixtral", "groups")[0]
    encoding = sim.quantizers()["model.layers.1.mlp.experts.gate_up_proj"].encoding
    state = safetensors.load_file(tmp_path / "model.safetensors")
    for i in range(4):
        prefix = f"model.layers.1.block_sparse_moe.experts.{i}"
        assert torch.equal(state[f"{prefix}.w1.weight_scale"], encoding.scale[i, :96])
        assert torch.equal(state[f"{prefix}.w3.weight_scale"], encoding.scale[i, 96:])
        assert state[f"{prefix}.w1.weight_shape"].tolist() == [96, 64]


def test_a_scale_of_a_whole_expert_is_written_for_gate_and_up(tmp_path):
    sim = written(tmp_path, "qwen3", "one scale")[0]
    scale = sim.quantizers()["model.layers.0.mlp.experts.gate_up_proj"].encoding.scale
    assert scale.shape == (4,)
    state = safetensors.load_file(tmp_path / "model.safetensors")
    for part in ("gate_proj", "up_proj"):
        stored = torch.cat([state[f"model.layers.0.mlp.experts.{i}.{part}.weight_scale"] for i in range(4)])
        assert torch.equal(stored, scale)


@pytest.mark.filterwarnings("error:qsim.*several scales")
def test_a_published_file_has_a_scale_for_gate_and_one_for_up(tmp_path):
    written(tmp_path, "mixtral", "one scale")
    path = tmp_path / "model.safetensors"
    state = safetensors.load_file(path)
    for i, name in enumerate(name for name in state if name.endswith((".w1.weight_scale", ".w3.weight_scale"))):
        state[name] *= 1 + i / 7
    safetensors.save_file(state, path)
    model = mixture("mixtral", "batched_mm", seed=1)
    model.load_state_dict(qsim.load_checkpoint(tmp_path).for_model(model).state_dict())
    sim = loaded(tmp_path, "mixtral", "batched_mm")
    assert same(sim.bake().state_dict(), model.state_dict())
    expected = state["model.layers.0.block_sparse_moe.experts.2.w3.weight"].float()
    expected *= state["model.layers.0.block_sparse_moe.experts.2.w3.weight_scale"]
    assert torch.equal(sim.model.model.layers[0].mlp.experts.gate_up_proj[2, 96:], expected)
    before = bits(tmp_path)
    sim.save_compressed(tmp_path, "fp8")
    assert same(bits(tmp_path), before)


def test_what_experts_read_has_the_widest_of_their_ranges(tmp_path):
    written(tmp_path, "mixtral", "one scale")
    path = tmp_path / "model.safetensors"
    state = safetensors.load_file(path)
    name = "model.layers.1.block_sparse_moe.experts.2.w2.input_scale"
    state[name] *= 3
    safetensors.save_file(state, path)
    with pytest.warns(UserWarning, match=r"layers\.1\.mlp\.experts\.down_proj' have several scales"):
        sim = loaded(tmp_path, "mixtral", "batched_mm")
    assert torch.equal(sim.quantizers()["model.layers.1.mlp.experts.bmm_2.input[1]"].encoding.scale.reshape(1), state[name])


@pytest.mark.parametrize("case", ["groups", "tiles"])
def test_what_is_in_float_is_named(case, tmp_path):
    written(tmp_path, "mixtral", case)
    left_out = said(tmp_path)["ignore" if case == "groups" else "modules_to_not_convert"]
    assert left_out == [*(f"model.layers.{i}.block_sparse_moe.gate" for i in range(2)), "lm_head"]


@pytest.mark.parametrize("family", ["mixtral", "qwen3"])
def test_experts_in_float_are_a_weight_each_too(family, tmp_path):
    sim = simulated(mixture(family), qsim.w4a16(group=32).override("*.experts.*", weight=None))
    sim.save_compressed(tmp_path)
    names = {name for name in safetensors.load_file(tmp_path / "model.safetensors") if ".experts." in name}
    assert len(names) == 2 * 4 * 3
    assert {name.removesuffix(".weight") for name in names} <= {*said(tmp_path)["ignore"]}
    assert torch.equal(logits(loaded(tmp_path, family, "grouped_mm")), logits(sim))


def test_groups_of_experts_are_one_pattern_a_layer(tmp_path):
    config = qsim.w4a16(group=32).override("*.self_attn.*", weight=dataclasses.replace(FOUR, bits=8))
    sim = simulated(mixture("mixtral"), config)
    sim.save_compressed(tmp_path)
    targets = said(tmp_path)["config_groups"]["group_1"]["targets"]
    assert sorted(targets) == [rf"re:model\.layers\.{i}\.block_sparse_moe\.experts\.\d+\.w{j}$" for i in range(2) for j in (1, 2, 3)]
    assert torch.equal(logits(loaded(tmp_path, "mixtral", "grouped_mm")), logits(sim))


def test_experts_of_several_widths_are_warned_of(tmp_path):
    """transformers reads all as the first of them."""
    pytest.importorskip("compressed_tensors")
    config = qsim.w4a16(group=32).override("model.layers.1.mlp.experts.*", weight=dataclasses.replace(FOUR, bits=8))
    sim = simulated(mixture("qwen3"), config)
    with pytest.warns(UserWarning, match=r"experts are written with 4 and 8 bits .* reads all as the first"):
        sim.save_compressed(tmp_path)
    assert torch.equal(logits(loaded(tmp_path, "qwen3", "grouped_mm")), logits(sim))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    stack = "model.layers.{}.mlp.experts.down_proj"
    assert [torch.equal(model.get_parameter(stack.format(i)), sim.bake().get_parameter(stack.format(i))) for i in range(2)] == [True, False]


def test_a_scale_a_row_stays_one_beside_groups_of_the_same_size(tmp_path):
    """down_proj has 32 columns, and integers elsewhere groups of 32."""
    config = qsim.w4a16(group=32).override("model.layers.1.mlp.experts.*", weight=dataclasses.replace(FLOAT8, axis=0))
    sim = simulated(mixture("qwen3"), config)
    sim.save_compressed(tmp_path)
    found = qsim.load_checkpoint(tmp_path).weights
    names = [f"model.layers.{i}.mlp.experts.0.down_proj.weight" for i in range(2)]
    assert [found[name].block_size for name in names] == [32, None]
    assert torch.equal(logits(loaded(tmp_path, "qwen3", "grouped_mm")), logits(sim))


@pytest.mark.parametrize("case", ["groups", "rows", "fp8 weights", "fp8", "tiles", "mixed"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3", "olmoe"])
def test_transformers_reads_them(family, case, tmp_path):
    pytest.importorskip("compressed_tensors")
    if case == "mixed":  # experts in 4 bits beside attention in 8: which group experts are of, their pattern tells
        how, config = "grouped_mm", qsim.w4a16(group=32).override("*.self_attn.*", weight=dataclasses.replace(FOUR, bits=8))
        sim = simulated(mixture(family), config)
        sim.save_compressed(tmp_path)
    else:
        sim, how, _ = written(tmp_path, family, case)
    options = {} if case == "tiles" else {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)}
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, experts_implementation=how, **options)
    baked = sim.bake()
    if case != "tiles":  # whose layers stay float8 there
        assert same(model.state_dict(), baked.state_dict())
        assert torch.equal(logits(model.eval()), logits(baked))
    stacks = {name: t for name, t in model.state_dict().items() if re.search(r"experts\.\w+_proj$", name)}
    assert len(stacks) == 4


@pytest.mark.parametrize("case", ["groups", "fp8 weights"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3"])
def test_transformers_computes_what_is_simulated(family, case, tmp_path):
    """Beside attention whose activations are quantized, too."""
    pytest.importorskip("compressed_tensors")
    sim, how, _ = written(tmp_path, family, case)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, experts_implementation=how).eval()
    assert torch.equal(logits(model), logits(sim))


def test_zero_points_of_experts_have_no_cure_in_transformers(tmp_path):
    pytest.importorskip("compressed_tensors")
    with pytest.warns(
        UserWarning, match=r"written with zero points, .* refuses those .* no way round it for experts; symmetric=True has none"
    ):
        written(tmp_path, "qwen3", "zero points")
    for options in ({}, {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)}):
        with pytest.raises(RuntimeError, match="conversion of the weights"):
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, **options)


def test_a_model_that_was_loaded_has_the_names_of_its_family(tmp_path):
    mixture("mixtral").save_pretrained(tmp_path / "float")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "float").eval()
    model.set_experts_implementation("grouped_mm")
    simulated(model, qsim.w4a16(group=32)).save_compressed(tmp_path / "a")
    written(tmp_path / "b", "mixtral", "groups")
    assert same(bits(tmp_path / "a"), bits(tmp_path / "b"))


def test_gguf(tmp_path):
    sim = simulated(mixture("qwen3"), qsim.w4a16(group=32))
    sim.round_scales(torch.float16)
    sim.save_compressed(tmp_path / "a.gguf", "gguf")
    assert torch.equal(logits(loaded(tmp_path / "a.gguf", "qwen3", "grouped_mm")), logits(sim))


class OwnStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(3, 8, 16))

    def forward(self, x):
        return torch.bmm(self.experts, x.T.expand(3, -1, -1)).sum(0)


def test_a_model_of_no_table_is_refused_with_the_reason(tmp_path):
    sim = simulated(mixture("granite"), qsim.w4a16(group=32))
    with pytest.raises(ValueError, match=r"gate_up_proj' is no weight .*table of conversions has no weights of single experts"):
        sim.save_compressed(tmp_path)
    x = torch.randn(4, 16)
    sim = qsim.QuantSim(OwnStack().eval(), x, qsim.Config(FOUR, None, target=qsim.w4a16().target))
    sim.calibrate([x], progress=False)
    with pytest.raises(ValueError, match=r"'experts' is no weight .*transformers' models alone"):
        sim.save_compressed(tmp_path)
    assert not any(tmp_path.iterdir())


def test_what_no_file_can_hold_is_refused_with_a_cure(tmp_path):
    sim = simulated(mixture("mixtral", "eager"), qsim.w8a8_static())
    with pytest.raises(ValueError, match=r"is multiplied at \d places .*batched_mm"):
        sim.save_compressed(tmp_path)
    sim = qsim.QuantSim(mixture("mixtral"), EXAMPLE, qsim.w4a16(group=32))
    sim.calibrate([EXAMPLE], progress=False)
    with pytest.raises(ValueError, match=r'gate.weight.*Config\.override\("model\.layers\.0\.mlp\.gate\.linear"'):
        sim.save_compressed(tmp_path)
    sim = simulated(mixture("mixtral", "batched_mm"), qsim.fp8_block(64))  # 96 rows of w1 are one tile and a half
    with pytest.raises(ValueError, match=r"tiles of 64 rows, and in one lie two weights"):
        sim.save_compressed(tmp_path)
    assert not any(tmp_path.iterdir())


def test_parts_cover_each_row_once():
    model = mixture("deepseek")
    layout = published(model)
    for stack, parts in layout.stacks.items():
        experts, rows, columns = model.get_parameter(stack).shape
        covered = sorted((part.expert, row) for part in parts.values() for row in range(part.start, part.stop))
        assert covered == [(expert, row) for expert in range(experts) for row in range(rows)]
        assert {part.columns for part in parts.values()} == {columns}
    assert not layout.problems
    assert not published(nn.Linear(2, 3)).parts
