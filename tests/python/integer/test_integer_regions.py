"""Which operations have integer kernels, and what is said of the others; ONNX Runtime's optimised graph is the judge in both."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from integer_networks import by_runtime
from models import Forward, seeded
from onnx_graphs import kernels
from torch import nn

import qsim
from qsim.integer.programs import PROGRAMS

CONFIG = qsim.int8(target="onnxruntime")
_KERNELS = ("QLinear", "QGemm", "MatMulIntegerToFloat")


def conv(**options):
    return nn.Conv2d(4, 4, 3, padding=1, **options)


def classified(model, x, config=CONFIG, change=lambda sim: None, folder=None):
    """The kernels of a model, by the names of their operations; compared with ONNX Runtime's graph."""
    sim = qsim.QuantSim(seeded(lambda: model), x, config)
    sim.calibrate([torch.randn(8, *x.shape[1:])], progress=False)
    change(sim)
    with torch.no_grad():
        sim.evaluate(x, integer=True)
    (evaluation,) = sim.derived[PROGRAMS].values()
    found = evaluation.prepared.kernels
    if folder is not None:
        _, ran = by_runtime(sim, x, folder)
        in_graph = Counter({op: count for op, count in kernels(ran).items() if op.startswith(_KERNELS)})
        assert Counter(kernel.kernel for kernel in found if kernel.kernel) == in_graph
    return {kernel.name: kernel for kernel in found}


IMAGE, ROWS = torch.randn(2, 4, 8, 8), torch.randn(2, 6)

RUN_ON_INTEGERS = {
    "rectifier": (Forward(lambda m, x: F.relu(m.conv(x)), conv=conv()), "conv", "QLinearConv"),
    "clip": (Forward(lambda m, x: F.hardtanh(m.conv(x), 0.0, 0.5), conv=conv()), "conv", "QLinearConv"),
    "relu6": (Forward(lambda m, x: F.relu6(m.conv(x)), conv=conv()), "conv", "QLinearConv"),
    "sum with rectifier": (Forward(lambda m, x: F.relu(m.conv(x) + x), conv=conv()), "add", "QLinearAdd"),
    "sum with itself": (Forward(lambda m, x: m.conv(x).add_(0.0) if False else x + x), "add", "QLinearAdd"),
    "product": (Forward(lambda m, x: x * m.conv(x), conv=conv()), "mul", "QLinearMul"),
    "concatenation": (
        Forward(lambda m, x: F.avg_pool2d(torch.cat([x, m.conv(x)], 1), 2), conv=conv()),
        "cat",
        "QLinearConcat",
    ),
    "average": (Forward(lambda m, x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True)), "avg_pool2d", "QLinearAveragePool"),
    "windows of one size": (Forward(lambda m, x: F.adaptive_avg_pool2d(x, 4)), "adaptive_avg_pool2d", "QLinearAveragePool"),
    "one window": (Forward(lambda m, x: F.adaptive_avg_pool2d(x, 1)), "adaptive_avg_pool2d", "QLinearGlobalAveragePool"),
    "mean": (Forward(lambda m, x: x.mean((-1, 2))), "mean", "QLinearGlobalAveragePool"),
    "sigmoid": (Forward(lambda m, x: torch.sigmoid(x)), "sigmoid", "QLinearSigmoid"),
    "leaky": (Forward(lambda m, x: F.leaky_relu(x)), "leaky_relu", "QLinearLeakyRelu"),
    "softmax": (Forward(lambda m, x: torch.softmax(x, 1)), "softmax", "QLinearSoftmax"),
    "matrices": (Forward(lambda m, x: x @ x.transpose(2, 3)), "matmul", "QLinearMatMul"),
    "linear on images": (Forward(lambda m, x: m.fc(x), fc=nn.Linear(8, 5)), "fc", "QGemm"),
    "linear without bias": (Forward(lambda m, x: F.relu(m.fc(x.flatten(1))), fc=nn.Linear(256, 5, bias=False)), "fc", "QGemm"),
}


@pytest.mark.parametrize("case", RUN_ON_INTEGERS)
def test_kernels(case, tmp_path):
    model, name, kernel = RUN_ON_INTEGERS[case]
    found = classified(model, IMAGE, folder=tmp_path)
    assert found[name].kernel == kernel
    assert found[name].reason == ""
    assert all(other.kernel for other in found.values())


def off(*patterns):
    return lambda sim: sim.disable(*patterns)


