"""Weights in float: on integers a simulation gives what ONNX Runtime's optimiser makes of the exported file, to the bit."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from integer_networks import by_runtime
from models import Forward, seeded
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils._pytree import tree_leaves

import qsim

CONFIG = qsim.int8(target="onnxruntime")


class Layers(nn.Module):
    """Each kind of product of an image with a weight, in a module of its own: with a bias and without, rectified and not."""

    def __init__(self) -> None:
        super().__init__()
        linear, product = lambda m, x: F.linear(x, m.weight, m.bias), lambda m, x: x @ m.weight.mT
        self.layers = nn.ModuleDict()
        for bias in (False, True):
            self.layers[f"conv {bias}"] = Forward(lambda m, x: m.conv(x), conv=nn.Conv2d(3, 6, 3, bias=bias))
            self.layers[f"rows {bias}"] = Forward(lambda m, x: m.fc(x.flatten(1)), fc=nn.Linear(108, 6, bias=bias))
            self.layers[f"tokens {bias}"] = Forward(lambda m, x: m.fc(x.flatten(2)), fc=nn.Linear(36, 6, bias=bias))
            self.layers[f"functional {bias}"] = _with_parameters(lambda m, x: linear(m, x.flatten(2)), 36, bias)
        self.layers["product"] = _with_parameters(lambda m, x: product(m, x.flatten(1)), 108, False)
        self.layers["product and sum"] = _with_parameters(lambda m, x: product(m, x.flatten(1)) + m.bias, 108, True)

    def forward(self, x):
        return {f"{name}, {end.__name__}": end(layer(x)) for name, layer in self.layers.items() for end in (torch.clone, F.relu)}


def _with_parameters(forward, channels, bias):
    layer = Forward(forward)
    layer.weight, layer.bias = nn.Parameter(torch.randn(6, channels) / 8), nn.Parameter(torch.randn(6)) if bias else None
    return layer


class Core(nn.Module):
    """Its input has a quantizer of its own, whatever is said of it."""

    def __init__(self) -> None:
        super().__init__()
        self.core = Layers()

    def forward(self, x):
        return self.core(x)


def simulated(model, config, shape=(3, 6, 6)):
    sim = qsim.QuantSim(seeded(model), torch.randn(2, *shape), config)
    sim.calibrate([torch.randn(32, *shape)], progress=False)
    return sim, torch.randn(40, *shape)


def check(sim, x, folder, **options):
    """Assert that no result differs; of sums in float32, whose order differs from CPU to CPU, few, and by a rounding. Returns whether the
    simulation differs."""
    expected, _ = by_runtime(sim, x, folder, **options)
    results = sim.evaluate(x, integer=True)
    for name, found, wanted in zip(results if isinstance(results, dict) else "y", tree_leaves(results), expected, strict=True):
        assert (np.abs(found.numpy() - wanted) > 1e-6).mean() <= 0.005, name
    return any((a.numpy() != b).any() for a, b in zip(tree_leaves(sim.evaluate(x)), expected, strict=True))


ACTIVATIONS = {"int8": {}, "int16": {"activation": {"bits": 16}}, "fp16": {"activation": {"dtype": "fp16"}}, "none": {"activation": None}}
WEIGHTS = {"never quantized": {"weight": None}, "disabled": {}}


def overridden(pattern, **changes):
    return CONFIG.override(pattern, **changes) if changes else CONFIG


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("weight", ["never quantized", "disabled"])
def test_products(weight, activation, tmp_path):
    sim, x = simulated(Core, overridden("core.*", **WEIGHTS[weight], **ACTIVATIONS[activation]))
    if weight == "disabled":
        sim.disable("*weight")
    differs = check(sim, x, tmp_path)
    assert differs or activation in ("fp16", "none")


def test_layers_that_are_off(tmp_path):
    sim, x = simulated(Core, CONFIG.override("core.*", off=True))
    check(sim, x, tmp_path)


def scaled(m, x):
    return F.relu(F.conv2d(x, m.conv.weight * 0.3, m.conv.bias))


COMPUTED = {
    "weight norm": lambda: nn.Sequential(parametrizations.weight_norm(nn.Conv2d(3, 6, 3)), nn.ReLU()),
    "spectral norm": lambda: nn.Sequential(parametrizations.spectral_norm(nn.Conv2d(3, 6, 3))),
    "scaled": lambda: Forward(scaled, conv=nn.Conv2d(3, 6, 3)),
    "bias from the input": lambda: Forward(lambda m, x: F.conv2d(x, m.conv.weight, x.mean((0, 2, 3)) * 2), conv=nn.Conv2d(3, 3, 3)),
    "weight from the input": lambda: Forward(lambda m, x: F.conv2d(x, m.conv.weight * x.mean(), m.conv.bias), conv=nn.Conv2d(3, 3, 3)),
}


@pytest.mark.parametrize("weight", ["never quantized", "disabled"])
@pytest.mark.parametrize("case", COMPUTED)
def test_weights_that_are_computed(case, weight, tmp_path):
    sim, x = simulated(COMPUTED[case], overridden("*", **WEIGHTS[weight]))
    if weight == "disabled":
        sim.disable("*weight*")
    assert check(sim, x, tmp_path) or "input" in case


MOVED = {
    "pooled": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 1)),
    "rectified behind": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(4, 4, 1)),
    "flattened": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 4)),
    "transposed": lambda: Forward(lambda m, x: m.b(m.a(x.flatten(2)).mT), a=nn.Linear(36, 6), b=nn.Linear(3, 4)),
}


@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("case", MOVED)
def test_quantizers_that_stand_behind_moves(case, quantized, tmp_path):
    sim, x = simulated(MOVED[case], qsim.int8(target="tensorrt"))
    if not quantized:
        sim.disable("*weight")
    check(sim, x, tmp_path)


def summed(m, x):
    return m.last(x @ m.weight.mT + m.bias)


SUMS = {
    "rows": (108, lambda m, x: summed(m, x.flatten(1)), {}),
    "tokens of known sizes": (36, lambda m, x: summed(m, x.flatten(2)), {"dynamic_batch": False}),
}


@pytest.mark.parametrize("weight", ["quantized", "disabled"])
@pytest.mark.parametrize("case", SUMS)
def test_sums_that_the_runtime_fuses(case, weight, tmp_path):
    channels, forward, options = SUMS[case]

    def made():
        layer = _with_parameters(forward, channels, True)
        layer.last = nn.Linear(6, 4)
        return layer

    sim, x = simulated(made, CONFIG)
    sim.disable("matmul.output", "bias", *(["matmul.weight"] if weight == "disabled" else []))
    check(sim, x[: len(sim.calls[0][0][0])] if options else x, tmp_path, **options)


def test_linear_layers_between_known_sizes(tmp_path):
    sim, x = simulated(lambda: nn.Sequential(nn.Flatten(2), nn.Linear(36, 6)), CONFIG.override("*", weight=None))
    assert not check(sim, x[:2], tmp_path, dynamic_batch=False)


def test_biases_that_int32_does_not_hold(tmp_path):
    def made():
        layer = nn.Conv2d(3, 6, 3)
        layer.bias.data *= 3e5
        return nn.Sequential(layer)

    sim, x = simulated(made, CONFIG.override("*", weight=None, activation={"bits": 16}))
    assert not check(sim, x, tmp_path)


def test_what_the_runtime_computes_into_a_weight_is_said():
    sim, x = simulated(
        lambda: Forward(lambda m, x: m.b(m.a(x) * 2), a=nn.Conv2d(3, 4, 3), b=nn.Conv2d(4, 4, 1)), qsim.int8(target="tensorrt")
    )
    sim.disable("*weight")
    with pytest.warns(UserWarning, match="makes integers of the weight of 'conv2d'"):
        sim.evaluate(x, integer=True)
