"""QuantSim as its user meets it."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from models import CONV_NET_KEYS, ConvNet, Forward, Perceptron, seeded
from torch import nn

import qsim

X = torch.linspace(-2, 2, 4 * 144).reshape(4, 1, 12, 12).sin()
ROWS = torch.linspace(-2, 2, 32 * 6).reshape(32, 6)


def calibrated(config: qsim.Config | None = None) -> qsim.QuantSim:
    sim = qsim.QuantSim(seeded(ConvNet), X, config)
    sim.calibrate([X], progress=False)
    return sim


def test_keys_and_names():
    sim = calibrated()
    assert list(sim.quantizers()) == CONV_NET_KEYS
    assert all(isinstance(quantizer, qsim.Quantizer) and quantizer.name == key for key, quantizer in sim.quantizers().items())
    assert list(sim.encodings()) == CONV_NET_KEYS
    original = [name for name, _ in seeded(ConvNet).named_modules()]
    assert [name for name, _ in sim.model.named_modules()] == original


def test_before_calibration_the_forward_is_an_error():
    sim = qsim.QuantSim(seeded(ConvNet), X)
    with pytest.raises(qsim.NoEncodingError, match=r"19 of 19 quantizers.*sim\.calibrate"):
        sim(X)
    with pytest.raises(qsim.NoEncodingError):
        sim.model(X)
    with sim.in_float():
        sim(X)
    sim.disable("*")
    sim(X)


def test_a_model_in_training_mode_is_simulated_in_eval_mode():
    model = seeded(ConvNet).train()
    with pytest.warns(UserWarning, match=r"stem\.1, layer1\.0\.bn1"):
        sim = qsim.QuantSim(model, X)
    assert model.training
    assert not any(module.training for module in sim.model.modules())
    assert not any(isinstance(module, nn.BatchNorm2d) for module in sim.model.modules())


def test_a_single_module_in_training_mode_is_found():
    model = seeded(ConvNet)
    model.layer1[0].bn1.train()
    with pytest.warns(UserWarning, match="running statistics"):
        sim = qsim.QuantSim(model, X)
    assert not any(module.training for module in sim.model.modules())


def test_in_place():
    model = seeded(Perceptron)
    sim = qsim.QuantSim(model, ROWS, inplace=True)
    assert sim.model is model
    with pytest.raises(ValueError, match="simulated already"):
        qsim.QuantSim(model, ROWS)


def test_float_nests_and_recovers_from_errors():
    sim = calibrated()
    simulated = sim(X)
    with sim.in_float():
        plain = sim(X)
        with sim.in_float():
            assert torch.equal(sim(X), plain)
        assert torch.equal(sim(X), plain)
    with pytest.raises(ZeroDivisionError), sim.in_float():
        raise ZeroDivisionError
    assert torch.equal(sim(X), simulated)


def test_switches_by_glob():
    sim = calibrated()
    sim.disable("layer1.*", "input")
    off = {key for key, quantizer in sim.quantizers().items() if not quantizer.enabled}
    assert off == {key for key in CONV_NET_KEYS if key.startswith("layer1.") or key == "input"}
    assert "input" not in sim.encodings()
    sim.enable("layer1.0.conv1")  # an operation: its weight and its output
    assert {"layer1.0.conv1.weight", "layer1.0.conv1.output"} <= sim.encodings().keys()
    with pytest.raises(ValueError, match=r"'layer1\.0\.conv3\.output'.*'layer1\.0\.conv1\.output'"):
        sim.disable("layer1.0.conv3.output")


def test_a_pattern_with_brackets_is_a_key_first():
    class Two(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x.exp() + y.exp()

    sim = qsim.QuantSim(Two(), (ROWS, ROWS))
    sim.disable("input[1]")
    assert [key for key, quantizer in sim.quantizers().items() if not quantizer.enabled] == ["input[1]"]


def test_set_method_needs_no_data():
    sim = calibrated()
    before = sim.encodings()
    sim.set_method("percentile", percentile=80.0)
    after = sim.encodings()
    assert all(after[key].scale.max() < before[key].scale.max() for key in ("input", "fc.output"))
    assert sim.quantizers()["input"].spec.percentile == 80.0
    sim.set_method("minmax")
    again = calibrated(
        qsim.Config(weight=qsim.TensorSpec(symmetric=True, axis=0, method="minmax"), activation=qsim.TensorSpec(method="minmax"))
    )
    assert sim.encodings() == again.encodings()


def test_set_method_before_any_data_names_every_quantizer():
    sim = qsim.QuantSim(seeded(Perceptron), ROWS)
    with pytest.raises(qsim.CalibrationError, match=r"(?s)'input'.*'fc1\.output'.*'fc2\.output'"):
        sim.set_method("minmax")


def test_training_with_an_ordinary_loop():
    torch.manual_seed(0)
    x = torch.randn(64, 6)
    y = x[:, :3].argmax(1)
    sim = qsim.QuantSim(seeded(Perceptron), x, qsim.w4a8())
    sim.calibrate([(x, y)], progress=False)
    sim.train()
    optimizer = torch.optim.Adam(sim.parameters(), 1e-2)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = F.cross_entropy(sim(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert sim.training
    assert sim.model.training


def test_learnable_scales():
    config = qsim.Config(
        weight=qsim.TensorSpec(bits=4, symmetric=True, axis=0, learnable=True, method="mse"),
        activation=qsim.TensorSpec(bits=4, learnable=True),
    )
    sim = qsim.QuantSim(seeded(Perceptron), ROWS, config)
    sim.calibrate([ROWS], progress=False)
    scales = {name: p for name, p in sim.named_parameters() if name.startswith("quantization.")}
    assert len(scales) == len(sim.quantizers()) == 5
    before = {name: p.detach().clone() for name, p in scales.items()}
    optimizer = torch.optim.SGD(sim.parameters(), 1e-1)
    sim(ROWS).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in scales.values())
    optimizer.step()
    assert any(not torch.equal(p, before[name]) for name, p in scales.items())


def test_int32_bias_raises_a_weight_scale_that_is_too_small():
    model = nn.Linear(4, 2)
    with torch.no_grad():
        model.weight.mul_(1e-12)
        model.bias.fill_(100.0)
    sim = qsim.QuantSim(model, ROWS[:, :4], qsim.Config(bias=True))
    report = sim.calibrate([ROWS[:, :4]], progress=False)
    assert any("2 scales raised so that sums with the bias 'bias' fit into int32" in problem for problem in report.problems)
    encodings = sim.encodings()
    assert ((100.0 / (encodings["input"].scale * encodings["weight"].scale)) <= 2**31).all()
    torch.testing.assert_close(sim(ROWS[:, :4]), torch.full((32, 2), 100.0), rtol=1e-2, atol=0)


def test_int32_biases_fit_after_an_error_too():
    """Quantizers that got no range say that all others have theirs: with them biases have to fit."""
    model = Forward(lambda m, x, more=False: m.more(m.fc(x)) if more else m.fc(x), fc=nn.Linear(4, 2), more=nn.Linear(2, 2))
    with torch.no_grad():
        model.fc.weight.mul_(1e-12)
        model.fc.bias.fill_(100.0)
    x = ROWS[:, :4]
    sim = qsim.QuantSim(model.eval(), [{"x": x}, {"x": x, "more": True}], qsim.Config(bias=True))
    with pytest.raises(qsim.CalibrationError, match="all others have theirs"):
        sim.calibrate([{"x": x}], progress=False)
    torch.testing.assert_close(sim(x), torch.full((32, 2), 100.0), rtol=1e-2, atol=0)


@pytest.mark.parametrize("groups", [1, 2])
def test_int32_bias_of_a_transposed_convolution(groups):
    model, x = nn.ConvTranspose2d(4, 6, 2, groups=groups).eval(), torch.randn(2, 4, 5, 5)
    sim = qsim.QuantSim(model, x, qsim.Config(bias=True, activation=qsim.TensorSpec(bits=16)).override("input", bits=8))
    sim.calibrate([x], progress=False)
    scale = (sim.encodings()["input"].scale * sim.encodings()["weight"].scale).repeat(groups)
    biases = sim.model(torch.zeros_like(x))[0, :, 0, 0]
    step = sim.encodings()["conv_transpose2d.output"].scale
    assert ((biases - (model.bias / scale).round() * scale).abs() <= step).all()


@pytest.mark.parametrize("preset", [qsim.fp16, qsim.bf16])
def test_unscaled_float_formats_need_no_calibration(preset):
    sim = qsim.QuantSim(seeded(Perceptron), ROWS, preset())
    expected = seeded(Perceptron)(ROWS)
    torch.testing.assert_close(sim(ROWS), expected, rtol=0.2, atol=0.2)
    assert not torch.equal(sim(ROWS), expected)
    assert sim.calibrate([ROWS], progress=False).counts["input"].elements == ROWS.numel()


@pytest.mark.parametrize("weights", [0.005, 1.0])
@pytest.mark.parametrize("activations", [1e-3, 1e4])
def test_fp8_is_as_good_at_any_magnitude(weights, activations):
    model, x = torch.nn.Sequential(torch.nn.Linear(64, 32, bias=False)).eval(), torch.randn(128, 64) * activations
    torch.nn.init.normal_(model[0].weight, std=weights)
    sim = qsim.QuantSim(model, x, qsim.fp8())
    sim.calibrate([x], progress=False)
    expected, weight = model(x), model[0].weight
    quantized = sim.quantizers()["0.weight"](weight)
    assert 10 * (weight.square().sum() / (weight - quantized).square().sum()).log10() > 30
    assert 10 * (expected.square().sum() / (expected - sim(x)).square().sum()).log10() > 25
    rows = {row.key: (row.grid, row.range) for row in sim.summary().rows}
    assert rows["0.weight"][0] == "float8_e4m3fn scaled per channel (axis 0)"
    assert rows["input"] == ("float8_e4m3fn scaled per tensor", f"[{-x.abs().max():.4g}, {x.abs().max():.4g}]")


def test_float64_and_bfloat16_models():
    for dtype in (torch.float64, torch.bfloat16):
        model = seeded(Perceptron).to(dtype)
        sim = qsim.QuantSim(model, ROWS.to(dtype))
        sim.calibrate([ROWS.to(dtype)], progress=False)
        assert sim(ROWS.to(dtype)).dtype is dtype
        torch.testing.assert_close(sim(ROWS.to(dtype)), model(ROWS.to(dtype)), rtol=0.1, atol=0.1)


def test_overrides_reach_the_quantizers():
    sim = calibrated(dataclasses.replace(qsim.int8().override("fc", bits=16).override("stem.*", off=True), bias=False))
    assert "stem.0.weight" not in sim.quantizers()
    assert sim.encodings()["fc.weight"].dtype == "int16"
