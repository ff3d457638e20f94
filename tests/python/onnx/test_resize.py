"""Interpolation in a file, against the simulation: by factors, by sizes, and by factors that give no whole size; pooling by a divisor."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from exported import computed
from models import Forward
from torch import nn

import qsim


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize(
    "options",
    [
        {"scale_factor": 1.7},
        {"scale_factor": (2.0, 1.3)},
        {"scale_factor": 0.6},
        {"scale_factor": 2.0},
        {"scale_factor": 1.7, "recompute_scale_factor": True},
        {"size": (9, 5)},
        {"scale_factor": 1.7, "align_corners": True},
    ],
    ids=str,
)
def test_is_that_of_the_simulation(mode, options, tmp_path):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 6, 6)
    model = Forward(lambda m, x: m.last(F.interpolate(m.first(x), mode=mode, **options)), first=nn.Conv2d(3, 4, 1), last=nn.Conv2d(4, 2, 1))
    sim = qsim.QuantSim(model.eval(), x, qsim.w4a16(target="openvino"))
    sim.calibrate([x], progress=False)
    sim.export(tmp_path / "model.onnx")
    np.testing.assert_allclose(computed(tmp_path / "model.onnx", x)[0], sim(x).detach().numpy(), atol=1e-4)


@pytest.mark.parametrize("target", ["openvino", "onnxruntime"])
@pytest.mark.parametrize("options", [{"padding": 1}, {"stride": 1}, {"padding": 1, "count_include_pad": False}], ids=str)
def test_average_pooling_by_a_divisor(options, target, tmp_path):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 6, 6)
    model = Forward(
        lambda m, x: m.last(F.avg_pool2d(m.first(x), 2, divisor_override=3, **options)), first=nn.Conv2d(3, 4, 1), last=nn.Conv2d(4, 2, 1)
    )
    sim = qsim.QuantSim(model.eval(), x, qsim.w4a16(target=target))
    sim.calibrate([x], progress=False)
    sim.export(tmp_path / "model.onnx")
    np.testing.assert_allclose(computed(tmp_path / "model.onnx", x)[0], sim(x).detach().numpy(), atol=1e-4)
