"""Verification finds what differs, and what runs in float; retargeting finds the ranges of the same tensors."""

import copy
import dataclasses
import math

import numpy as np
import onnx
import pytest
import torch
from blocks import BLOCKS
from exported import NETWORKS, computed, exported, simulated
from models import Forward, seeded, trained
from torch import nn

import qsim
from qsim.config.profile import PROFILES
from qsim.deploy.verification import Difference, Verification
from qsim.deploy.verify import verify

CONFIG = qsim.int8(target="onnxruntime")
WAYS = [("not optimised", "optimised"), ("simulation", "not optimised"), ("simulation", "optimised"), ("on integers", "optimised")]


@pytest.fixture(scope="module")
def verified(tmp_path_factory):
    _, inputs, count = NETWORKS["vision"]
    path = tmp_path_factory.mktemp("verified") / "model.onnx"
    return path, simulated("vision", CONFIG).export(path, verify=[inputs(count), inputs(4)])


def test_all_ways_to_compute_agree(verified):
    _, report = verified
    found = report.verification.differences
    assert list(found) == [*WAYS, ("float", "optimised")]
    for pair in WAYS:
        outputs = found[pair]
        assert [difference.elements for difference in outputs.values()] == [24 * 8 * 64, 24 * 6]
        assert all(difference.step is not None for difference in outputs.values())
        if "optimised" not in pair[:1]:
            assert sum(difference.mismatching for difference in outputs.values()) <= 5  # behind the transposed convolution's float32 sums
    assert report.verification.in_float == {"up.ConvTranspose": "ONNX Runtime has no integer kernel for it"}
    assert "up.ConvTranspose" in str(report)
    assert report.verification.float_types["ConvTranspose"] == 1
    apart = copy.deepcopy(report.verification)
    apart.differences["on integers", "optimised"]["output_0"].mismatching += 1
    assert "integers differ from sim.integer(): computed in float" in str(apart)
    assert list(report.seconds) == ["trace", "translate", "write", "verify"]


def test_a_model_that_was_tampered_with_is_found_out(verified, tmp_path):
    path, _ = verified
    model = onnx.load(path)
    (scale,) = (tensor for tensor in model.graph.initializer if tensor.name == "head.weight_scale")
    scale.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(scale) * np.float32(1.1), scale.name))
    onnx.save(model, tmp_path / "other.onnx")
    sim, (_, inputs, _) = simulated("vision", CONFIG), NETWORKS["vision"]
    image = inputs(16)
    expected = [t.numpy() for t in sim.evaluate(image)]
    untouched, outputs = (
        verify(file, [({"image": image.numpy()}, {"mine": expected})]).differences["mine", "not optimised"]
        for file in (path, tmp_path / "other.onnx")
    )
    assert outputs["output_0"] == untouched["output_0"]  # where a float32 sum may fall on either side of a tie
    assert untouched["output_0"].mismatching <= 1
    assert untouched["output_1"].mismatching == 0
    assert outputs["output_1"].mismatching > 10
    assert outputs["output_1"].largest >= 1


@pytest.mark.parametrize("changed", ["input_scale", "0.weight_scale", "0.bias_scale"])
def test_a_kernel_that_does_not_take_what_was_tampered_with_is_not_told_as_missing(changed, tmp_path):
    """A bias on another grid than that of the products is none for the integer kernel of a convolution."""
    x = torch.randn(2, 3, 8, 8)
    sim = qsim.QuantSim(torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU()), x, qsim.int8(target="onnxruntime"))
    sim.calibrate([x], progress=False)
    sim.export(tmp_path / "model.onnx")
    model = onnx.load(tmp_path / "model.onnx")
    (scale,) = (tensor for tensor in model.graph.initializer if tensor.name == changed)
    scale.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(scale) * np.float32(1.1), scale.name))
    onnx.save(model, tmp_path / "model.onnx")
    (reason,) = verify(tmp_path / "model.onnx", [({"input": x.numpy()}, {})]).in_float.values()
    assert reason.startswith("ONNX Runtime's integer kernel did not take it")


def test_a_file_alone_is_compared_with_itself_optimised(verified):
    path, _ = verified
    found = verify(path, [({"image": NETWORKS["vision"][1](2).numpy()}, {})])
    assert list(found.differences) == [("not optimised", "optimised")]


