"""Losses, metrics, and what only they read stay float."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from by_hand import linear, on_grid, simulated
from models import Calls, Forward
from torch import nn

import qsim

X = torch.randn(32, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(32) % 4


class Classifier(nn.Module):
    """As Hugging Face's: a loss if there are labels."""

    def __init__(self, loss, *, shift: bool = False) -> None:
        super().__init__()
        self.a, self.head, self.loss, self.shift = nn.Linear(8, 16), nn.Linear(16, 4), loss, shift

    def forward(self, x, labels=None):
        logits = self.head(F.relu(self.a(x)))
        if labels is None:
            return {"logits": logits}
        scores = logits[:-1] if self.shift else logits
        return {"loss": self.loss(scores, labels[1:] if self.shift else labels), "logits": logits}


def negative_log_likelihood(scores, labels):
    return F.nll_loss(F.log_softmax(scores, -1), labels)


def module_loss(scores, labels):
    return nn.CrossEntropyLoss(label_smoothing=0.1)(scores, labels)


def binary(scores, labels):
    return F.binary_cross_entropy_with_logits(scores, F.one_hot(labels, 4).to(scores.dtype))


def squared(scores, labels):
    return F.mse_loss(scores, F.one_hot(labels, 4).to(scores.dtype))


def absolute(scores, labels):
    return F.l1_loss(scores, F.one_hot(labels, 4).to(scores.dtype))


def smooth(scores, labels):
    return F.smooth_l1_loss(scores, F.one_hot(labels, 4).to(scores.dtype))


def divergence(scores, labels):
    return F.kl_div(F.log_softmax(scores, -1), F.one_hot(labels, 4).to(scores.dtype) * 0.9 + 0.025, reduction="batchmean")


LOSSES = [F.cross_entropy, negative_log_likelihood, module_loss, binary, squared, absolute, smooth, divergence]


def made(loss, **options) -> Classifier:
    torch.manual_seed(0)
    return Classifier(loss, **options).double().eval()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("shift", [False, True])
def test_a_loss_is_that_of_the_quantized_logits(loss, shift):
    m = made(loss, shift=shift)
    sim = simulated(m, X, LABELS)
    hidden = F.relu(m.a(X))
    y = on_grid(F.relu(linear(m.a, on_grid(X))), hidden)
    logits = on_grid(linear(m.head, y), m.head(hidden))
    expected = loss(logits[:-1] if shift else logits, LABELS[1:] if shift else LABELS)
    found = sim(X, LABELS)
    torch.testing.assert_close(found["logits"], logits, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found["loss"], expected, rtol=1e-9, atol=1e-9)
    expected.backward()
    found["loss"].backward()
    for ours, theirs in zip(sim.model.parameters(), m.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-6, atol=1e-12)


def test_the_loss_has_no_quantizer():
    sim = simulated(made(F.cross_entropy), X, LABELS)
    assert not [key for key in sim.quantizers() if "loss" in key or "cross_entropy" in key]


def test_every_batch_has_its_own_loss():
    m = made(F.cross_entropy)
    sim = simulated(m, X, LABELS)
    losses = {round(float(sim(X + shift, LABELS)["loss"]), 9) for shift in (0.0, 0.1, -0.2, 0.4)}
    assert len(losses) == 4


def test_training_on_the_models_own_loss():
    m = made(F.cross_entropy)
    sim = simulated(m, X, LABELS)
    sim.train()
    optimizer = torch.optim.SGD(sim.parameters(), 0.5)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = sim(X, LABELS)["loss"]
        loss.backward()
        assert qsim.clip_grad_norm_(sim.parameters(), math.inf) > 1e-3
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < losses[0] - 0.1


