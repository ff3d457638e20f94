"""The table of ONNX Runtime's integer kernels, against ONNX Runtime."""

from dataclasses import replace

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qsim
from qsim.config.profile import ONNXRUNTIME
from qsim.onnx.sessions import session
from qsim.operations.onnxruntime import INTEGER_KERNELS

EVERYWHERE = qsim.int8(target=replace(ONNXRUNTIME, kernels=()))  # grids also where only operations in float read a result


class Between(nn.Module):
    """One operation, and what makes its result an activation inside of a network."""

    def __init__(self, compute):
        super().__init__()
        self.compute = compute
        self.weight = nn.Parameter(torch.linspace(-1, 1, 64).reshape(8, 8))
        self.register_buffer("mask", torch.arange(8) > 3)

    def forward(self, x):
        return torch.tanh(self.compute(self, torch.tanh(x)))


IMAGE, ROWS = (2, 8, 6, 6), (4, 8)
OPERATIONS = {
    "Conv": (IMAGE, lambda s, x: F.conv2d(x, s.weight[..., None, None])),
    "Gemm": (ROWS, lambda s, x: F.linear(x, s.weight)),
    "MatMul": (ROWS, lambda s, x: torch.matmul(x, torch.sin(x).mT)),
    "Add": (ROWS, lambda s, x: x + torch.sin(x)),
    "Mul": (ROWS, lambda s, x: x * torch.sin(x)),
    "Concat": (ROWS, lambda s, x: torch.cat([x, torch.sin(x)], -1)),
    "AveragePool": (IMAGE, lambda s, x: F.avg_pool2d(x, 2)),
    "GlobalAveragePool": (IMAGE, lambda s, x: F.adaptive_avg_pool2d(x, 1)),
    "Sigmoid": (ROWS, lambda s, x: torch.sigmoid(x)),
    "LeakyRelu": (ROWS, lambda s, x: F.leaky_relu(x, 0.1)),
    "Softmax": (ROWS, lambda s, x: F.softmax(x, -1)),
    "Where": (ROWS, lambda s, x: torch.where(s.mask, x := x.sigmoid(), x.flip(-1)).sigmoid()),
}


@pytest.mark.parametrize("type", INTEGER_KERNELS)
def test_the_optimiser_puts_each_kernel_of_the_table(type, tmp_path):
    shape, compute = OPERATIONS[type]
    torch.manual_seed(0)
    x = torch.randn(shape)
    sim = qsim.QuantSim(Between(compute).eval(), x, EVERYWHERE)
    sim.calibrate([x])
    report = sim.export(tmp_path / "model.onnx", "onnxruntime")
    session(tmp_path / "model.onnx", optimised=True, save=tmp_path / "optimised.onnx")
    kernel = INTEGER_KERNELS[type].name
    assert kernel in [node.op_type for node in onnx.load(tmp_path / "optimised.onnx").graph.node]
    assert kernel in [row.kernel for row in sim.kernels()]
    assert not any(type.lower() in name.lower() for name in report.lint), report.lint


MOVED = {
    "mT": lambda x: x.mT,
    "adjoint": lambda x: x.adjoint(),
    "swapdims": lambda x: x.swapdims(0, 1),
    "moveaxis": lambda x: torch.moveaxis(x, 0, 1),
    "T": lambda x: x.T,
    "rot90": lambda x: torch.rot90(x),
    "hsplit": lambda x: torch.hsplit(x, 2)[1],
    "tensor_split": lambda x: torch.tensor_split(x, 2, 1)[0],
    "broadcast_to": lambda x: x[:1].broadcast_to(8, 8),
    "reshape_as": lambda x: x.reshape_as(x.mT),
    "positive": lambda x: x.positive(),
}


@pytest.mark.parametrize("name", MOVED)
def test_what_moves_values_stands_between_integer_kernels(name, tmp_path):
    """Written as any of its names: the product behind it is computed on integers, by ONNX Runtime and `sim.integer()` alike."""
    torch.manual_seed(0)
    x = torch.randn(8, 8)
    model = Between(lambda s, x: torch.matmul(MOVED[name](x), s.weight[: MOVED[name](x).shape[-1]])).eval()
    sim = qsim.QuantSim(model, x, EVERYWHERE)
    sim.calibrate([x])
    report = sim.export(tmp_path / "model.onnx", "onnxruntime", verify=[torch.randn(8, 8)])
    assert "QLinearMatMul" in [row.kernel for row in sim.kernels()]
    assert not report.lint
    assert not report.verification.in_float
