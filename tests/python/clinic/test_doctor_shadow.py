"""The shadow execution, against the same model with its tensors rounded by hand and against torch's own half precision."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qsim.clinic.examined_model import ExaminedModel
from qsim.clinic.half_run import HalfPrecision
from qsim.clinic.shadow import Shadow
from qsim.clinic.targets import TARGETS


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


def shadow(model: nn.Module, *batches: object, target: str = "onnxruntime-fp16", sqnr: float | None = None) -> Shadow:
    return Shadow(ExaminedModel(model, batches[0]), TARGETS[target], batches, sqnr=sqnr)


def half(x: Tensor, dtype: torch.dtype = torch.float16) -> Tensor:
    return x.to(dtype).to(torch.float32)


class DecomposedNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred * (centred.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()


class Cumulative(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv1d(3, 4, 3), nn.Conv1d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        sums = self.conv(x).relu().cumsum(-1)
        return self.last((sums[..., 8:] - sums[..., :-8]) / 8)


@pytest.mark.parametrize(("target", "dtype"), [("onnxruntime-fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_rounds_operands_weights_and_results(target, dtype):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8)), torch.randn(64, 16)
    parameters = [half(p, dtype) for p in model.parameters()]
    hidden = half(F.gelu(half(F.linear(half(x, dtype), *parameters[:2]), dtype)), dtype)
    expected = half(F.linear(hidden, *parameters[2:]), dtype)
    noise = (model(x) - expected).square().sum()
    outcome = shadow(model, x, target=target).probe()
    assert outcome.sqnr == pytest.approx(10 * math.log10(model(x).square().sum() / noise), abs=1e-3)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: x + y * 3.25,
        lambda x, y: (x / (y.abs() + 0.125)).sqrt(),
        lambda x, y: (x.exp() - 2**-10).log().tanh(),
        lambda x, y: torch.cat([x, y.sigmoid()]).transpose(0, 1)[1:] * x.mean(),
        lambda x, y: torch.where(x > 1, x * 3e4, torch.inf) - y.clamp(-0.25, 6e4),
        lambda x, y: F.gelu(x).reshape(-1, 2).sum(-1).add_(y.flatten()[:128]).relu_(),
        lambda x, y: (x.softmax(-1) * 2**-16).masked_fill(y > 1, 2**-20),
    ],
)
def test_is_torch_in_half_precision_operation_by_operation(function):
    """On the CPU torch computes on float16 tensors in float32, numbers among the arguments unrounded, and rounds the result."""

    class Calls(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return function(x, y)

    torch.manual_seed(0)
    x, y = torch.rand(16, 16) * 3, torch.randn(16, 16)
    subject = ExaminedModel(Calls(), (x, y))
    with subject.visited(HalfPrecision("float16", frozenset(), {}, {})):
        out = subject.run((x, y))
    expected = function(x.half(), y.half())
    assert out.dtype == torch.float32
    assert torch.equal(out, half(out))
    torch.testing.assert_close(out.half(), expected, rtol=2**-9, atol=2**-23)
    assert torch.equal(out.isfinite(), expected.isfinite())


def test_a_kept_operation_reads_and_returns_float32():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 8)), torch.randn(64, 16)
    parameters = [*model.parameters()]
    hidden = half(F.linear(x, *parameters[:2]))  # rounded by the one that reads it
    expected = half(F.linear(hidden, *(half(p) for p in parameters[2:])))
    noise = (model(x) - expected).square().sum()
    probed = shadow(model, x)
    assert probed.probe(frozenset({"0"})).sqnr == pytest.approx(10 * math.log10(model(x).square().sum() / noise), abs=1e-3)
    assert probed.probe(frozenset({"0", "1"})).sqnr == math.inf


def test_an_overflow_that_the_output_hides_is_not_ok():
    x = torch.randn(4, 64) * 400
    outcome = shadow(DecomposedNorm(), x).probe()
    assert not outcome.ok
    assert outcome.nonfinite == 0
    assert outcome.sqnr < 5
    assert outcome.first == "pow"
    assert shadow(DecomposedNorm(), x / 100).probe().ok


def test_only_the_whole_chain_cures():
    torch.manual_seed(0)
    model, x = Cumulative(), torch.rand(1, 3, 2000) * 300
    probed = shadow(model, x)
    outcome = probed.probe()
    assert outcome.first == "cumsum"
    assert outcome.nonfinite > 0
    assert not probed.probe(frozenset({"cumsum"})).ok  # the subtraction reads Inf
    assert not probed.probe(frozenset({"sub"})).ok
    assert probed.probe(frozenset({"cumsum", "sub"})).ok
    assert probed.probes == 4


def test_numbers_among_the_arguments_are_rounded():
    class Masked(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return (x + (1 - mask) * torch.finfo(torch.float32).min).softmax(-1)

    outcome = shadow(Masked(), (torch.randn(2, 8), torch.ones(2, 8))).probe()
    assert outcome.first == "mul"
    assert outcome.nonfinite == 16


def test_data_weights_and_model_are_left_alone():
    torch.manual_seed(0)

    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x.mul_(3.3)
            y = self.linear(x).relu_()
            y += x
            y[:, :2] = 1 / 3
            return y.mul_(1.7)

    model, x = InPlace(), torch.randn(4, 8)
    before, state = x.clone(), {k: v.clone() for k, v in model.state_dict().items()}
    probed = shadow(model, x)
    y = half(half(x) * half(torch.tensor(3.3)))
    z = half(half(F.linear(y, half(model.linear.weight), half(model.linear.bias))).relu() + y)
    z[:, :2] = half(torch.tensor(1 / 3))
    expected, out = half(z * half(torch.tensor(1.7))), model(x.clone())
    assert probed.probe().sqnr == pytest.approx(10 * math.log10(out.square().sum() / (out - expected).square().sum()), abs=1e-3)
    assert probed.probe() == probed.probe()
    assert torch.equal(x, before)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


def test_a_model_that_checks_its_numbers():
    class Careful(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * x
            if not y.isfinite().all():
                raise ValueError("not finite")
            return y

    outcome = shadow(Careful(), torch.full((2,), 300.0)).probe()
    assert not outcome.ok
    assert outcome.error == "ValueError: not finite"
    assert outcome.first == "mul"


def test_random_numbers_are_the_same_in_every_probe():
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.randn_like(x)

    probed = shadow(Noisy(), torch.randn(4, 64))
    assert probed.probe().ok
    assert probed.probe() == probed.probe()


def test_needs_a_format():
    with pytest.raises(ValueError, match="no float format"):
        shadow(nn.Linear(2, 2), torch.randn(1, 2), target="float32")
