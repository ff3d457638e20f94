"""Numbers and HardSigmoid in integer kernels, against ONNX Runtime."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from integer_networks import SYSTEMS, by_runtime, differing
from models import Calls
from onnx_graphs import kernels

import qsim

# What is computed, and the integer kernels that ONNX Runtime then has.
FORMS = {
    "product": (lambda x: x * 0.37, ["QLinearMul"]),
    "negative product": (lambda x: -2.5 * x, ["QLinearMul"]),
    "in place": (lambda x: x.add_(1).mul_(3), ["QLinearAdd", "QLinearMul"]),
    "sum": (lambda x: x + 3, ["QLinearAdd"]),
    "difference": (lambda x: x - 0.7, ["QLinearAdd"]),
    "sum with a rectifier": (lambda x: x * F.relu6(x + 3), ["QLinearAdd", "QLinearMul"]),
    "hardsigmoid": (lambda x: F.hardsigmoid(x) * x, ["QLinearAdd", "QLinearMul"]),
    "hardswish": (lambda x: F.hardswish(x) + x, ["QLinearAdd", "QLinearMul"]),
}
X = torch.randn(200, 60, generator=torch.Generator().manual_seed(0)) * 3


def calibrated(compute, config: qsim.Config) -> qsim.QuantSim:
    sim = qsim.QuantSim(Calls(lambda x: compute(x.clone())), X, config)
    sim.calibrate([X], progress=False)
    return sim


@pytest.mark.parametrize("system", ["uint8", "int8"])
@pytest.mark.parametrize("form", FORMS)
def test_kernels_compute_what_the_runtime_does(form, system, tmp_path):
    compute, expected = FORMS[form]
    sim = calibrated(compute, SYSTEMS[system])
    optimised, ran = by_runtime(sim, X, tmp_path)
    assert [op for op in sorted(kernels(ran)) if op.startswith("QLinear")] == expected
    assert sorted({kernel.kernel for kernel in sim.kernels()}) == expected
    assert differing(sim.evaluate(X, integer=True), optimised) == (0, X.numel())
    plain, _ = by_runtime(sim, X, tmp_path, optimize=False)
    assert differing(sim.evaluate(X), plain)[0] <= (0 if "hard" not in form else 3)  # a sixth of the scale, or of the sum: the last bit


def test_numbers_at_ties(tmp_path):
    """Scales that are powers of two: every other product lies halfway between two integers."""
    sim = calibrated(lambda x: x * 0.75 + 0.375, SYSTEMS["uint8"])
    for key, scale in (("input", 0.125), ("mul.output", 0.0625), ("add.output", 0.25)):
        quantizer = sim.quantizers()[key]
        quantizer.set_encoding(dataclasses.replace(quantizer.encoding, scale=torch.tensor(scale)))
    optimised, _ = by_runtime(sim, X, tmp_path)
    assert differing(sim.evaluate(X, integer=True), optimised) == (0, X.numel())
    assert np.unique(optimised[0]).size > 50


@pytest.mark.parametrize("value", [0.0, 1e-40])
def test_numbers_without_a_scale_stay_in_float(value):
    sim = calibrated(lambda x: x * value + x, SYSTEMS["uint8"])
    assert [kernel.kernel for kernel in sim.kernels()] == [None, "QLinearAdd"]


def test_a_wider_grid_leaves_hardsigmoid_in_float(tmp_path):
    sim = calibrated(lambda x: F.hardsigmoid(x) * x, SYSTEMS["uint8"])
    quantizer = sim.quantizers()["hardsigmoid.output"]
    quantizer.set_encoding(dataclasses.replace(quantizer.encoding, scale=torch.tensor(0.01)))
    assert [(kernel.op, kernel.kernel) for kernel in sim.kernels()] == [("HardSigmoid", None), ("Mul", "QLinearMul")]
    optimised, ran = by_runtime(sim, X, tmp_path)
    assert "HardSigmoid" in kernels(ran)
    assert differing(sim.evaluate(X, integer=True), optimised)[0] == 0


def test_a_quantizer_that_is_off_leaves_no_form(tmp_path):
    sim = calibrated(lambda x: x * 0.37, SYSTEMS["uint8"])
    sim.disable("input")
    _, ran = by_runtime(sim, X, tmp_path)
    assert "QLinearMul" not in kernels(ran)
    assert [kernel.kernel for kernel in sim.kernels()] == [None]
