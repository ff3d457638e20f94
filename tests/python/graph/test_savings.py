"""What may be saved, decided from recordings alone; and that nothing which is saved changes a bit."""

import copy
import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from models import ConvNet, Forward, ResidualBlock, seeded
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import qsim
from qsim.graph.execute import ownership
from qsim.graph.plan.plan import plan
from qsim.graph.plan.savings import Saving, find_savings
from qsim.graph.record.record import record

IMAGE = torch.linspace(-1, 1, 2 * 4 * 6 * 6).reshape(2, 4, 6, 6)
CONV = lambda: nn.Conv2d(4, 4, 3, padding=1)  # noqa: E731


@pytest.fixture(autouse=True)
def whatever_the_size(monkeypatch):
    """Small tensors are written in place too."""
    monkeypatch.setattr(ownership, "SMALLEST", 0)


def saved(forward: Callable[..., object], **modules: nn.Module) -> dict[str, Saving]:
    model = Forward(forward, **modules).eval()
    tape, problems = record(model, [((IMAGE.clone(),), {})])
    assert problems == []
    return {site.name: saving for site, saving in find_savings(plan(tape, qsim.int8())).items()}


def test_a_layer_keeps_its_parameters():
    (saving,) = saved(lambda m, x: m.conv(x), conv=CONV()).values()
    assert saving == Saving(kept=frozenset({1, 2}), in_place=True)


def test_a_rectifier_may_overwrite_what_it_is_given():
    found = saved(lambda m, x: F.relu(m.conv(x)), conv=CONV())["relu"]
    assert found == Saving(in_place=True, rectifier="relu", overwrites=True)
    assert saved(lambda m, x: m.conv(x).add_(x), conv=CONV())["add"] == Saving(in_place=True, changes=True, overwrites=True)


def test_a_parameter_that_is_computed_is_not_kept():
    conv = nn.utils.parametrizations.weight_norm(CONV())
    assert saved(lambda m, x: m.conv(x), conv=conv)["conv.conv2d"].kept == {2}


# With and without.

CONFIGS = {
    "int8": qsim.int8(),
    "int4": qsim.int4(),
    "fp8": qsim.fp8(),
    "symmetric": dataclasses.replace(qsim.int8(), activation=qsim.TensorSpec(symmetric=True)),
    "float bias": dataclasses.replace(qsim.int8(), bias=False),
    "learnable": dataclasses.replace(
        qsim.int8(), weight=dataclasses.replace(qsim.int8().weight, learnable=True), activation=qsim.TensorSpec(learnable=True)
    ),
    "running": dataclasses.replace(qsim.int8(), activation=qsim.TensorSpec(method="ema")),
}


def bits(t: Tensor) -> Tensor:
    return t.detach().contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()]).clone()


def results(sim: qsim.QuantSim, x: Tensor, mode: str) -> list[Tensor]:
    """Bits of outputs and gradients of two calls: what one keeps may reach the other."""
    sim.train(mode == "train")
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        if mode == "no_grad":
            with torch.no_grad():
                found.append(bits(sim(x)))
        elif mode == "inference":
            with torch.inference_mode():
                found.append(bits(sim(x)).clone())
        else:
            given = x.clone().requires_grad_()
            sim.zero_grad()
            y = sim(given)
            (y * torch.linspace(-1, 1, y.numel()).reshape(y.shape)).sum().backward()
            found += [bits(y), bits(given.grad), *(bits(p.grad) for p in sim.parameters() if p.grad is not None)]
    return found


def assert_same(sim: qsim.QuantSim, x: Tensor, modes: tuple[str, ...] = ("no_grad", "inference", "eval", "train")) -> None:
    other = copy.deepcopy(sim)
    other.savings = False
    for mode in modes:
        ours, theirs = results(sim, x, mode), results(other, x, mode)
        assert len(ours) == len(theirs)
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert torch.equal(a, b), (mode, i)


def reused(m, x):
    return m.act(m.conv(m.act(m.conv(x)))) + m.act(x * 1.0)


def recomputed(m, x):
    for block in (m.first, m.second):
        x = checkpoint(block, x, use_reentrant=False)
    return x


def data_dependent(m, x):
    y = m.conv(x)
    return F.relu(y) if x.mean() > 100 else F.relu(m.conv(y)) * 2


ZOO: dict[str, Callable[[], nn.Module]] = {
    "network": ConvNet,
    "residual": lambda: nn.Sequential(CONV(), ResidualBlock(4), nn.ReLU6(inplace=True), CONV(), nn.Hardtanh(-0.1, 0.1)),
    "reused": lambda: Forward(reused, conv=CONV(), act=nn.ReLU()),
    "branches": lambda: Forward(
        lambda m, x: torch.cat([F.relu(m.a(x)), torch.sigmoid(m.b(x)), F.gelu(m.a(x)) * x, F.leaky_relu(m.b(x), inplace=True)], 1),
        a=CONV(),
        b=CONV(),
    ),
    "in place": lambda: Forward(lambda m, x: m.a(x).mul_(2).sub_(0.1) + F.relu(m.b(x).add_(x)), a=CONV(), b=CONV()),
    "checkpoint": lambda: Forward(recomputed, first=nn.Sequential(CONV(), nn.ReLU(), CONV()), second=nn.Sequential(CONV(), nn.ReLU(True))),
    "branch not recorded": lambda: Forward(data_dependent, conv=CONV()),
    "attention": lambda: Forward(
        lambda m, x: F.relu(m.norm(m.mix(*[x.flatten(2).transpose(1, 2)] * 3)[0])), mix=nn.MultiheadAttention(4, 2), norm=nn.LayerNorm(4)
    ),
    "tied": lambda: Forward(lambda m, x: F.relu(F.linear(F.linear(x, m.fc.weight).relu(), m.fc.weight.t())), fc=nn.Linear(6, 6)),
}


