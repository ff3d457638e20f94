"""Caches with scales from each token in files for ONNX Runtime: token by token, what the simulation generates."""

import dataclasses

import pytest
import torch
from causal import Causal, exported_tokens, generated

import qsim
from qsim.errors import ExportError

BY_CHANNEL = qsim.TensorSpec(bits=4, axis=-1, method="minmax")
ZERO_POINTS = qsim.TensorSpec(method="dynamic", axis=-1)
CONFIGS = {
    "8 and 4 bits, zero points of activations": dataclasses.replace(qsim.w8a8_dynamic(kv_cache=(8, 4)), activation=ZERO_POINTS),
    "keys by channel, values in 2 bits": qsim.w4a16(group=32, kv_cache=(BY_CHANNEL, 2)),
}


def simulated(config):
    torch.manual_seed(0)
    model = Causal()
    sim = qsim.QuantSim(model.eval(), model.call(3, 5), config)
    sim.calibrate([model.call(3, 5)], progress=False)
    return sim


@pytest.mark.parametrize("name", CONFIGS)
def test_a_file_generates_the_simulations_tokens(name, tmp_path):
    sim = simulated(CONFIGS[name])
    report, tokens = exported_tokens(sim, tmp_path / "lm.onnx")
    assert tokens == generated(sim)
    call = Causal().call(1, 9)
    with torch.no_grad(), sim.integer():
        integers = sim(*call)[0]
    torch.testing.assert_close(integers, sim(*call)[0].detach(), rtol=0, atol=1e-3)
    assert not any("nothing stands for" in note for note in report.notes)


def test_blocks_of_a_token_are_refused_by_name(tmp_path):
    sim = simulated(qsim.w4a16(group=32, kv_cache=qsim.TensorSpec(bits=4, method="dynamic", axis=-1, block_size=8)))
    with pytest.raises(ExportError, match=r"'matmul.*whole tensor or token"):
        exported_tokens(sim, tmp_path / "lm.onnx")
