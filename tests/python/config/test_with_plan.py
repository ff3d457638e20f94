"""A config with a plan: the simulation computes as hardware does that casts at the border of what stays in float32."""

import pytest
import torch
import torch.nn.functional as F
from models import Calls
from torch import nn

import qsim
from qsim.deploy.engine_plan import Plan

LARGE = 65504.0


def half(x):
    return x.to(torch.float16).to(torch.float32)


class Squares(nn.Module):
    """The sum of squares leaves float16, and comes back by a factor: a chain of three."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        y = self.fc(x) * 300
        total = (y * y).cumsum(-1)
        return self.head(total * 1e-6)


class Normalized(nn.Module):
    """What it is given leaves float16; the division brings it back. The mean reads the input too."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return torch.relu(self.conv(x / 1e5)) + F.softsign(x).mean()


class Rectified(nn.Module):
    """The convolution runs as one with the rectifier behind it, and overflows."""

    def __init__(self):
        super().__init__()
        self.conv, self.relu, self.scale = nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 1)
        nn.init.constant_(self.conv.weight, 60.0)
        nn.init.constant_(self.scale.weight, 1e-4)

    def forward(self, x):
        return self.scale(self.relu(self.conv(x)))


def simulated(model, x, *keep):
    return qsim.QuantSim(model.eval(), x, qsim.fp16().with_plan(Plan(keep, "float16")))


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def test_a_plan_is_overrides():
    config = qsim.fp16().with_plan(Plan(("a.b", "c[0]"), "float16"))
    for name in ("a.b", "c[0]"):
        assert config.spec_for(name, None, "activation") is None
        assert config.spec_for(name, None, "weight") is None
    assert config.spec_for("c0", None, "activation") == qsim.fp16().activation
    assert qsim.Config.from_json(config.to_json()) == config


def test_the_whole_chain_cures_and_part_of_it_does_not():
    model, x = Squares(), torch.randn(16, 8)
    expected = model(x)
    assert not simulated(model, x)(x).isfinite().all()
    cured = simulated(model, x, "mul_2", "cumsum", "mul_3")(x)
    torch.testing.assert_close(cured, expected, rtol=1e-2, atol=1e-3)
    for part in (("mul_2",), ("mul_2", "cumsum"), ("cumsum", "mul_3"), ("mul_2", "mul_3")):
        assert not simulated(model, x, *part)(x).isfinite().all(), part


def test_what_is_kept_computes_in_float32_and_what_reads_it_rounds():
    model, x = Squares(), torch.randn(16, 8)
    sim = simulated(model, x, "mul_2", "cumsum", "mul_3")
    weight, bias = model.fc.weight, half(model.fc.bias)
    y = half(half(F.linear(half(x), half(weight), bias)) * 300)
    kept = (y * y).cumsum(-1) * 1e-6
    expected = half(F.linear(half(kept), half(model.head.weight), half(model.head.bias)))
    assert torch.equal(sim(x), expected)


def test_an_input_that_is_read_in_float32_is_not_rounded_before():
    model, x = Normalized(), torch.rand(2, 3, 8, 8) * 1e6
    assert not simulated(model, x)(x).isfinite().all()
    sim = simulated(model, x, "div")
    expected = half(
        half(torch.relu(F.conv2d(half(x / 1e5), half(model.conv.weight), model.conv.bias))) + half(half(F.softsign(half(x))).mean())
    )
    out = sim(x)
    assert torch.equal(out.isfinite(), expected.isfinite())  # the other reader rounds it: Inf / (1 + Inf) is NaN
    assert not out.isfinite().all()
    both = simulated(model, x, "div", "softsign")
    assert "input" not in both.quantizers()
    assert "input" in {entry.name for entry in both.summary().left}
    torch.testing.assert_close(both(x), model(x), rtol=1e-2, atol=1e-3)


def test_a_cast_stands_between_operations_that_would_run_as_one():
    model, x = Rectified(), torch.rand(2, 3, 8, 8) * 100
    assert model(x).isfinite().all()
    assert model.conv(x).max() > LARGE
    for part in ((), ("conv",), ("relu",), ("conv", "relu")):
        sim = simulated(model, x, *part)
        assert not sim(x).isfinite().all(), part
    sim = simulated(model, x, "conv", "relu", "scale")
    torch.testing.assert_close(sim(x), model(x))
    sim = simulated(model, x, "conv")
    assert {"relu.input[0]", "relu.output"} <= set(sim.quantizers())
    assert {"conv.output", "conv.weight"}.isdisjoint(sim.quantizers())


def test_integers_are_left_in_float_as_before():
    """A tensor without a range of its own is not quantized where it is read: that takes calibration, and kernels that do it."""
    model, x = Squares(), torch.randn(16, 8)
    sim = qsim.QuantSim(model.eval(), x, qsim.int8().with_plan(Plan(("mul",), "int8")))
    assert list(sim.quantizers()) == [
        *("input", "fc.weight", "fc.output", "mul_2.output", "cumsum.output", "mul_3.output", "head.weight", "head.output")
    ]


