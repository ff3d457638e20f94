"""Channels of zeros fill the blocks that ONNX Runtime's kernels take, where nobody sees them, and change no integer."""

import dataclasses

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from exported import computed
from models import Forward
from torch import nn

import qsim

IMAGES = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def exported(forward, path, **modules) -> tuple[qsim.QuantSim, qsim.ExportReport, dict[str, tuple[int, ...]]]:
    """And the shapes of the constants in the file."""
    torch.manual_seed(0)
    sim = qsim.QuantSim(Forward(forward, **modules).eval(), IMAGES, qsim.int8(target="onnxruntime"))
    sim.calibrate([IMAGES], progress=False)
    report = sim.export(path)
    return sim, report, {held.name: tuple(held.dims) for held in onnx.load(path).graph.initializer}


def same(sim, path) -> None:
    """Both graphs of ONNX Runtime compute the simulation's integers."""
    wanted = sim(IMAGES), sim.evaluate(IMAGES, integer=True)
    for optimised, references in enumerate(wanted):
        references = references if isinstance(references, tuple) else (references,)
        for got, reference in zip(computed(path, IMAGES, optimised=bool(optimised)), references, strict=True):
            np.testing.assert_array_equal(got, reference.detach().numpy())


def inverted(m, x):
    x = F.relu(m.stem(x))
    return m.last(x + m.narrow(F.hardswish(m.depth(F.relu(m.wide(x))))))


@pytest.mark.parametrize("options", [{"padding": 1}, {"padding": 1, "bias": False}, {"padding": 2, "dilation": 2}])
def test_depthwise_convolutions_get_sixteen(options, tmp_path):
    modules = {
        "stem": nn.Conv2d(3, 16, 3, padding=1),
        "wide": nn.Conv2d(16, 72, 1),
        "depth": nn.Conv2d(72, 72, 3, groups=72, **options),
        "narrow": nn.Conv2d(72, 16, 1),
        "last": nn.Conv2d(16, 5, 1),
    }
    sim, report, shapes = exported(inverted, tmp_path / "model.onnx", **modules)
    assert shapes["wide.weight_quantized"] == (80, 16, 1, 1)
    assert shapes["depth.weight_quantized"] == (80, 1, 3, 3)
    assert shapes["depth.weight_scale"] == (80,)
    assert shapes["narrow.weight_quantized"] == (16, 80, 1, 1)
    assert shapes["last.weight_quantized"] == (5, 16, 1, 1)  # the caller sees the five
    assert any("more channels than" in note for note in report.notes)
    same(sim, tmp_path / "model.onnx")


def test_images_and_odd_channels_get_four(tmp_path):
    modules = {"a": nn.Conv2d(3, 18, 3), "b": nn.Conv2d(18, 16, 3)}
    sim, _, shapes = exported(lambda m, x: m.b(F.relu(m.a(x))), tmp_path / "model.onnx", **modules)
    assert shapes["a.weight_quantized"] == (20, 4, 3, 3)
    assert shapes["b.weight_quantized"] == (16, 20, 3, 3)
    assert sum(node.op_type == "Pad" for node in onnx.load(tmp_path / "model.onnx").graph.node) == 1
    same(sim, tmp_path / "model.onnx")


def test_gates_and_joined_halves_are_filled(tmp_path):
    """A ghost module: half of the channels is computed, the other half from these, and a gate multiplies them all."""

    def forward(m, x):
        half = F.relu(m.a(F.relu(m.stem(x))))
        x = torch.cat([half, F.relu(m.cheap(half))], 1)[:, :40]  # the whole
        return m.b(x * torch.sigmoid(m.gate(x.mean((2, 3), keepdim=True))))

    modules = {"stem": nn.Conv2d(3, 16, 3), "a": nn.Conv2d(16, 20, 3, padding=1), "cheap": nn.Conv2d(20, 20, 3, padding=1, groups=20)}
    more = {"gate": nn.Conv2d(40, 40, 1), "b": nn.Conv2d(40, 16, 3)}
    sim, _, shapes = exported(forward, tmp_path / "model.onnx", **modules, **more)
    assert shapes["a.weight_quantized"] == (32, 16, 3, 3)
    assert shapes["cheap.weight_quantized"] == (32, 1, 3, 3)
    assert shapes["gate.weight_quantized"] == (64, 64, 1, 1)  # of 64, 20 to 31 and 52 to 63 are zero
    assert shapes["b.weight_quantized"] == (16, 64, 3, 3)
    same(sim, tmp_path / "model.onnx")


def test_constants_with_a_number_for_each_channel_are_filled(tmp_path):
    """A branch that is a BatchNorm alone, which is to stay, and a scale for each channel."""

    def forward(m, x):
        x = F.relu(m.a(x))
        return m.b(F.relu(m.depth(x) + m.norm(x)) * m.layer_scale)

    class Scaled(Forward):
        def __init__(self, forward, **modules):
            super().__init__(forward, **modules)
            self.layer_scale = nn.Parameter(torch.rand(20, 1, 1))

    norm = nn.BatchNorm2d(20)
    with torch.no_grad():
        for held in (norm.running_mean, norm.running_var, norm.weight, norm.bias):
            held.uniform_(0.5, 1.5)
    modules = {"a": nn.Conv2d(3, 20, 3), "depth": nn.Conv2d(20, 20, 3, padding=1, groups=20), "b": nn.Conv2d(20, 16, 3)}
    torch.manual_seed(0)
    config = dataclasses.replace(qsim.int8(target="onnxruntime"), batch_norm="keep")
    sim = qsim.QuantSim(Scaled(forward, norm=norm, **modules).eval(), IMAGES, config)
    sim.calibrate([IMAGES], progress=False)
    path = tmp_path / "model.onnx"
    sim.export(path)
    shapes = {held.name: tuple(held.dims) for held in onnx.load(path).graph.initializer}
    assert shapes["depth.weight_quantized"] == (32, 1, 3, 3)
    assert shapes["norm.running_var"] == (32,)
    assert shapes["layer_scale_quantized"] == (32, 1, 1)
    same(sim, path)