def test_targets_that_only_a_loss_reads_stay_float():
    class Regression(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 4)

        def forward(self, x, target):
            y = self.a(x)
            return F.mse_loss(y, target), y

    m, target = Regression().double().eval(), torch.randn(32, 4, dtype=torch.float64)
    sim = simulated(m, X, target)
    y = on_grid(linear(m.a, on_grid(X)), m.a(X))
    loss, found = sim(X, target)
    torch.testing.assert_close(found, y, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(loss, F.mse_loss(y, target), rtol=1e-9, atol=1e-9)


def test_a_metric_is_not_quantized():
    class Measured(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 4)

        def forward(self, x, labels):
            y = self.a(x)
            accuracy = (y.argmax(-1) == labels).to(y.dtype).mean()
            return F.cross_entropy(y, labels), accuracy, y

    m = Measured().double().eval()
    sim = simulated(m, X, LABELS)
    other = LABELS.roll(3)
    _, accuracy, y = sim(X, other)
    assert float(accuracy) == float((y.argmax(-1) == other).double().mean())


def test_without_labels_after_an_example_with_them():
    m = made(F.cross_entropy)
    sim = simulated(m, X, LABELS)
    assert torch.equal(sim(X)["logits"], sim(X, LABELS)["logits"])


def test_noise_in_training_leaves_a_bias_on_its_grid_in_evaluation():
    def noisy(m, x):
        h = torch.relu(m.a(x))
        return m.b(h + torch.randn_like(h) if m.training else h)

    sim = simulated(Forward(noisy, a=nn.Linear(8, 8), b=nn.Linear(8, 4)), torch.randn(4, 8), config=qsim.int8())
    assert [bias.parameter for bias in sim.decisions.biases] == ["a.bias", "b.bias"]
    assert "b.bias" not in {left.name for left in sim.summary().left}


# What other code computes with, and gives back, is no metric.

HANDED_OUT = {
    "numpy": lambda y: torch.from_numpy(y.detach().numpy() * 2),
    "an array": lambda y: torch.as_tensor(np.multiply(y.detach(), 2)),
    "a list": lambda y: torch.tensor([[2 * v for v in row] for row in y.tolist()], dtype=y.dtype),
    "numbers": lambda y: torch.tensor([[2 * float(v) for v in row] for row in y], dtype=y.dtype),
}


@pytest.mark.parametrize("way", HANDED_OUT)
@pytest.mark.parametrize("then", ["returned", "read"])
def test_what_other_code_computes_with_is_quantized(way, then):
    def forward(model, x):
        y = F.relu(model.a(x))
        z = HANDED_OUT[way](y * y)
        return model.b(z) if then == "read" else z

    torch.manual_seed(0)
    model = Forward(forward, a=nn.Linear(8, 8), b=nn.Linear(8, 4)).double().eval()
    sim = simulated(model, X)
    sim.disable("b.*")
    y = F.relu(linear(model.a, on_grid(X)))
    whole = F.relu(model.a(X))
    squares = on_grid(on_grid(y, whole) ** 2, whole**2)
    expected = model.b(2 * squares) if then == "read" else 2 * squares
    torch.testing.assert_close(sim(X), expected, rtol=1e-9, atol=1e-9)


def test_what_a_log_is_given_stays_in_float():
    log = []

    def forward(model, x):
        y = model.a(x)
        log.append((y * y).detach().numpy())
        return y

    sim = simulated(Forward(forward, a=nn.Linear(8, 8)).double().eval(), X)
    assert list(sim.quantizers()) == ["input", "a.weight", "a.output"]


def test_the_operations_before_other_code_overflow_in_half_precision():
    def forward(_, x):
        return torch.from_numpy((x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 0.1)).numpy() * 2)

    sim = qsim.QuantSim(Forward(forward), X.float(), qsim.fp16())
    assert not sim(X.float() * 400).any()  # squares of Inf: float16 has the mean at Inf
    assert torch.equal(sim(X.float() * 400).half(), Forward(forward)(X.half() * 400))


NUMBERS = {
    "a scaled mean": lambda x: (x * 3000).square().mean() * 0.1,
    "a scaled maximum": lambda x: (x * 1e6).amax() * 1e-6,
    "a mean with large numbers put in": lambda x: x.masked_fill(x > 1, 1e6).mean(),
    "a mean with a large number assigned": lambda x: torch.where(x > 1, 1e6, x).sum() * 1e-6,
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_loss_that_half_precision_leaves_in_float_has_its_numbers_in_float(name):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).half().float()
    sim = qsim.QuantSim(Calls(NUMBERS[name]), x, qsim.fp16())
    assert {left.name for left in sim.summary().left} & {"mul", "mul_2", "mean", "amax", "sum"}
    assert torch.equal(sim(x), NUMBERS[name](x))