def test_all_readers_of_one_tensor_share_one_cast():
    class Shared(nn.Module):
        def forward(self, x):
            y = x * 2
            return y + 1, y.exp(), y.reshape(-1).sin()

    x = torch.rand(4, 4)
    sim = simulated(Shared(), x, "mul")
    assert list(sim.quantizers()) == ["add.input[0]", "add.output", "exp.output", "sin.input[0]", "sin.output"]
    y = half(x * 2)
    assert all(map(torch.equal, sim(x), (half(y + 1), half(y.exp()), half(y.reshape(-1).sin()))))


@pytest.mark.parametrize("kept", [("div",), ("div", "mul"), ("mul",), ()])
def test_numbers_that_are_put_into_an_input_are_rounded_by_each_that_reads_it_in_half_precision(kept):
    class Placed(nn.Module):
        def forward(self, x):
            y = torch.where(x > 0, 1e6, x).transpose(0, 1)
            return y / 1e3, y.reshape(-1) * 1e-3

    x = torch.randn(4, 8)
    y = torch.where(x > 0, 1e6, x).T
    sim = simulated(Placed(), x, *kept)
    for found, op, factor in zip(sim(x), ("div", "mul"), (1e3, half(torch.tensor(1e-3))), strict=True):
        expected = half(half(y) / 1e3) if op == "div" else half(half(y) * factor).flatten()
        whole = y / 1e3 if op == "div" else y.flatten() * 1e-3
        assert torch.equal(found, whole if op in kept else expected)


def test_numbers_that_are_put_into_results_are_rounded_where_one_of_these_is_in_half_precision():
    class Placed(nn.Module):
        def forward(self, x):
            return (x * 2).transpose(0, 1).masked_fill((x > 0).T, 1e6).reshape(-1) / 1e3

    x = torch.randn(4, 8)
    y = (x * 2).T.masked_fill((x > 0).T, 1e6).flatten()
    assert torch.equal(simulated(Placed(), x, "mul", "div")(x), y / 1e3)
    rounded = half(half(x) * 2).T.masked_fill((x > 0).T, torch.inf).flatten()
    assert torch.equal(simulated(Placed(), x, "div")(x), rounded / 1e3)
    assert torch.equal(simulated(Placed(), x, "mul")(x), half(half(y) / 1e3))


def test_a_constant_beside_results_in_half_precision_leaves_no_number_in_float():
    class Chosen(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.ones(4, 8))

        def forward(self, x):
            return torch.where(x > 0, self.table * 2, x * 3).masked_fill(x < 0, 1e6) / 1e3

    x = torch.randn(4, 8)
    assert torch.equal(simulated(Chosen(), x)(x).isinf(), x < 0)


def test_what_is_kept_trains_and_exports_its_gradient():
    model, x = Squares(), torch.randn(16, 8)
    sim = simulated(model, x, "mul_2", "cumsum", "mul_3").train()
    sim(x).square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in sim.parameters())


IN_PLACE = {  # an operation that is kept, and one in half precision that changes its result: in place, and as another tensor
    "add, div": (lambda y: (y.add_(1e6), y.div_(1e3))[1], lambda y: (y + 1e6) / 1e3, "add"),
    "operators": (lambda y: y.__iadd__(1e6).__itruediv__(1e3), lambda y: (y + 1e6) / 1e3, "add"),
    "rectified": (lambda y: F.relu(y.add_(1e6), inplace=True) * 1e-3, lambda y: F.relu(y + 1e6) * 1e-3, "add"),
    "SiLU": (lambda y: F.silu(y.add_(2049), inplace=True), lambda y: F.silu(y + 2049), "add"),
    "by its view": (lambda y: y.add_(1e6)[:, 0].div_(1e3), lambda y: (y + 1e6)[:, 0] / 1e3, "add"),
}


@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize("way", IN_PLACE)
def test_what_is_changed_in_place_in_half_precision_is_rounded_as_elsewhere(way, how):
    torch.compiler.reset()
    x, found = torch.randn(4, 8), []
    for change, *_, kept in (IN_PLACE[way], IN_PLACE[way][1:]):
        sim = simulated(Calls(lambda x, change=change: change(x * 2)), x, kept)
        found.append((torch.compile(sim, backend="eager", fullgraph=True) if how == "compiled" else sim)(x))
        assert not any("in place" in entry.reason for entry in sim.summary().left)
    assert torch.equal(*found)
    assert not torch.equal(found[0], IN_PLACE[way][1](x * 2))


def test_what_is_rounded_in_place_has_its_gradient():
    x = torch.randn(4, 8)
    gradients = []
    for change, kept in ((lambda y: y.add_(3).div_(7), "add"), (lambda y: (y + 3) / 7, "add")):
        given = x.clone().requires_grad_()
        simulated(Calls(lambda x, change=change: change(x * 2)), x, kept)(given).sum().backward()
        gradients.append(given.grad)
    assert torch.equal(*gradients)


def test_a_divisor_that_is_kept_is_rounded_by_the_division():
    x = torch.full((4, 8), 400.0)
    sim = simulated(Calls(lambda x: x / (x + 1e6)), x, "add")
    assert torch.equal(sim(x), torch.zeros(4, 8))
