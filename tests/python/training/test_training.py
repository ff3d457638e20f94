"""What an ordinary training loop needs of a simulation: groups of parameters, schedules, ranges that move or rest."""

import copy
import dataclasses
import inspect
import warnings

import pytest
import torch
import torch.nn.functional as F
from models import ConvNet, seeded
from torch import nn
from torch.optim.swa_utils import AveragedModel

import qsim

X = torch.randn(16, 1, 12, 12, generator=torch.Generator().manual_seed(0))
LABELS = torch.randint(10, (16,), generator=torch.Generator().manual_seed(1))


def activations(**changes) -> qsim.Config:
    config = qsim.int8()
    return dataclasses.replace(config, activation=dataclasses.replace(config.activation, **changes), batch_norm="keep")


def calibrated(config: qsim.Config, model: nn.Module | None = None) -> qsim.QuantSim:
    sim = qsim.QuantSim(model or seeded(ConvNet), X, config)
    sim.calibrate([X], progress=False)
    return sim


def loss_of(sim: nn.Module) -> torch.Tensor:
    return F.cross_entropy(sim(X), LABELS)


def encodings(sim: qsim.QuantSim, end: str) -> dict:
    return {key: encoding for key, encoding in sim.encodings().items() if key.endswith(end)}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(7, 5), nn.LayerNorm((3, 5)), nn.Linear(5, 7)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.norm(self.embed(x)))


LEARNABLE = dataclasses.replace(
    activations(learnable=True), weight=qsim.TensorSpec(symmetric=True, axis=0, method="minmax", learnable=True)
)


def test_every_parameter_is_in_one_group():
    tokens = torch.randint(7, (2, 3))
    for sim in (calibrated(LEARNABLE), qsim.QuantSim(Tied().eval(), tokens, LEARNABLE), qsim.QuantSim(nn.ReLU(), X)):
        groups = sim.param_groups(1e-3, scale_lr=1e-4, weight_decay=0.1, bias_decay=0.0)
        members = [id(p) for group in groups for p in group["params"]]
        assert sorted(members) == sorted(map(id, sim.parameters()))
        assert all(group["params"] for group in groups)
    sim = qsim.QuantSim(Tied().eval(), tokens, LEARNABLE)
    names = {id(p): name for name, p in sim.named_parameters()}
    by_name = {group["name"]: {names[id(p)] for p in group["params"]} for group in sim.param_groups()}
    assert by_name["weights"] == {"model.embed.weight"}
    assert by_name["biases"] == {"model.norm.weight", "model.norm.bias", "model.head.bias"}
    assert by_name["scales"] == {name for name in names.values() if name.endswith(".scale")}


def test_rates_and_decays():
    groups = {group["name"]: group for group in calibrated(LEARNABLE).param_groups(0.1, scale_lr=0.01, weight_decay=0.5)}
    assert {n: (g["lr"], g["weight_decay"]) for n, g in groups.items()} == {
        "weights": (0.1, 0.5),
        "biases": (0.1, 0.5),
        "scales": (0.01, 0.0),
    }
    assert [set(g) for g in calibrated(qsim.int8()).param_groups()] == [{"name", "params"}, {"name", "params"}]
    groups = {group["name"]: group for group in calibrated(LEARNABLE).param_groups(bias_decay=0.25)}
    assert {name: group.get("weight_decay") for name, group in groups.items()} == {"weights": None, "biases": 0.25, "scales": 0.0}


OPTIMIZERS = [
    optimizer
    for optimizer in vars(torch.optim).values()
    if inspect.isclass(optimizer) and issubclass(optimizer, torch.optim.Optimizer) and optimizer is not torch.optim.Optimizer
]


@pytest.mark.parametrize("optimizer_class", OPTIMIZERS, ids=lambda c: c.__name__)
def test_groups_suit_the_optimizers_of_torch(optimizer_class):
    if optimizer_class.__name__ in ("LBFGS", "Muon", "SparseAdam"):
        pytest.skip("takes one group only, matrices only, sparse gradients only")
    sim = calibrated(LEARNABLE).train()
    optimizer = optimizer_class(sim.param_groups(1e-3, scale_lr=1e-4, weight_decay=0.01))
    before = copy.deepcopy(dict(sim.named_parameters()))
    for _ in range(2):
        loss_of(sim).backward()
        optimizer.step()
    used = [name for name, p in sim.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0]
    assert used
    assert all(not torch.equal(before[name], sim.get_parameter(name)) for name in used)


