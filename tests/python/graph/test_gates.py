"""Gates of SiLU and HardSwish: quantized where a target computes gate and product in integer kernels, and nowhere else."""

import dataclasses
import warnings

import pytest
import torch
import torch.nn.functional as F
from models import Calls, Forward
from torch import nn

import qsim
from qsim.config.profile import PROFILES
from qsim.reference import fake_quantize

CONFIG = qsim.int8(target="onnxruntime")
X = torch.randn(64, 12, generator=torch.Generator().manual_seed(0)) * 3
ACTIVATIONS = {"silu": (F.silu, torch.sigmoid), "hardswish": (F.hardswish, F.hardsigmoid)}
NAMES = pytest.mark.parametrize("name", ACTIVATIONS)


def calibrated(model: nn.Module, config: qsim.Config = CONFIG) -> qsim.QuantSim:
    sim = qsim.QuantSim(model.eval(), X, config)
    sim.calibrate([X], progress=False)
    return sim


def network(activation) -> nn.Module:
    torch.manual_seed(0)
    return Forward(lambda self, x: self.b(activation(self.a(x))), a=nn.Linear(12, 12), b=nn.Linear(12, 5))


def on_grid(x: torch.Tensor, encoding: qsim.Encoding) -> torch.Tensor:
    return fake_quantize(x, encoding.scale, encoding.zero_point, encoding.quant_min, encoding.quant_max)


@NAMES
@pytest.mark.parametrize("inplace", [False, True])
def test_the_activation_is_the_product_with_the_quantized_gate(name, inplace):
    activation, gate = ACTIVATIONS[name]
    sim = calibrated(Calls(lambda x: activation(x + 1, inplace=inplace) * 2))
    grids = sim.encodings()
    assert list(grids) == ["input", "add.output", f"{name}.gate", f"{name}.output", "mul.output"]
    x = on_grid(on_grid(X, grids["input"]) + 1, grids["add.output"])
    y = on_grid(x * on_grid(gate(x), grids[f"{name}.gate"]), grids[f"{name}.output"])
    assert torch.equal(sim(X), on_grid(y * 2, grids["mul.output"]))
    assert (grids[f"{name}.gate"].min, grids[f"{name}.gate"].max) == (0, pytest.approx(1))


@NAMES
@pytest.mark.parametrize("target", [name for name in PROFILES if name != "onnxruntime"])
def test_other_targets_quantize_none(name, target):
    assert not [key for key in calibrated(network(ACTIVATIONS[name][0]), qsim.int8(target=target)).quantizers() if "gate" in key]


@NAMES
@pytest.mark.parametrize(
    "config",
    [
        qsim.int4(target="onnxruntime"),
        qsim.int16(target="onnxruntime"),
        qsim.fp16(target="onnxruntime"),
        CONFIG.override("a", activation={"bits": 16}),
        CONFIG.override("a", activation=None),
        CONFIG.override(op_type="Swish", activation=None).override(op_type="HardSwish", activation=None),
    ],
    ids=["int4", "int16", "fp16", "operand of 16 bits", "operand in float", "result in float"],
)
def test_without_eight_bits_on_both_sides_there_is_no_kernel_and_no_quantizer(name, config):
    assert not [key for key in calibrated(network(ACTIVATIONS[name][0]), config).quantizers() if "gate" in key]


@NAMES
def test_an_empty_operand_is_no_data(name):
    activation, _ = ACTIVATIONS[name]
    sim = calibrated(Calls(lambda x: torch.cat([activation(x[:0]), x * 2])))
    assert sim(X).shape == X.shape
    assert not [key for key in sim.quantizers() if "gate" in key]


@NAMES
def test_gradients_are_those_of_the_product_in_place_too(name):
    activation, gate = ACTIVATIONS[name]
    grid_of_gates = calibrated(network(activation)).encodings()[f"{name}.gate"]
    found = []
    for function in (activation, lambda x: activation(x, inplace=True), lambda x: x * gate(x)):
        sim = calibrated(network(function))
        if "sigmoid.output" in sim.quantizers():  # by itself it is observed
            sim.quantizers()["sigmoid.output"].set_encoding(grid_of_gates)
        sim.train()
        sim(X).square().sum().backward()
        found.append(sim.model.a.weight.grad)
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[0], found[2])


@NAMES
def test_what_falls_back_computes_with_its_own_gate(name):
    activation, _ = ACTIVATIONS[name]
    sim = calibrated(Calls(lambda x: activation(x + 1) * 2))
    before, grids = sim(X), sim.encodings()
    report = sim.fallback(name, to="fp32")
    assert f"no longer quantized (1): {name}.gate" in str(report)
    y = on_grid(activation(on_grid(on_grid(X, grids["input"]) + 1, grids["add.output"])), grids[f"{name}.output"])
    assert torch.equal(sim(X), on_grid(y * 2, grids["mul.output"]))
    sim.fallback(None)
    assert torch.equal(sim(X), before)


def test_compiled_the_gate_is_quantized_as_in_eager():
    sim = calibrated(network(F.silu))
    with torch.no_grad():
        assert torch.equal(torch.compile(sim, backend="eager", fullgraph=True)(X), sim(X))


def test_a_gate_that_dynamo_hides_is_told():
    sim = calibrated(network(F.hardswish))
    with torch.no_grad(), pytest.warns(UserWarning, match=r"torch.compile hides 'hardswish' .*its gate stays in float.*Profile.gates"):
        compiled = torch.compile(sim, backend="eager", fullgraph=True)(X)
    assert (compiled - sim(X)).abs().max() <= 2 * sim.encodings()["b.output"].scale
    plain = calibrated(network(F.hardswish), qsim.int8(target=dataclasses.replace(PROFILES["onnxruntime"], gates=("Swish",))))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        assert torch.equal(torch.compile(plain, backend="eager", fullgraph=True)(X), plain(X))


@NAMES
def test_other_targets_find_the_same_tensors(name):
    model = network(ACTIVATIONS[name][0])
    sim, wanted = calibrated(model), calibrated(model, qsim.int8(target="tensorrt"))
    sim.set_method("minmax")
    wanted.set_method("minmax")
    mine, theirs = sim.retarget("tensorrt").encodings(), wanted.encodings()
    assert list(mine) == list(theirs)
    for key in mine:
        torch.testing.assert_close(mine[key].scale, theirs[key].scale, rtol=0.02, atol=0)
    same = sim.retarget(dataclasses.replace(PROFILES["onnxruntime"], name="same")).encodings()
    assert same == sim.encodings()


@pytest.mark.parametrize("strict", [True, False])
def test_a_state_from_before_gates_loads_and_says_so(strict):
    model = nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 2)).eval()
    x = torch.randn(64, 4)
    before = dataclasses.replace(PROFILES["onnxruntime"], gates=())
    old, new, other = (qsim.QuantSim(model, x, qsim.int8(target=target)) for target in (before, "onnxruntime", "onnxruntime"))
    for sim in (old, other):
        sim.calibrate([x], progress=False)
    with pytest.warns(UserWarning, match=r"1 of this one keep the ranges that they have \('1.gate'\)"):
        new.load_state_dict(old.state_dict(), strict=strict)
    assert new.encodings() == {**old.encodings(), "1.gate": other.encodings()["1.gate"]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        new.load_state_dict(other.state_dict())
