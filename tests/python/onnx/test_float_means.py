"""Means of nearly nothing: ONNX Runtime's integer kernel throws when it runs them, so a file has them in float, as the simulation."""

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from exported import computed
from models import Forward
from torch import nn

import qsim

MEANS = {
    "mean": lambda y: y.mean((2, 3), keepdim=True),
    "without axes": lambda y: y.mean((2, 3))[..., None, None],
    "rectified": lambda y: y.mean((2, 3), keepdim=True).relu(),
    "adaptive": lambda y: F.adaptive_avg_pool2d(y, 1),
    "window": lambda y: F.avg_pool2d(y, 6),
}


def simulated(mean, norm: nn.Module) -> tuple[qsim.QuantSim, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 8, 8)
    model = Forward(lambda m, x: m.last(mean(m.norm(m.conv(x)))), conv=nn.Conv2d(3, 8, 3), norm=norm, last=nn.Conv2d(8, 4, 1))
    sim = qsim.QuantSim(model.eval(), x, qsim.int8(target="onnxruntime"))
    sim.calibrate([x], progress=False)
    return sim, x


@pytest.mark.parametrize("name", MEANS)
@pytest.mark.parametrize("nearly_zero", [True, False])
def test_runs_and_has_the_integers_of_the_simulation(name, nearly_zero, tmp_path):
    sim, x = simulated(MEANS[name], nn.InstanceNorm2d(8) if nearly_zero else nn.Tanh())
    sim.export(tmp_path / "model.onnx")
    (found,) = computed(tmp_path / "model.onnx", x, optimised=True)
    assert np.array_equal(found, sim.evaluate(x, integer=True).numpy())
    reasons = [kernel.reason for kernel in sim.kernels() if kernel.op in ("GlobalAveragePool", "AveragePool", "ReduceMean")]
    assert len(reasons) == 1
    assert ("nearly zero" in reasons[0]) == nearly_zero
    types = {node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node}
    assert ("ReduceMean" in types) == nearly_zero


def test_means_over_sizes_that_are_open(tmp_path):
    sim, x = simulated(MEANS["mean"], nn.InstanceNorm2d(8))
    sizes = {0: torch.export.Dim("batch"), 2: torch.export.Dim("height", min=8), 3: torch.export.Dim("width", min=8)}
    sim.export(tmp_path / "model.onnx", dynamic_shapes={"args": (sizes,)})
    for given in (x, torch.randn(2, 3, 11, 9)):
        (found,) = computed(tmp_path / "model.onnx", given, optimised=True)
        assert found.shape == (len(given), 4, 1, 1)