@pytest.mark.parametrize(
    ("name", "config"), [*((name, "int8") for name in ZOO), *(("residual", config) for config in CONFIGS if config != "int8")]
)
def test_same_bits_with_and_without(name, config):
    x = torch.randn(2, 1, 12, 12) if name == "network" else torch.randn(2, 4, 6, 6)
    sim = qsim.QuantSim(seeded(ZOO[name]), x, CONFIGS[config])
    sim.calibrate([x], progress=False)
    beyond = x * 2
    beyond.view(-1)[:5] = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf])
    assert_same(sim, beyond)


@pytest.mark.parametrize("name", ZOO)
def test_calibration_sees_the_same_with_and_without(name):
    x = torch.randn(2, 1, 12, 12) if name == "network" else torch.randn(2, 4, 6, 6)
    found = []
    for savings in (True, False):
        sim = qsim.QuantSim(seeded(ZOO[name]), x)
        sim.savings = savings
        outputs: list[Tensor] = []
        sim.calibrate([x, x * 2], lambda model, batch, outputs=outputs: outputs.append(model(batch).clone()), progress=False)
        found.append([*outputs, *sim.state_dict().values()])
    assert len(found[0]) == len(found[1])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("kept", [False, True])
def test_relu_overwrites_in_calibration_what_nothing_reads_again(kept):
    shown: list[Tensor] = []
    addresses: list[int] = []

    def forward(m, x):
        y = m.conv(x)
        addresses.append(y.data_ptr())
        if kept:
            shown.append(y)
        z = F.relu(y)
        addresses.append(z.data_ptr())
        return z * 2.0

    sim = qsim.QuantSim(Forward(forward, conv=CONV()).eval(), IMAGE)
    sim.calibrate([IMAGE] * 2, progress=False)  # the first call learns
    assert (addresses[-2] == addresses[-1]) is not kept
    assert not kept or any(bool((y < 0).any()) for y in shown)


def test_rectifiers_at_their_ends():
    """Zeros of both signs, what rounds to zero, NaN and infinities reach the ReLUs as they are."""
    values = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 0.001, -0.001, torch.nan, torch.inf, -torch.inf, 5.9, 6.0, 6.1, -1.0, 1.0, 0.49, 0.5])
    model = Forward(lambda m, x: (F.relu(x + x * 0), F.relu6(x + x * 0), F.hardtanh(x + x * 0, -0.5, 0.5)))
    for config in CONFIGS.values():
        sim = qsim.QuantSim(Forward(lambda m, x: torch.stack(m.inner(x)), inner=model), values.nan_to_num(0, 7, -7), config)
        sim.calibrate([values.nan_to_num(0, 7, -7)], progress=False)
        sim.disable("input")
        assert_same(sim, values)


@settings(max_examples=10)
@given(st.lists(st.sampled_from(["conv", "relu", "relu_", "relu6", "sigmoid", "add", "add_", "max", "view", "cat"]), max_size=6))
def test_no_network_computes_anything_else(names):
    def forward(m, x):
        earlier = x = x * 1.0
        for i, name in enumerate(names):
            if name in ("conv", "relu", "relu_", "relu6", "max"):
                x = getattr(m, f"{name}{i}")(x)
            elif name == "sigmoid":
                earlier = x = torch.sigmoid(x)
            elif name == "view":
                x = x.flatten(2).view_as(x)
            elif name == "cat":
                x = torch.cat([x[:, :2], earlier[:, 2:]], 1)
            else:
                x = (x * 1.5).add_(earlier) if name == "add_" else x + earlier
        return x * 2.0

    layers = {"conv": CONV, "relu": nn.ReLU, "relu_": lambda: nn.ReLU(True), "relu6": nn.ReLU6, "max": lambda: nn.MaxPool2d(3, 1, 1)}
    modules = {f"{name}{i}": layers[name]() for i, name in enumerate(names) if name in layers}
    x = torch.randn(2, 4, 6, 6)
    try:
        (Forward(forward, **modules)(x.requires_grad_())).sum().backward()
    except RuntimeError:
        return  # no gradient in float either: a ReLU overwrites what a sigmoid saved
    x = x.detach()
    sim = qsim.QuantSim(seeded(lambda: Forward(forward, **modules)), x)
    sim.calibrate([x], progress=False)
    assert_same(sim, x * 2, ("no_grad", "train"))
