"""Zeros in front of a convolution become its padding; whatever else is padded stays."""

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from exported import computed
from models import Forward
from torch import nn

import qsim

X = torch.randn(40, 3, 9, 9, generator=torch.Generator().manual_seed(0))


def exported(forward, path, target="onnxruntime", **convolution) -> tuple[qsim.QuantSim, list[str]]:
    torch.manual_seed(0)
    sim = qsim.QuantSim(Forward(forward, a=nn.Conv2d(3, 4, 3), b=nn.Conv2d(4, 4, 3, **convolution)).eval(), X, qsim.int8(target=target))
    sim.calibrate([X], progress=False)
    sim.export(path)
    return sim, [node.op_type for node in onnx.load(path).graph.node]


FOLDED = {
    "at one end": (lambda m, x: m.b(F.pad(m.a(x), (0, 1, 0, 1))), {"stride": 2}),
    "beside its own": (lambda m, x: m.b(F.pad(m.a(x), (2, 0, 1, 3))), {"padding": (1, 2), "groups": 2}),
    "of the input, and twice": (lambda m, x: m.b(F.pad(m.a(F.pad(x, (1, 2))), (0, 1, 0, 1))), {"dilation": 2}),
}


@pytest.mark.parametrize("case", FOLDED)
def test_zeros_are_padding(case, tmp_path):
    forward, convolution = FOLDED[case]
    sim, types = exported(forward, tmp_path / "model.onnx", **convolution)
    assert "Pad" not in types
    assert types.count("Conv") == 2
    np.testing.assert_array_equal(computed(tmp_path / "model.onnx", X)[0], sim(X).detach().numpy())
    np.testing.assert_array_equal(computed(tmp_path / "model.onnx", X, optimised=True)[0], sim.evaluate(X, integer=True).numpy())


KEPT = {
    "ones": lambda m, x: m.b(F.pad(m.a(x), (0, 1, 0, 1), value=1.0)),
    "a reflection": lambda m, x: m.b(F.pad(m.a(x), (1, 1, 1, 1), mode="reflect")),
    "less than nothing": lambda m, x: m.b(F.pad(m.a(x), (-1, 1, 0, 0))),
    "channels": lambda m, x: m.b(F.pad(m.a(x)[:, :3], (0, 0, 0, 0, 0, 1))),
    "read by another": lambda m, x: (m.b(y := F.pad(m.a(x), (0, 1, 0, 1))), y),
    "maximum": lambda m, x: m.b(F.max_pool2d(F.pad(m.a(x), (0, 1, 0, 1)), 2)),
}


@pytest.mark.parametrize("case", KEPT)
def test_others_stay(case, tmp_path):
    sim, types = exported(KEPT[case], tmp_path / "model.onnx")
    assert types.count("Pad") == 1
    wanted = sim(X)
    wanted = wanted[0] if isinstance(wanted, tuple) else wanted
    np.testing.assert_array_equal(computed(tmp_path / "model.onnx", X)[0], wanted.detach().numpy())


def test_other_targets_keep_the_simulation(tmp_path):
    sim, _ = exported(FOLDED["at one end"][0], tmp_path / "model.onnx", "tensorrt", stride=2)
    torch.testing.assert_close(torch.from_numpy(computed(tmp_path / "model.onnx", X)[0]), sim(X).detach())