@pytest.mark.parametrize("filters", [40, 60])
def test_channels_with_several_filters_are_repeated(filters, tmp_path):
    modules = {"a": nn.Conv2d(3, 20, 3), "b": nn.Conv2d(20, filters, 5, groups=20)}
    sim, _, shapes = exported(lambda m, x: m.b(F.relu(m.a(x))), tmp_path / "model.onnx", **modules)
    whole = filters + -filters % 16
    assert shapes["b.weight_quantized"] == (whole, 1, 5, 5)
    (conv,) = [node for node in onnx.load(tmp_path / "model.onnx").graph.node if node.name == "b.Conv"]
    assert next(attribute.i for attribute in conv.attribute if attribute.name == "group") == whole
    same(sim, tmp_path / "model.onnx")


def test_large_depthwise_filters_get_sixteen_between_a_pad_and_a_slice(tmp_path):
    def forward(m, x):
        x = F.relu(m.a(x))
        return x.sum(1).sigmoid(), F.relu(m.depth(x)), m.again(x)

    big = {"depth": nn.Conv2d(20, 20, 5, padding=2, groups=20), "again": nn.Conv2d(20, 20, 7, groups=20, bias=False)}
    sim, report, shapes = exported(forward, tmp_path / "model.onnx", a=nn.Conv2d(3, 20, 3), **big)
    assert shapes["a.weight_quantized"] == (20, 4, 3, 3)
    assert shapes["depth.weight_quantized"] == (32, 1, 5, 5)
    assert shapes["again.weight_quantized"] == (32, 1, 7, 7)
    types = [node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node]
    assert (types.count("Pad"), types.count("Slice")) == (2, 2)  # one Pad is the image's
    assert not report.lint
    same(sim, tmp_path / "model.onnx")


SEEN = {
    "by the caller": lambda m, x: (m.b(y := F.relu(m.a(x))), y),
    "by a sum over channels": lambda m, x: (m.b(y := F.relu(m.a(x))), y.sum(1).sigmoid()),
    "by a normalization": lambda m, x: m.b(F.layer_norm(m.a(x), (18, 14, 14))),
    "in part": lambda m, x: (m.b(y := F.relu(m.a(x))), m.c(y[:, 1:])),
    "by a reshape": lambda m, x: m.b(F.pixel_shuffle(F.pixel_unshuffle(m.a(x), 2), 2)),
    "by convolutions of groups": lambda m, x: (m.b(y := F.relu(m.a(x))), m.d(y)),
    "joined to what is seen": lambda m, x: (m.b(y := F.relu(m.a(x))), torch.cat([y, y], 1)),
}


@pytest.mark.parametrize("case", SEEN)
def test_channels_that_somebody_sees_stay(case, tmp_path):
    modules = {"a": nn.Conv2d(3, 18, 3), "b": nn.Conv2d(18, 16, 3)}
    modules |= {"c": nn.Conv2d(17, 16, 3)} if case == "in part" else {"d": nn.Conv2d(18, 18, 3, groups=2)} if "groups" in case else {}
    sim, _, shapes = exported(SEEN[case], tmp_path / "model.onnx", **modules)
    assert shapes["a.weight_quantized"] == (18, 4, 3, 3)
    assert shapes["b.weight_quantized"] == (16, 18, 3, 3)
    if case != "by a normalization":  # computed in float
        same(sim, tmp_path / "model.onnx")


def test_one_channel_that_multiplies_all_stays_one(tmp_path):
    def forward(m, x):
        x = F.relu(m.a(x))
        return m.b(x * F.hardsigmoid(m.where(x)))

    modules = {"a": nn.Conv2d(3, 18, 3), "where": nn.Conv2d(18, 1, 7, padding=3), "b": nn.Conv2d(18, 16, 3)}
    sim, _, shapes = exported(forward, tmp_path / "model.onnx", **modules)
    assert shapes["a.weight_quantized"] == (20, 4, 3, 3)
    assert shapes["where.weight_quantized"] == (1, 20, 7, 7)
    same(sim, tmp_path / "model.onnx")


def test_small_layers_and_other_runtimes_stay(tmp_path):
    small = {"a": nn.Conv2d(3, 6, 1), "b": nn.Conv2d(6, 16, 1)}
    _, report, shapes = exported(lambda m, x: m.b(m.a(x)), tmp_path / "model.onnx", **small)
    assert shapes["a.weight_quantized"] == (6, 3, 1, 1)
    assert not any("more channels than" in note for note in report.notes)
    torch.manual_seed(0)
    other = qsim.QuantSim(nn.Sequential(nn.Conv2d(3, 18, 3), nn.Conv2d(18, 16, 3)), IMAGES, qsim.int8(target="openvino"))
    other.calibrate([IMAGES], progress=False)
    other.export(tmp_path / "other.onnx")
    assert (18, 3, 3, 3) in {tuple(held.dims) for held in onnx.load(tmp_path / "other.onnx").graph.initializer}
