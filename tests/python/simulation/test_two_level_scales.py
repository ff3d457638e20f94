"""Weights whose scales are integers beside floats: simulated, stored, written for others and read again."""

import json

import numpy as np
import pytest
import torch
from torch import nn

import qsim

NAMES = ["lpbq", "q4_k", "q6_k"]


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(512, 16), nn.ReLU(), nn.Linear(16, 256), nn.Linear(256, 8)).eval()


X = torch.randn(4, 512, generator=torch.Generator().manual_seed(1))


def simulated(name, method="minmax"):
    config = qsim.Config(qsim.TensorSpec(dtype=name, method=method), None).override("2", weight=None)
    sim = qsim.QuantSim(model(), X, config)
    sim.calibrate([X], progress=False)
    return sim


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_rounded_as_by_hand(name):
    sim, spec = simulated(name), qsim.TensorSpec(dtype=name)
    baked, weight = sim.bake(), model()[0].weight.detach()
    blocks = weight.reshape(16, -1, spec.block_size).double()
    below, above = 2 ** (spec.bits - 1), 2 ** (spec.bits - 1) - 1
    s = torch.maximum(blocks.amax(2) / above, -blocks.amin(2) / below).float()
    size = 512 if spec.super_block is None else spec.super_block
    step = s.reshape(16, 512 // size, -1).amax(2, keepdim=True).double() / spec.scale_levels
    k = (s.reshape(16, 512 // size, -1) / step).round().clamp(1, spec.scale_levels)
    scale = (k * step).reshape(16, -1, 1)
    expected = (blocks / scale).round().clamp(-below, above) * scale
    assert torch.allclose(baked[0].weight.reshape(blocks.shape).double(), expected, rtol=1e-6, atol=0)
    state = sim.integer_state_dict()
    assert torch.equal(state["0.weight_scale_integers"], k.reshape(16, -1).int())
    product = state["0.weight_super_scale"].repeat_interleave(size // spec.block_size, 1) * state["0.weight_scale_integers"]
    assert torch.equal(product, state["0.weight_scale"])
    assert torch.equal(baked(X), sim(X))
    assert f"scales of 1 to {spec.scale_levels} beside a float" in str(sim.summary())


def test_states_go_where_they_fit():
    sim, free = simulated("q4_k"), qsim.TensorSpec(bits=4, symmetric=True, signed=True, axis=1, block_size=32, method="minmax")
    again = qsim.QuantSim(model(), X, sim.config)
    again.load_state_dict(sim.state_dict())
    assert torch.equal(again(X), sim(X))
    other = qsim.QuantSim(model(), X, qsim.Config(free, None).override("2", weight=None))
    other.calibrate([X], progress=False)
    with pytest.raises(RuntimeError, match=r"the state is of another spec.*not one float times integers from 1 to 63"):
        again.load_state_dict(other.state_dict())
    scale = other.encodings()["0.weight"].scale
    encoding = qsim.Encoding(scale, torch.zeros_like(scale, dtype=torch.int32), -8, 7, 1, 32, "int4", 63, 256)
    with pytest.raises(ValueError, match="no integers beside floats"):
        again.quantizers()["0.weight"].set_encoding(encoding)


def test_solving_for_weights_keeps_the_scales():
    sim = simulated("q4_k", "mse")
    before = sim.encodings()["0.weight"]
    sim.restore([torch.randn(64, 512) for _ in range(2)], progress=False)
    assert sim.encodings()["0.weight"] == before


@pytest.mark.parametrize("format", ["aimet-1.0.0", "aimet-2.0.0", "qsim"])
def test_lpbq_in_files_of_encodings(format, tmp_path):
    sim = simulated("lpbq")
    sim.save_encodings(tmp_path / "file", format)
    again = qsim.QuantSim(model(), X, sim.config)
    again.load_encodings(tmp_path / "file")
    assert torch.equal(again(X), sim(X))
    document = json.loads((tmp_path / "file").read_text())
    integers, state = None, sim.integer_state_dict()
    if format == "aimet-1.0.0":
        (entry,) = (entry for entry in document["param_encodings"] if entry["name"] == "0.weight")
        told = {name: entry[name] for name in ("enc_type", "bw", "compressed_bw", "block_size", "is_sym", "dtype")}
        assert told == {"enc_type": "LPBQ", "bw": 8, "compressed_bw": 4, "block_size": 64, "is_sym": True, "dtype": "INT"}
        assert set(entry["offset"]) == {-128}
        assert entry["scale"] == state["0.weight_super_scale"].flatten().tolist()
        integers = entry["per_block_int_scale"]
    elif format == "aimet-2.0.0":
        (entry,) = (entry for entry in document["encodings"] if entry["name"] == "0.weight")
        assert entry["per_channel_float_scale"] == state["0.weight_super_scale"].tolist()
        integers = np.ravel(entry["per_block_int_scale"]).tolist()
    assert integers in (None, state["0.weight_scale_integers"].flatten().tolist())


def test_other_levels_are_written_as_blocks(tmp_path):
    sim = simulated("q4_k")
    sim.save_encodings(tmp_path / "file", "aimet-1.0.0")
    entries = json.loads((tmp_path / "file").read_text())["param_encodings"]
    assert {entry["enc_type"] for entry in entries} == {"PER_BLOCK"}


def test_folders_hold_their_products(tmp_path):
    pytest.importorskip("safetensors")
    sim = qsim.QuantSim(model(), X, qsim.Config(qsim.TensorSpec(dtype="lpbq", block_size=16), None))
    sim.calibrate([X], progress=False)
    sim.save_compressed(tmp_path)
    checkpoint = qsim.load_checkpoint(tmp_path)
    assert not any("scale" in name for name in checkpoint.tensors)
    assert torch.equal(checkpoint.weights["0.weight"].dequantize(), sim.bake()[0].weight)
