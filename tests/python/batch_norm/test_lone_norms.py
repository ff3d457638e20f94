"""BatchNorms that fold into no layer, as layers of their own: what they compute, in ONNX Runtime too, and what leaves them as they are."""

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from integer_networks import by_runtime, differing
from models import Forward, trained
from onnx_graphs import kernels
from torch import nn

import qsim

INT8 = qsim.int8(target="onnxruntime")


class Norm(nn.BatchNorm2d):
    """Normalizes and then calls its children, as timm's do."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.act = nn.ReLU()

    def forward(self, x):
        return self.act(super().forward(x))


def joined(m, x):
    return m.last(F.relu(m.bn(torch.cat([m.first(x), x], 1))))


def read_twice(m, x):
    y = m.first(x)
    return m.last(torch.cat([m.bn(y), y], 1))


MODELS = {
    "behind a concatenation": (joined, {"bn": nn.BatchNorm2d(8)}, (4, 6, 6)),
    "beside another reader": (read_twice, {"bn": nn.BatchNorm2d(4)}, (4, 6, 6)),
    "with children": (joined, {"bn": Norm(8)}, (4, 6, 6)),
    "without affine parameters": (joined, {"bn": nn.BatchNorm2d(8, affine=False)}, (4, 6, 6)),
    "of sequences": (joined, {"bn": nn.BatchNorm1d(8), "first": nn.Conv1d(4, 4, 3, padding=1), "last": nn.Conv1d(8, 3, 1)}, (4, 12)),
}


def network(name: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    forward, parts, shape = MODELS[name]
    layers = {"first": nn.Conv2d(4, 4, 3, padding=1), "last": nn.Conv2d(8, 3, 1), **copy.deepcopy(parts)}
    return trained(Forward(forward, **layers)), torch.randn(16, *shape)


def simulated(model: nn.Module, x: torch.Tensor, config: qsim.Config = INT8) -> qsim.QuantSim:
    sim = qsim.QuantSim(model, x[:2], config)
    sim.calibrate([x], progress=False)
    return sim


@pytest.mark.parametrize("name", MODELS)
def test_they_run_on_integers_and_compute_the_same(name, tmp_path):
    model, x = network(name)
    sim = simulated(model, x)
    assert not [note for note in sim.notes if "BatchNorm" in note]
    with sim.in_float():
        torch.testing.assert_close(sim(x), model(x), rtol=1e-5, atol=1e-5)
    grid = sim.encodings()["bn.norm.weight"]
    integers = qsim.ops.quantize(sim.model.bn.norm.weight.detach(), grid.scale, grid.zero_point, grid.quant_min, grid.quant_max, axis=0)
    assert set(integers.unique().tolist()) <= {-128, 127}
    optimised, ran = by_runtime(sim, x, tmp_path)
    assert differing(sim.evaluate(x, integer=True), optimised)[0] == 0
    assert kernels(ran)["QLinearConv"] == 3
    assert "BatchNormalization" not in kernels(ran)
    plain, _ = by_runtime(sim, x, tmp_path, optimize=False)
    assert differing(sim.evaluate(x), plain)[0] == 0


@pytest.mark.parametrize("name", ["with children", "without affine parameters"])
def test_states_of_the_float_model_are_loaded(name):
    model, x = network(name)
    sim = simulated(model, x)
    other = trained(copy.deepcopy(model))
    with pytest.warns(UserWarning, match="without ranges"):
        sim.load_state_dict(other.state_dict())
    with sim.in_float():
        torch.testing.assert_close(sim(x), other(x), rtol=1e-5, atol=1e-5)
    again = qsim.QuantSim(model, x[:2], INT8)
    again.load_state_dict(sim.state_dict())
    assert torch.equal(again(x), sim(x))
    assert torch.equal(copy.deepcopy(sim)(x), sim(x))


def test_they_train():
    model, x = network("behind a concatenation")
    sim = simulated(model, x)
    sim.train()
    sim(x).square().sum().backward()
    layer = sim.model.bn.norm
    assert layer.weight.grad.abs().sum() > 0
    assert layer.bias.grad.abs().sum() > 0


def test_retargeted_it_is_as_if_made_for_the_target():
    model, x = network("behind a concatenation")
    got, wanted = simulated(model, x, qsim.int8()).retarget("onnxruntime"), simulated(model, x)
    assert got.encodings() == wanted.encodings()
    assert torch.equal(got(x), wanted(x))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(4)

    def forward(self, x):
        return self.bn(F.relu(self.bn(x)))


STAYING = {
    "asked for": (lambda: network("behind a concatenation"), dataclasses.replace(INT8, batch_norm="keep")),
    "another target": (lambda: network("behind a concatenation"), qsim.int8(target="openvino")),
    "weights of 4 bits": (lambda: network("behind a concatenation"), qsim.w4a8(target="onnxruntime")),
    "weights alone": (lambda: network("behind a concatenation"), dataclasses.replace(INT8, activation=None)),
    "float formats": (lambda: network("behind a concatenation"), qsim.fp16(target="onnxruntime")),
    "called twice": (lambda: (trained(Twice()), torch.randn(16, 4, 6, 6)), INT8),
    "of volumes": (lambda: (trained(nn.Sequential(nn.BatchNorm3d(4), nn.ReLU())), torch.randn(8, 4, 3, 3, 3)), INT8),
    "of vectors": (lambda: (trained(nn.Sequential(nn.BatchNorm1d(4), nn.ReLU())), torch.randn(8, 4)), INT8),
}


@pytest.mark.parametrize("name", STAYING)
def test_others_stay(name):
    build, config = STAYING[name]
    model, x = build()
    sim = qsim.QuantSim(model, x, config)
    assert any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in sim.model.modules())


def test_the_report_says_so():
    model, x = network("behind a concatenation")
    assert qsim.fold_batch_norms(copy.deepcopy(model), x).kept  # of a float model they stay
    from qsim.batch_norm.fold import fold_recorded
    from qsim.batch_norm.recorded import recorded

    report = fold_recorded(model, *recorded(model, x, "here"), alone=["bn"])
    assert report.kept == {}
    assert list(report.alone) == ["bn"]
    assert str(report).startswith(
        "BatchNorm: 0 folded, 1 made layers of their own, 0 kept\n  made 'bn' a layer of its own: 'bn' reads 'cat'"
    )
    assert report.figures().scalars["batch_norm/alone"] == 1
    assert "a layer of its own" in report.page().body
