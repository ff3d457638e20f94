"""Frozen BatchNorms that are none by class, as detectors' backbones have, fold as others do."""

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from models import Forward
from torch import nn

import qsim

INT8 = qsim.int8(target="onnxruntime")


class Frozen(nn.Module):
    """As `torchvision.ops.FrozenBatchNorm2d`."""

    def __init__(self, channels: int, eps: float = 1e-3) -> None:
        super().__init__()
        self.eps = eps
        for name, low, high in (("weight", 0.5, 1.5), ("bias", -1, 1), ("running_mean", -1, 1), ("running_var", 0.5, 1.5)):
            self.register_buffer(name, torch.empty(channels).uniform_(low, high))

    def numbers(self):
        return (t.reshape(1, -1, 1, 1) for t in (self.weight, self.bias, self.running_mean, self.running_var))

    def forward(self, x):
        weight, bias, mean, var = self.numbers()
        scale = weight * (var + self.eps).rsqrt()
        return x * scale + (bias - mean * scale)


class WithoutItsOwnEps(Frozen):
    """As DETR's."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, 1e-5)
        del self.eps

    def forward(self, x):
        weight, bias, mean, var = self.numbers()
        return (x - mean) * (var + 1e-5).rsqrt() * weight + bias


class Another(Frozen):
    def forward(self, x):
        return super().forward(x).clamp(-1.0, 1.0)


def network(norm: nn.Module, forward=lambda m, x: m.last(F.relu(m.bn(m.first(x))))) -> tuple[nn.Module, torch.Tensor]:
    first, last = nn.Conv2d(3, 8, 3, bias=False), nn.Conv2d(8, 4, 1)
    return Forward(forward, first=first, bn=norm, last=last).eval(), torch.randn(4, 3, 8, 8)


@pytest.mark.parametrize("frozen", [Frozen, WithoutItsOwnEps])
def test_they_fold_and_load_states_of_the_float_model(frozen, tmp_path):
    torch.manual_seed(0)
    model, x = network(frozen(8))
    sim = qsim.QuantSim(model, x, INT8)
    sim.calibrate([x], progress=False)
    assert isinstance(sim.model.bn, nn.Identity)
    with sim.in_float():
        torch.testing.assert_close(sim(x), model(x), rtol=1e-5, atol=1e-5)
    report = sim.export(tmp_path / "model.onnx", verify=[x])
    assert all(d.mismatching == 0 for d in report.verification.differences["on integers", "optimised"].values())
    other, _ = network(frozen(8))
    with pytest.warns(UserWarning, match="without ranges"):
        sim.load_state_dict(other.state_dict())
    with sim.in_float():
        torch.testing.assert_close(sim(x), other(x), rtol=1e-5, atol=1e-5)
    assert isinstance(model.bn, frozen)


def test_of_a_float_model_they_fold_in_place():
    torch.manual_seed(0)
    model, x = network(Frozen(8))
    expected = model(x)
    assert qsim.fold_batch_norms(model, x).folded == {"bn": "first"}
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)


def test_where_none_takes_them_over_they_stay_frozen():
    torch.manual_seed(0)
    model, x = network(Frozen(8), lambda m, x: m.last(m.bn(F.relu(m.first(x))) + 1.0))
    sim = qsim.QuantSim(copy.deepcopy(model), x, qsim.int8())
    sim.calibrate([x], progress=False)
    sim.train()
    mean = sim.model.bn.running_mean.clone()
    sim(x + 3.0)
    assert not sim.model.bn.training
    assert torch.equal(sim.model.bn.running_mean, mean)
    assert torch.equal(sim.model.bn.weight, model.bn.weight)


STAYING = {
    "others": (lambda: Another(8), INT8),
    "those that are to": (lambda: Frozen(8), dataclasses.replace(INT8, batch_norm="keep")),
}


@pytest.mark.parametrize("name", STAYING)
def test_others_stay(name):
    build, config = STAYING[name]
    model, x = network(build())
    assert type(qsim.QuantSim(model, x, config).model.bn).__name__ == type(model.bn).__name__