def test_the_loss_to_the_float_model_is_measured(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5)).eval()
    sim, x = qsim.QuantSim(model, torch.randn(2, 8), CONFIG), torch.randn(200, 8)
    sim.calibrate([torch.randn(200, 8)], progress=False)
    report = sim.export(tmp_path / "model.onnx", verify=[x[:120], x[120:]])
    lost = report.verification.differences["float", "optimised"]["output"]
    with torch.no_grad():
        exact, got = model(x), torch.from_numpy(computed(tmp_path / "model.onnx", x, optimised=True)[0])
    assert lost.step is None
    assert lost.rows == 200
    assert lost.agreeing == int((exact.argmax(1) == got.argmax(1)).sum())
    noise = (exact.double() - got).square().sum()
    assert lost.sqnr == pytest.approx(float(10 * torch.log10(exact.double().square().sum() / noise)))


def test_what_runs_in_float_is_named_with_the_reason(tmp_path):
    torch.manual_seed(0)
    model = Forward(lambda self, x: self.b(torch.nn.functional.silu(self.a(x))), a=nn.Linear(8, 8), b=nn.Linear(8, 8))
    profile = dataclasses.replace(PROFILES["onnxruntime"], gates=())
    sim = qsim.QuantSim(model.eval(), torch.randn(2, 8), qsim.int8(target=profile))
    sim.calibrate([torch.randn(32, 8)], progress=False)
    report = sim.export(tmp_path / "model.onnx", verify=[torch.randn(64, 8)])
    assert report.lint == {"Sigmoid": "its result goes unquantized to Mul", "Mul": "operand 1 (made by Sigmoid) is not quantized"}
    assert report.verification.in_float == report.lint


# Retargeting.


def pair(name: str, target: str) -> tuple[qsim.QuantSim, qsim.QuantSim]:
    """Retargeted from the default, and calibrated for the target."""
    x, data = torch.randn(2, 3, 8, 8), torch.randn(16, 3, 8, 8)
    torch.manual_seed(1)
    model = trained(BLOCKS[name]())
    sim = qsim.QuantSim(model, x)
    sim.calibrate([data], progress=False)
    wanted = qsim.QuantSim(model, x, qsim.int8(target=target))
    wanted.calibrate([data], progress=False)
    return sim.retarget(target), wanted


@pytest.mark.parametrize("target", ["tensorrt", "coreml", "openvino"])
@pytest.mark.parametrize("name", ["resnet", "concat", "transformer"])
def test_it_is_as_if_calibrated_for_the_target(name, target):
    got, wanted = pair(name, target)
    mine, theirs = got.encodings(), wanted.encodings()
    assert list(mine) == list(theirs)
    other = {key for key in mine if mine[key] != theirs[key]}
    # What is read behind a maximum or a selection was observed before it: a few more values, the same tensor.
    assert len(other) <= 3
    assert all(".input[" in key or ".input" in key for key in other)
    for key in other:
        assert 0.5 < (mine[key].scale / theirs[key].scale).item() < 2
    assert got.config.target == target


def test_it_keeps_trained_scales_and_what_is_off_and_changes_nothing():
    sim = qsim.QuantSim(seeded(NETWORKS["perceptron"][0]), torch.randn(2, 16), qsim.int8().override(weight={"learnable": True}))
    sim.calibrate([torch.randn(64, 16)], progress=False)
    with torch.no_grad():
        sim.quantizers()["up.weight"].scale.mul_(0.9)
    sim.disable("down.weight")
    before = sim.encodings()
    got = sim.retarget("tensorrt")
    assert got.encodings()["up.weight"] == before["up.weight"]
    assert not got.quantizers()["down.weight"].enabled
    assert sim.encodings() == before
    assert got.model.up.weight is not sim.model.up.weight


def test_it_keeps_what_falls_back():
    sim = qsim.QuantSim(seeded(NETWORKS["perceptron"][0]), torch.randn(2, 16))
    sim.calibrate([torch.randn(64, 16)], progress=False)
    encodings = sim.retarget("tensorrt").encodings()
    sim.fallback("down")
    got = sim.retarget("tensorrt")
    assert got.quantization.formats == {"down": "float16"}
    assert got.encodings() == encodings
    assert sim.quantization.formats == {"down": "float16"}


