"""Files of experts that are incomplete or contradict each other: an error that names the expert, and a model as it was."""

import dataclasses

import pytest
import torch

import qsim
from qsim.errors import FileFormatError

safetensors = pytest.importorskip("safetensors.torch")
pytest.importorskip("transformers", minversion="5.0")
from mixtures import EXAMPLE, mixture, simulated  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*stays in float beside")
EXPERT = "model.layers.1.mlp.experts.2.up_proj"
STACK = "model.layers.1.mlp.experts.gate_up_proj"


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    sim = simulated(mixture("qwen3"), qsim.w4a16(group=32))
    sim.save_compressed(folder)
    return folder, sim


def changed(good, **changes):
    """The checkpoint with other weights and tensors; None takes one out."""
    checkpoint = qsim.load_checkpoint(good[0])
    return dataclasses.replace(
        checkpoint,
        **{
            kind: {name: entry for name, entry in {**getattr(checkpoint, kind), **new}.items() if entry is not None}
            for kind, new in changes.items()
        },
    )


def packed(rows=32, columns=64, bits=4, size=32):
    groups = torch.ones(rows, columns // size)
    return qsim.PackedWeight(torch.ones(rows, columns, dtype=torch.int8), groups, torch.zeros_like(groups).int(), bits, size)


NAME = f"{EXPERT}.weight"
BROKEN = {
    "missing": ({"weights": {NAME: None}}, rf"'{NAME}', expert 2 of '{STACK}', is not in the checkpoint"),
    "rows": ({"weights": {NAME: packed(rows=16)}}, rf"'{NAME}', expert 2 .* has shape \(16, 64\); expected \(32, 64\)"),
    "columns": ({"weights": {NAME: packed(columns=32)}}, rf"'{NAME}', expert 2 .* has shape \(32, 32\); expected \(32, 64\)"),
    "bits": ({"weights": {NAME: packed(bits=8)}}, rf"'{NAME}', expert 2 .* is quantized to 8 bits"),
    "groups": ({"weights": {NAME: packed(size=16)}}, rf"'{NAME}', expert 2 .* in blocks of 16"),
    "in float": ({"weights": {NAME: None}, "tensors": {NAME: torch.ones(32, 64)}}, rf"'{NAME}', expert 2 .* is a tensor of float32"),
    "twice": ({"tensors": {STACK: torch.ones(4, 64, 64)}}, rf"has '{STACK}' and 'model.layers.1.mlp.experts.0"),
    "activations": ({"activations": {NAME: qsim.fp8_dynamic().activation}}, rf"'{NAME}', expert 2 .* is multiplied with"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_the_expert_is_named_and_nothing_lost(case, good):
    changes, message = BROKEN[case]
    checkpoint, sim = changed(good, **changes), good[1]
    before = {name: t.clone() for name, t in sim.state_dict().items() if isinstance(t, torch.Tensor)}
    with pytest.raises(FileFormatError, match=message):
        sim.load_compressed(checkpoint)
    with pytest.raises(FileFormatError, match=message):
        checkpoint.for_model(sim.model)
    assert all(torch.equal(t, before[name]) for name, t in sim.state_dict().items() if name in before)
    sim.load_compressed(good[0])


def test_a_layer_without_experts_is_named(good):
    names = [name for name in qsim.load_checkpoint(good[0]).weights if ".layers.0.mlp.experts." in name]
    with pytest.raises(FileFormatError, match=r"layers\.0\.mlp\.experts\.0\.\w+\.weight' is not in the checkpoint, nor is any other"):
        good[1].load_compressed(changed(good, weights=dict.fromkeys(names)))


def test_the_file_is_named_too(good, tmp_path):
    state = safetensors.load_file(good[0] / "model.safetensors")
    safetensors.save_file({name: t for name, t in state.items() if not name.startswith(f"{EXPERT}.")}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((good[0] / "config.json").read_text())
    with pytest.raises(FileFormatError) as raised:
        good[1].load_compressed(tmp_path)
    assert str(raised.value).startswith(f"qsim: '{tmp_path}': '{NAME}', expert 2 of '{STACK}', is not in the checkpoint")


def test_an_expert_more_than_the_model_has_is_told(good):
    name = "model.layers.0.mlp.experts.4.up_proj.weight"
    with pytest.raises(ValueError, match=rf"'{name}' is quantized in the checkpoint, and not in the simulation"):
        good[1].load_compressed(changed(good, weights={name: packed()}))


def test_a_file_cut_short_is_refused(good, tmp_path):
    state = safetensors.load_file(good[0] / "model.safetensors")
    del state[f"{EXPERT}.weight_scale"]
    safetensors.save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((good[0] / "config.json").read_text())
    with pytest.raises(FileFormatError, match=f"{EXPERT}.* has no weight_scale"):
        qsim.load_checkpoint(tmp_path)


def test_groups_out_of_order_are_refused(good):
    order = torch.arange(64, dtype=torch.int32).flip(0) // 32
    names = [name for name in qsim.load_checkpoint(good[0]).weights if ".layers.1.mlp.experts." in name and "down" not in name]
    weights = {name: dataclasses.replace(packed(), order=order) for name in names}
    with pytest.raises(FileFormatError, match="out of order"):
        good[1].load_compressed(changed(good, weights=weights))


def test_tiles_that_two_weights_share_are_refused(tmp_path):
    sim = simulated(mixture("qwen3", "batched_mm"), qsim.fp8_block(32))
    sim.save_compressed(tmp_path, "fp8")
    checkpoint = qsim.load_checkpoint(tmp_path)
    tall = {
        name: dataclasses.replace(weight, scale=weight.scale[:1], zero_point=weight.zero_point[:1], block_size=(64, 32))
        for name, weight in checkpoint.weights.items()
        if ".experts." in name
    }
    with pytest.raises(FileFormatError, match=r"gate_up_proj' has tiles of 64 rows, and in one lie two weights"):
        sim.load_compressed(dataclasses.replace(checkpoint, weights={**checkpoint.weights, **tall}))


def test_layers_that_the_model_ignores_are_left_out(tmp_path):
    sim = simulated(mixture("deepseek"), qsim.w4a16(group=32))
    sim.save_compressed(tmp_path)
    checkpoint = qsim.load_checkpoint(tmp_path)
    more = {f"model.layers.61.mlp.experts.{i}.up_proj.weight": packed() for i in range(4)}
    others = {"model.layers.61.eh_proj.weight": torch.ones(3, 4)}
    found = dataclasses.replace(checkpoint, weights={**checkpoint.weights, **more}, tensors={**checkpoint.tensors, **others})
    model = mixture("deepseek", seed=1)
    again = qsim.QuantSim(model, EXAMPLE, found.for_model(model).config())
    again.load_compressed(found)
    with torch.no_grad():
        assert torch.equal(again(**EXAMPLE).logits, sim(**EXAMPLE).logits)


@pytest.mark.parametrize("family", ["mixtral", "qwen3"])
def test_a_model_whose_experts_are_computed_otherwise_is_told_what_to_do(family, tmp_path):
    simulated(mixture(family, "batched_mm"), qsim.fp8_block(32)).save_compressed(tmp_path, "fp8")
    model = mixture(family)
    checkpoint = qsim.load_checkpoint(tmp_path)
    sim = qsim.QuantSim(model, EXAMPLE, checkpoint.for_model(model).config())
    with pytest.raises(ValueError, match=r"experts\.down_proj' is multiplied with .*set_experts_implementation\('batched_mm'\)"):
        sim.load_compressed(checkpoint)
    with pytest.raises(ValueError, match=r"24 overrides of single experts \('model.layers.*checkpoint\.for_model\(model\)\.config\(\)"):
        qsim.QuantSim(mixture(family, "batched_mm"), EXAMPLE, checkpoint.config())
    sim = simulated(mixture(family), qsim.w4a16(group=32).override("*.experts.*", weight=None))
    with pytest.raises(ValueError, match=r"checkpoint\.for_model\(model\)\.config\(\)"):
        sim.load_compressed(checkpoint)