RUN_IN_FLOAT = {
    "result read twice": (
        Forward(lambda m, x: [F.relu(y := m.conv(x)), y.abs()], conv=conv()),
        lambda sim: sim.disable("conv.output") if "conv.output" in sim.quantizers() else None,
        "conv",
        "'conv' runs in float: its result is read by",
    ),
    "no quantizer behind": (
        Forward(lambda m, x: m.conv(x), conv=conv()),
        off("conv.output"),
        "conv",
        "'conv' runs in float: its result is read by the caller of the model, not quantized",
    ),
    "no quantizer before": (
        Forward(lambda m, x: m.conv(x), conv=conv()),
        off("input"),
        "conv",
        "'conv' runs in float: its input is not quantized",
    ),
    "no kernel": (
        Forward(lambda m, x: m.up(x), up=nn.ConvTranspose2d(4, 4, 2, 2)),
        off(),
        "up",
        "'up' runs in float: ONNX Runtime has no integer kernel for ConvTranspose",
    ),
    "factor": (Forward(lambda m, x: x * 3.5), off("input"), "mul", "'mul' runs in float: its first operand is not quantized"),
    "alpha": (
        Forward(lambda m, x: torch.add(x, m.conv(x), alpha=2), conv=conv()),
        off(),
        "add",
        "'add' runs in float: its second operand is multiplied with 2",
    ),
    "mean over channels": (
        Forward(lambda m, x: x.mean(1)),
        off(),
        "mean",
        "'mean' runs in float: ONNX Runtime has an integer kernel for means over all axes behind the second alone",
    ),
}


@pytest.mark.parametrize("layer", ["conv", "transposed", "linear", "rows"])
def test_weights_in_float_become_integers_in_the_runtime(layer, tmp_path):
    layers = {"conv": conv(), "transposed": nn.ConvTranspose2d(4, 4, 2), "linear": nn.Linear(8, 5), "rows": nn.Linear(256, 25)}
    forwards = {
        "transposed": lambda m, x: m.layer(F.avg_pool2d(x, 1)).sigmoid(),  # between integer kernels: else it has no quantizers
        "rows": lambda m, x: m.layer(x.flatten(1)),
    }
    model = Forward(forwards.get(layer, lambda m, x: m.layer(x)), layer=layers[layer])
    sim = qsim.QuantSim(seeded(lambda: model), IMAGE, CONFIG)
    sim.calibrate([IMAGE], progress=False)
    sim.disable("layer.weight")
    x = torch.randn(400, 4, 8, 8, generator=torch.Generator().manual_seed(5))
    (expected,), _ = by_runtime(sim, x, tmp_path)
    assert expected.size >= 10_000
    different = (sim.evaluate(x, integer=True).numpy() != expected).mean()
    if layer == "transposed":  # it has no integer kernel, and float sums may fall on either side of a rounding edge
        assert different < 1e-4
    else:
        assert different == 0
        assert (sim.evaluate(x).numpy() != expected).any()


@pytest.mark.parametrize("case", RUN_IN_FLOAT)
def test_reasons(case, tmp_path):
    model, change, name, reason = RUN_IN_FLOAT[case]
    found = classified(model, IMAGE, change=change, folder=tmp_path)
    assert found[name].kernel is None
    assert found[name].reason.startswith(reason)


def test_casts_that_change_nothing_hide_no_kernel(tmp_path):
    """As in transformers' normalizations, which compute in float32 and return the type that they were given."""
    model = Forward(lambda m, x: m.b(m.a(x).float().type_as(x)), a=nn.Linear(6, 6), b=nn.Linear(6, 6))
    found = classified(model, ROWS, folder=tmp_path)
    assert {name: kernel.kernel for name, kernel in found.items()} == {"a": "QGemm", "b": "QGemm"}


def test_grids_that_kernels_do_not_take(tmp_path):
    model = Forward(lambda m, x: m.b(m.a(x)), a=nn.Linear(6, 6), b=nn.Linear(6, 6))
    wide = classified(model, ROWS, CONFIG.override("a", activation={"bits": 16}))
    assert wide["a"].reason == "'a' runs in float: 'a.output' is uint16; integer kernels take at most 8 bits"
    assert wide["b"].reason == "'b' runs in float: 'a.output' is uint16; integer kernels take at most 8 bits"
    narrow = classified(model, ROWS, CONFIG.override("a", activation={"bits": 7}), folder=tmp_path)
    assert narrow["a"].reason == "'a' runs in float: 'a.output' uses [0, 127]; integer kernels clip to all of int8 or uint8"
    blocks = classified(model, ROWS, CONFIG.override("a", weight={"axis": 1, "block_size": 3}))
    assert (
        blocks["a"].reason == "'a' runs in float: 'a.weight' has a scale for each block; integer kernels take one for each output channel"
    )


def test_a_rectifier_that_clips_more_than_the_grid_gets_a_quantizer_in_front(tmp_path):
    model = Forward(lambda m, x: F.hardtanh(m.conv(x), -0.1, 0.2), conv=conv())
    config = qsim.int8(target=qsim.config.profile.ONNXRUNTIME).override("conv", activation={"symmetric": True})
    found = classified(model, IMAGE, config, folder=tmp_path)
    assert found["conv"].kernel == "QLinearConv"


def test_modules_and_operations_are_named():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = conv()

        def forward(self, x):
            return torch.tanh(self.conv(x) + x)

    found = classified(nn.Sequential(Block(), Block()), IMAGE)
    assert [(k.name, k.module, k.op) for k in found.values()][:3] == [
        ("0.conv", "0.conv", "Conv"),
        ("0.add", "0", "Add"),
        ("0.tanh", "0", "Tanh"),
    ]