def test_shared_scales_span_all_that_is_joined():
    model = Forward(lambda self, x: torch.cat([self.a(x), 3 * self.b(x)], 1), a=nn.Conv2d(3, 4, 1), b=nn.Conv2d(3, 2, 1))
    sim = qsim.QuantSim(model.eval(), torch.randn(2, 3, 8, 8))
    sim.calibrate([torch.randn(16, 3, 8, 8)], progress=False)
    shared = sim.retarget("coreml").quantizers()["cat.input"]
    parts = [sim.quantizers()[key] for key in ("a.output", "mul.output")]
    assert shared.counts.elements >= sum(part.counts.elements for part in parts)
    assert (shared.min, shared.max) == (min(part.min for part in parts), max(part.max for part in parts))


def test_tensors_that_were_never_observed_are_listed():
    sim = qsim.QuantSim(seeded(NETWORKS["perceptron"][0]), torch.randn(2, 16), qsim.int8(target="tensorrt"))
    sim.calibrate([torch.randn(64, 16)], progress=False)
    says = r"'onnxruntime' quantizes 'down.output', which 'tensorrt' leaves in float.*replace\(sim.config, target='onnxruntime'\)"
    with pytest.raises(qsim.CalibrationError, match=says):
        sim.retarget("onnxruntime")


def test_export_retargets_where_it_has_to_and_says_so(tmp_path):
    sim = simulated("perceptron", qsim.int8())
    x = NETWORKS["perceptron"][1](32)
    with pytest.warns(UserWarning, match="made for 'default', whose results tensorrt cannot reproduce"):
        report = sim.export(tmp_path / "model.onnx", "tensorrt", verify=[x])
    assert "written as sim.retarget('tensorrt')" in report.notes[0]
    assert report.verification.differences["simulation", "not optimised"]["output"].largest < 1e-5
    assert all(
        value.op_type != "QuantizeLinear" or value.name != "down.output_quantized"
        for value in onnx.load(tmp_path / "model.onnx").graph.node
    )
    path, plain = exported("perceptron", qsim.int8())
    assert plain.target == "onnxruntime"
    assert "retarget" not in str(plain)
    assert path.exists()


def test_verify_alone_takes_the_example_inputs(tmp_path):
    report = simulated("perceptron", CONFIG).export(tmp_path / "model.onnx", verify=True)
    assert report.verification.differences["simulation", "not optimised"]["output"].elements == 2 * 24
    assert simulated("perceptron", CONFIG).export(tmp_path / "model.onnx").verification is None


def test_results_of_other_shapes_differ_throughout(tmp_path):
    """Of a model that chooses rows by values near a quantizer's edge: float and integers may choose others."""
    torch.manual_seed(0)
    model = Forward(lambda m, x: m.a(x[x[:, 0] > 0]), a=nn.Linear(4, 3)).eval()
    x = torch.randn(32, 4)
    x[:8, 0] = 1e-4  # 0 on the grid
    sim = qsim.QuantSim(model, x, qsim.int8(target="onnxruntime"))
    sim.calibrate([x], progress=False)
    report = sim.export(tmp_path / "model.onnx", verify=[(x,)])
    (difference,) = report.verification.differences["float", "optimised"].values()
    assert difference.mismatching == difference.elements == model(x).numel()
    assert difference.largest == math.inf
    assert math.isnan(difference.sqnr)
    (same,) = report.verification.differences["on integers", "optimised"].values()
    assert same.mismatching == 0
    assert "inf" in str(report.verification)


def test_a_file_in_half_precision_is_verified_without_integer_kernels(tmp_path):
    sim = qsim.QuantSim(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval(), torch.randn(4, 8), qsim.int8())
    sim.calibrate([torch.randn(64, 8)], progress=False)
    sim.half()
    found = sim.export(tmp_path / "half.onnx", verify=[torch.randn(16, 8).half()]).verification.differences
    assert list(found) == [*WAYS[:3], ("float", "optimised")]
    assert all(difference.largest <= 1.001 for pair in WAYS[:3] for difference in found[pair].values())


def test_a_top_1_of_nothing_is_a_number():
    scores = Difference(None)
    scores.add(np.array([[1.0, 2.0], [3.0, 1.0]]), np.array([[2.0, 1.0], [1.0, 3.0]]))
    no_scores = Difference(None)
    no_scores.add(np.ones((2, 1)), np.ones((2, 1)))
    found = Verification(
        version="1", differences={("simulation", "optimised"): {"scores": scores, "others": no_scores}}, in_float={}, float_types={}
    )
    lines = str(found).splitlines()
    assert next(line for line in lines if "scores" in line).rstrip().endswith(" 0 %")
    assert not next(line for line in lines if "others" in line).rstrip().endswith("%")