@pytest.mark.parametrize("kind", ["fixed", "running", "learnable"])
def test_ranges_rest_follow_or_learn_while_the_loss_falls(kind):
    changes = {"fixed": {}, "running": {"method": "ema", "averaging": 0.1}, "learnable": {"learnable": True}}[kind]
    sim = calibrated(activations(**changes)).train()
    before = encodings(sim, ".output")
    optimizer = torch.optim.Adam(sim.param_groups(1e-2, scale_lr=1e-3))
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = loss_of(sim)
        loss.backward()
        qsim.clip_grad_norm_(sim.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])
    moved = {key for key, encoding in encodings(sim, ".output").items() if not torch.equal(encoding.scale, before[key].scale)}
    assert moved == (set() if kind == "fixed" else set(before))
    sim.eval()
    rested = encodings(sim, ".output")
    sim(X * 3)
    assert rested == encodings(sim, ".output")


def test_schedule_switches_at_the_step():
    sim = calibrated(activations(method="ema", averaging=0.5))
    sim.disable("fc.output")
    schedule = sim.schedule(quantize_from={"*": 0, "*.output": 2}, observe_until=3, freeze_batch_norms_from=4)
    sim.train()
    seen = []
    for step in range(6):
        before = sim.quantizers()["cat.output"].scale.clone()
        sim(X * (step + 1))
        conv = sim.quantizers()["stem.0.output"]
        moved = not torch.equal(sim.quantizers()["cat.output"].scale, before)
        seen.append((conv.enabled, moved, sim.model.stem[1].training))
        assert sim.quantizers()["stem.0.weight"].enabled
        assert not sim.quantizers()["fc.output"].enabled
        schedule.step()
    assert [enabled for enabled, *_ in seen] == [False, False, True, True, True, True]
    assert [moved for _, moved, _ in seen] == [True, True, True, False, False, False]
    assert [training for *_, training in seen] == [True] * 4 + [False] * 2


def test_delayed_quantization_computes_in_float_until_then():
    sim = calibrated(qsim.int4())
    schedule = sim.schedule(quantize_from=2)
    with sim.in_float():
        expected = sim(X)
    for step in range(3):
        assert torch.equal(sim(X), expected) == (step < 2)
        schedule.step()


def test_a_schedule_that_goes_back_has_batch_norms_train_again():
    sim = calibrated(activations(method="ema"))
    sim.freeze_batch_norms("stem.1")
    schedule = sim.schedule(freeze_batch_norms_from=2)
    sim.train()
    norms = {name: norm for name, norm in sim.model.named_modules() if isinstance(norm, nn.BatchNorm2d)}
    others = norms.keys() - {"stem.1"}
    assert others
    for steps, frozen in ((0, {"stem.1"}), (3, {*norms}), (1, {"stem.1"}), (2, {*norms})):
        schedule.load_state_dict({"steps": steps})
        sim.train()
        assert {name for name, norm in norms.items() if not norm.training} == frozen
    schedule.load_state_dict({"steps": 0})
    norms[next(iter(others))].reset_running_stats()


def test_a_copy_says_what_a_schedule_has_off_in_it():
    sim = calibrated(qsim.int4())
    sim.disable("fc.output")
    schedule = sim.schedule(quantize_from={"*": 0, "*.output": 1})
    with pytest.warns(UserWarning, match=r"10 quantizers are off in this copy for good \(adaptive_avg_pool2d\.output"):
        averaged = AveragedModel(sim)
    schedule.step()
    averaged.update_parameters(sim)
    averaged.module.enable("*.output")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copy.deepcopy(sim)
        copy.deepcopy(averaged.module)


def test_what_an_average_is_given_is_an_encoding():
    for config in (qsim.int8(), qsim.int4(), activations(learnable=True), activations(method="ema")):
        sim = qsim.QuantSim(seeded(ConvNet), X, config)
        averaged = AveragedModel(sim)
        sim.calibrate([X], progress=False)
        averaged.update_parameters(sim)
        assert torch.equal(averaged.eval()(X), sim.eval()(X))


def test_schedule_goes_on_from_a_state():
    options = {"quantize_from": 1, "observe_until": 5}
    first, second = (calibrated(activations(method="ema")) for _ in range(2))
    schedule, other = first.schedule(**options), second.schedule(**options)
    for _ in range(6):
        schedule.step()
    other.load_state_dict(schedule.state_dict())
    assert other.steps == 6
    for a, b in zip(first.quantizers().values(), second.quantizers().values(), strict=True):
        assert (a.enabled, a.observing) == (b.enabled, b.observing)
    with pytest.raises(ValueError, match="got observe_until=-1; expected at least 0"):
        first.schedule(observe_until=-1)
    with pytest.raises(ValueError, match="freeze_batch_norms_from finds no BatchNorm"):
        calibrated(qsim.int8()).schedule(freeze_batch_norms_from=1)
    with pytest.raises(ValueError, match="no quantizer matches 'nothing'"):
        first.schedule(quantize_from={"nothing": 3})
