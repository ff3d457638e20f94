"""BatchNorm that stays in the simulation: trained, frozen, estimated anew, folded afterwards."""

import copy
import dataclasses
import math
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from models import Forward, seeded
from torch import nn
from torch.optim.swa_utils import update_bn

import qsim
from qsim import CalibrationError, Config, TensorSpec

KEEP = dataclasses.replace(qsim.int8(), batch_norm="keep")
EVERY_KIND = dataclasses.replace(qsim.int4(), batch_norm="keep")


def batches(count: int = 3, *shape: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(8, *(shape or (3, 6, 6)), generator=generator) for _ in range(count)]


class Net(nn.Module):
    """Convolutions of several kinds with BatchNorm, a branch, an addition."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8)
        self.conv3, self.bn3 = nn.ConvTranspose2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.fc, self.bn4 = nn.Linear(8, 4), nn.BatchNorm1d(4, affine=False)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn3(self.conv3(F.relu(self.bn2(self.conv2(x))))) + x)
        return self.bn4(self.fc(x.mean((2, 3))))


def net(signs: bool = False) -> nn.Module:
    model = seeded(Net)
    model.bn4.running_var.fill_(0.01)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.weight.data.uniform_(-1.5 if signs else 0.3, 1.5)
            module.bias.data.normal_()
    return model


def calibrated(model: nn.Module, config: Config) -> qsim.QuantSim:
    sim = qsim.QuantSim(model, batches()[0], config)
    sim.calibrate(batches(), progress=False)
    return sim


def integers(sim: qsim.QuantSim, layer: str) -> torch.Tensor:
    encoding, weight = sim.encodings()[f"{layer}.weight"], sim.model.get_submodule(layer).weight.detach()
    grid = (encoding.scale, encoding.zero_point, encoding.quant_min, encoding.quant_max)
    return qsim.reference.quantize(weight, *grid, axis=encoding.axis, block_size=encoding.block_size).int()


def train(sim: nn.Module, steps: int = 5, lr: float = 0.01) -> list[float]:
    sim.train()
    optimizer = torch.optim.Adam(sim.parameters(), lr)
    target, losses = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)), []
    for step in range(steps):
        optimizer.zero_grad()
        loss = F.mse_loss(sim(batches()[step % 3]), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    sim.eval()
    return losses


LAYERS = {"bn1": "conv1", "bn2": "conv2", "bn3": "conv3", "bn4": "fc"}


def test_kept_batch_norm_trains_and_nothing_is_quantized_before_it():
    model = net()
    sim = calibrated(model, KEEP)
    assert isinstance(sim.model.bn1, nn.BatchNorm2d)
    assert {row.op for row in sim.summary().rows if row.key == "conv1.output"} == {"conv2d + batch_norm + relu"}
    assert set(model.state_dict()) <= set(sim.state_dict()) | {k.removeprefix("model.") for k in sim.state_dict()}
    seen = []
    sim.model.bn1.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    x, encodings = batches()[0], sim.encodings()
    sim(x)

    def quantized(x, key):
        e = encodings[key]
        return qsim.reference.fake_quantize(x, e.scale, e.zero_point, e.quant_min, e.quant_max, axis=e.axis)

    expected = F.conv2d(quantized(x, "input"), quantized(model.conv1.weight, "conv1.weight"), padding=1)
    assert torch.equal(seen[0], expected)
    before = copy.deepcopy(sim.model.bn1.state_dict())
    losses = train(sim)
    assert losses[-1] < losses[0]
    for name, value in sim.model.bn1.state_dict().items():
        assert not torch.equal(value, before[name]), name


@pytest.mark.parametrize("config", [KEEP, EVERY_KIND], ids=["int8", "int4"])
@pytest.mark.parametrize("learnable", [False, True])
def test_folding_after_training_keeps_the_integers(config, learnable):
    if learnable:
        config = dataclasses.replace(config, weight=dataclasses.replace(config.weight, learnable=True))
    sim = calibrated(net(), config)
    train(sim)
    before = {layer: integers(sim, layer) for layer in LAYERS.values()}
    sim.disable("*.output", "input")  # an activation at the edge of a step may take the other one after any change of rounding
    expected, keys = sim(batches()[0]), list(sim.quantizers())
    with sim.in_float():
        in_float = sim(batches()[0])
    report = sim.fold_batch_norms()
    assert (report.folded, report.kept, report.warnings) == (LAYERS, {}, ())
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in sim.modules())
    for layer, integer in before.items():
        assert torch.equal(integers(sim, layer), integer), layer
    torch.testing.assert_close(sim(batches()[0]), expected, rtol=1e-4, atol=1e-5)
    with sim.in_float():
        torch.testing.assert_close(sim(batches()[0]), in_float, rtol=1e-4, atol=1e-5)
    assert list(sim.quantizers()) == keys
    assert sim.fold_batch_norms().folded == {}


def test_every_activation_is_still_quantized_after_folding():
    sim = calibrated(net(), KEEP)
    expected = sim(batches()[0])
    sim.fold_batch_norms()
    got = sim(batches()[0])
    scale = sim.encodings()["fc.output"].scale
    assert torch.allclose((got / scale).round(), got / scale, atol=1e-3)
    assert (got - expected).abs().max() <= 1.01 * scale
    assert {row.key for row in sim.summary().rows if row.role == "bias"} == {f"{layer}.bias" for layer in LAYERS.values()}
    sim.train()
    sim(batches()[0]).sum().backward()
    assert sim.model.conv1.bias.grad is not None


def test_a_rounding_that_would_cross_a_steps_edge_is_undone():
    """Weights at the edges of all steps, and factors that are no powers of two: the product rounds to either side."""
    conv, bn = nn.Conv2d(64, 16, 1, bias=False), nn.BatchNorm2d(16)
    steps = (torch.arange(64) - 32) + 0.5
    with torch.no_grad():
        scale = torch.rand(16, generator=torch.Generator().manual_seed(0)) + 0.1
        conv.weight.copy_((steps * scale[:, None])[..., None, None])
        bn.running_var.uniform_(0.1, 3)
        bn.weight.uniform_(0.1, 3)
    sim = qsim.QuantSim(nn.Sequential(conv, bn).eval(), torch.randn(2, 64, 3, 3), KEEP)
    sim.calibrate([torch.randn(2, 64, 3, 3)], progress=False)
    quantizer = sim.quantizers()["0.weight"]
    quantizer.set_encoding(dataclasses.replace(quantizer.encoding, scale=scale))
    before, weight = integers(sim, "0"), sim.model[0].weight.detach().clone()
    factor = (bn.weight.double() / (bn.running_var.double() + bn.eps).sqrt())[:, None, None, None]
    product = (weight.double() * factor).float()
    moved = (product / (scale.double() * factor.flatten()).float()[:, None, None, None]).round() != before
    assert moved.any()  # else this tests nothing
    sim.fold_batch_norms()
    assert torch.equal(integers(sim, "0"), before)
    torch.testing.assert_close(sim.model[0].weight.detach(), product.detach(), rtol=2e-6, atol=0)


def test_negative_and_zero_factors():
    sim = calibrated(net(signs=True), EVERY_KIND)
    with torch.no_grad():
        sim.model.bn1.weight[0] = 0
    before = integers(sim, "conv1")
    sign = sim.model.bn1.weight.detach().sign().int()[:, None, None, None]
    report = sim.fold_batch_norms()
    assert torch.equal(integers(sim, "conv1"), (before * sign).clamp(-8, 7))
    assert len(report.warnings) == 3
    changed = int((integers(sim, "conv1") != before).sum())
    assert f"'conv1.weight': {changed} of 216 integers changed: the weight of 'bn1' is negative or zero" in report.warnings[0]


def test_a_scale_that_cannot_absorb_it_is_chosen_anew():
    per_tensor = Config(TensorSpec(symmetric=True, method="minmax"), TensorSpec(), batch_norm="keep")
    sim = calibrated(net(), per_tensor)
    report = sim.fold_batch_norms()
    assert "'conv1.weight': its scale cannot absorb 'bn1'; the range was chosen anew" in report.warnings
    weight = sim.model.conv1.weight.detach()
    assert sim.encodings()["conv1.weight"].scale == max(weight.max() / 127, -weight.min() / 128)


def test_batch_norm_before_its_layer_stays():
    model = nn.Sequential(nn.ReLU(), nn.BatchNorm2d(3), nn.Conv2d(3, 4, 1)).eval()
    sim = calibrated(model, KEEP)
    assert "1.output" in sim.quantizers()
    report = sim.fold_batch_norms()
    assert report.folded == {}
    assert report.kept["1"] == "'1' runs before '2': its result is quantized, as it was trained"


def test_policies_by_glob_and_in_json():
    config = dataclasses.replace(qsim.int8(), batch_norm={"*": "keep", "bn[12]": "freeze", "bn1": "fold"})
    assert Config.from_json(config.to_json()) == config
    assert hash(config) == hash(Config.from_json(config.to_json()))
    assert Config.from_json(KEEP.to_json()).batch_norm == "keep"
    assert [config.batch_norm_policy(name) for name in ("bn1", "bn2", "bn3")] == ["fold", "freeze", "keep"]
    sim = calibrated(net(), config)
    assert isinstance(sim.model.bn1, nn.Identity)
    sim.train()
    assert (sim.model.bn2.training, sim.model.bn3.training) == (False, True)
    with pytest.raises(ValueError, match="got batch_norm='folded'; expected one of 'fold', 'keep', 'freeze'"):
        dataclasses.replace(qsim.int8(), batch_norm={"*": "folded"})


def test_frozen_statistics_rest_and_affine_parameters_train():
    sim = calibrated(net(), dataclasses.replace(qsim.int8(), batch_norm="freeze"))
    before = copy.deepcopy(sim.model.bn1.state_dict())
    losses = train(sim, steps=8)
    assert losses[-1] < losses[0]
    after = sim.model.bn1.state_dict()
    assert {name for name in before if torch.equal(before[name], after[name])} == {"running_mean", "running_var", "num_batches_tracked"}


def test_freezing_in_the_middle_of_training():
    sim = calibrated(net(), KEEP)
    sim.train()
    sim.freeze_batch_norms("bn[1-3]", affine=True)
    assert sim.model.bn4.training
    assert not sim.model.bn1.training
    before = {name: copy.deepcopy(sim.model.get_submodule(name).state_dict()) for name in LAYERS}
    train(copy.deepcopy(sim))
    train(pickle.loads(pickle.dumps(sim)))
    train(sim)
    for name in ("bn1", "bn2", "bn3"):
        torch.testing.assert_close(sim.model.get_submodule(name).state_dict(), before[name], rtol=0, atol=0)
    assert not torch.equal(sim.model.bn4.running_mean, before["bn4"]["running_mean"])
    with pytest.raises(ValueError, match=r"no BatchNorm matches 'qq\*'; there are: bn1, bn2, bn3, bn4"):
        sim.freeze_batch_norms("qq*")


@pytest.mark.parametrize("by", ["config", "call", "schedule"])
@pytest.mark.parametrize("copied", [lambda sim: sim, copy.deepcopy, lambda sim: pickle.loads(pickle.dumps(sim))])
def test_statistics_that_are_frozen_are_not_reset(by, copied):
    sim = calibrated(net(), dataclasses.replace(KEEP, batch_norm="freeze") if by == "config" else KEEP)
    if by == "call":
        sim.freeze_batch_norms("*")
    elif by == "schedule":
        sim.schedule(freeze_batch_norms_from=0)
    sim = copied(sim)
    before = copy.deepcopy(sim.model.state_dict())
    with pytest.raises(RuntimeError, match=r"BatchNorm 'bn1' is frozen, .*update_bn does: .*Expected sim\.reestimate_batch_norms"):
        update_bn(batches(), sim)
    torch.testing.assert_close(sim.model.state_dict(), before, rtol=0, atol=0)
    assert set(sim.reestimate_batch_norms(batches(), progress=False).values()) == {3}
    assert not torch.equal(sim.model.bn1.running_mean, before["bn1.running_mean"])


def test_reestimated_statistics_are_those_of_torch_without_simulation():
    model = net()
    expected = copy.deepcopy(model)
    update_bn([*batches(), batches()[0][:3]], expected)
    sim = qsim.QuantSim(model, batches()[0], KEEP)
    sim.train()
    state, flags = torch.random.get_rng_state(), [m.training for m in sim.modules()]
    with sim.in_float():
        counted = sim.reestimate_batch_norms([*batches(), batches()[0][:3]], progress=False)
    assert counted == dict.fromkeys(LAYERS, 4)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert [m.training for m in sim.modules()] == flags
    assert sim.model.bn1.momentum == 0.1
    # the average over batches of statistics that depend on those before: equal up to float32
    torch.testing.assert_close(dict(sim.model.state_dict()), dict(expected.state_dict()), rtol=1e-5, atol=1e-6)


def test_reestimation_sees_quantized_weights_and_moves_nothing_else():
    coarse = dataclasses.replace(KEEP, weight=TensorSpec(bits=2, symmetric=True, axis=0, method="minmax"))
    sim = calibrated(net(), coarse)
    ranges = {key: (q.min.clone(), q.max.clone(), q.scale.clone()) for key, q in sim.quantizers().items()}
    sim.reestimate_batch_norms(batches(), progress=False)
    e = sim.encodings()["conv1.weight"]
    weight = qsim.reference.fake_quantize(sim.model.conv1.weight, e.scale, e.zero_point, e.quant_min, e.quant_max, axis=0)
    with torch.no_grad():
        quantized = [sim.quantizers()["input"](x) for x in batches()]
        means = [F.conv2d(x, weight, padding=1).mean((0, 2, 3)) for x in quantized]
    torch.testing.assert_close(sim.model.bn1.running_mean, torch.stack(means).mean(0), rtol=1e-4, atol=1e-5)
    for key, quantizer in sim.quantizers().items():
        assert all(map(torch.equal, ranges[key], (quantizer.min, quantizer.max, quantizer.scale))), key


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_reestimation_leaves_broken_batches_out(value):
    broken = batches()[1].clone()
    broken[2, 1, 0, 0] = value
    clean, other = (calibrated(net(), KEEP) for _ in range(2))
    with clean.in_float(), other.float():
        clean.reestimate_batch_norms([batches()[0], batches()[2]], progress=False)
        assert other.reestimate_batch_norms([batches()[0], broken, batches()[2]], progress=False) == dict.fromkeys(LAYERS, 2)
    torch.testing.assert_close(other.model.state_dict(), clean.model.state_dict(), rtol=0, atol=0)
    before = copy.deepcopy(other.model.state_dict())
    with (
        pytest.raises(CalibrationError, match=r"no batch of 1 tells the statistics of BatchNorm 'bn1' \(every batch holds NaN or Inf"),
        other.float(),
    ):
        other.reestimate_batch_norms([broken], progress=False)
    with pytest.raises(CalibrationError, match="reestimate_batch_norms got no batch"):
        other.reestimate_batch_norms([], progress=False)
    with pytest.raises(ValueError, match="BatchNorm 'bn4' got one value per channel"):
        other.reestimate_batch_norms([batches()[0][:1]], progress=False)
    torch.testing.assert_close(other.model.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("policy", ["fold", "keep", "freeze"])
@pytest.mark.parametrize(
    ("name", "values", "reason"),
    [
        ("running_var", math.nan, "its running_var is not finite in 1 of 8 channels, first in 2"),
        ("running_mean", -math.inf, "its running_mean is not finite in 1 of 8 channels, first in 2"),
        ("running_var", -1.0, "its running_var is negative in 1 of 8 channels, first in 2"),
        ("weight", math.nan, "its weight is not finite in 1 of 8 channels, first in 2"),
    ],
)
def test_degenerate_statistics_are_named_at_once_and_can_be_repaired(policy, name, values, reason):
    model = net()
    with torch.no_grad():
        getattr(model.bn2, name)[2] = values
    message = rf"QuantSim: 'bn2' has degenerate statistics: {reason}\. Load other statistics, or call sim.reestimate_batch_norms"
    with pytest.warns(UserWarning, match=message):
        sim = qsim.QuantSim(model, batches()[0], dataclasses.replace(qsim.int8(), batch_norm=policy))
    if name != "weight":
        with sim.in_float():
            sim.reestimate_batch_norms(batches(), progress=False)
        sim.calibrate(batches(), progress=False)
        assert sim(batches()[0]).isfinite().all()
        assert "bn2" in sim.fold_batch_norms().folded


def variance_zero() -> nn.Module:
    model = net()
    model.bn1.running_var.zero_()
    return model


def no_statistics() -> nn.Module:
    model = net()
    model.bn2 = nn.BatchNorm2d(8, track_running_stats=False)
    return model.eval()


def never_updated() -> nn.Module:
    return Net().eval()


@pytest.mark.parametrize("policy", ["fold", "keep", "freeze"])
@pytest.mark.parametrize("make", [variance_zero, no_statistics, never_updated, net])
@pytest.mark.parametrize("training", [False, True])
def test_preparation_works_in_any_mode_with_any_statistics(make, policy, training):
    torch.manual_seed(0)
    model = make().train(training)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sim = calibrated(model, dataclasses.replace(qsim.int8(), batch_norm=policy))
    assert model.training == training
    losses = train(sim)
    assert all(map(math.isfinite, losses))
    assert sim(batches()[0]).isfinite().all()
    if make is no_statistics:
        folds = sim.fold_batch_norms()
        assert "has no running statistics" in folds.kept["bn2"]
    if make is never_updated and policy == "fold":
        assert any("num_batches_tracked is 0" in note and "'bn1'" in note for note in sim.summary().notes)


def test_shared_and_functional_batch_norms_survive_every_policy():
    bn = nn.BatchNorm2d(3)
    model = Forward(lambda m, x: m.bn(m.b(m.bn(m.a(x)))), a=nn.Conv2d(3, 3, 1), b=nn.Conv2d(3, 3, 1), bn=bn).eval()
    for policy in ("fold", "keep", "freeze"):
        sim = calibrated(model, dataclasses.replace(qsim.int8(), batch_norm=policy))
        assert sim.reestimate_batch_norms(batches(), progress=False) == {"bn": 6}
        assert "called 2 times" in sim.fold_batch_norms().kept["bn"]
        sim.train()(batches()[0]).sum().backward()


def test_biases_that_folding_makes_are_told():
    """BatchNorm's shift was float, and is rounded to int32 from then on, where the target has such biases."""
    for config, biases in ((qsim.int8(), ("a.bias",)), (qsim.int8(target="tensorrt"), ())):
        model = Forward(lambda m, x: m.bn(m.a(x)), a=nn.Conv2d(3, 3, 1), bn=nn.BatchNorm2d(3)).eval()
        report = calibrated(model, dataclasses.replace(config, batch_norm="keep")).fold_batch_norms()
        assert report.biases == biases
        assert ("1 biases are int32 from now on" in str(report)) == bool(biases)
