"""A step that goes wrong names the operation, its module and the step."""

import re

import pytest
import torch
import torch.nn.functional as F
from models import ConvNet, Forward, seeded
from torch import nn

import qsim
from qsim import NonFiniteError


class Net(nn.Module):
    """Makes what `spoil` says out of finite numbers, in a module of its own."""

    def __init__(self, spoil) -> None:
        super().__init__()
        self.fc1, self.inner, self.fc2 = nn.Linear(4, 4), Forward(lambda m, x: spoil(x) + m.shift, shift=None), nn.Linear(4, 2)
        self.inner.shift = nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return self.fc2(self.inner(self.fc1(x)))


def simulated(spoil=lambda x: x) -> qsim.QuantSim:
    torch.manual_seed(0)
    sim = qsim.QuantSim(Net(lambda x: x).eval(), torch.randn(3, 4))
    sim.calibrate([torch.randn(3, 4)], progress=False)
    sim.model.inner.run = lambda m, x: spoil(x) + m.shift
    return sim.train()


def caught(sim: qsim.QuantSim, loss, spoil=lambda step: None) -> NonFiniteError:
    """What a watched loop of four steps raises."""

    def loop() -> None:
        with sim.watch() as watch:
            for step in range(4):
                if (made := spoil(step)) is not None:
                    sim.model.inner.run = lambda m, x: made(x) + m.shift
                loss(sim(torch.randn(3, 4))).backward()
                watch.step()

    with pytest.raises(NonFiniteError) as raised:
        loop()
    return raised.value


@pytest.mark.parametrize(
    ("spoil", "op", "what"),
    [
        (lambda x: torch.log(x - x.detach().max() - 1), "log", "NaN"),
        (lambda x: x / (x.detach() * 0), "div", "NaN|Inf"),
        (lambda x: torch.exp(x * 0 - -1e4), "exp", "Inf"),
        (lambda x: x.clone().mul_(1e30).mul_(1e30), "mul_", "Inf"),
    ],
)
def test_forward(spoil, op, what):
    sim = simulated()
    error = caught(sim, lambda y: y.sum(), lambda step: spoil if step == 2 else None)
    assert re.match(rf"qsim: step 2, forward: {op} in 'inner' made ({what}) of finite numbers", str(error))
    event = error.events[0]
    assert (event.step, event.module, event.op, event.backward) == (2, "inner", op, False)


def test_backward():
    error = caught(simulated(lambda x: (x * 0).sqrt()), lambda y: y.sum())
    assert re.match("qsim: step 0, backward: SqrtBackward0 in 'inner' made (NaN|Inf) of finite numbers", str(error))


def test_the_loss_is_outside_the_model():
    assert "forward: log outside the model made" in str(caught(simulated(), lambda y: torch.log(y * 0 - 1).sum()))
    assert "backward: SqrtBackward0 outside the model made" in str(caught(simulated(), lambda y: (y * 0).sqrt().sum()))


def test_what_came_in_broken_is_not_blamed_on_an_operation():
    sim = simulated()
    x = torch.randn(3, 4)
    x[1, 2] = torch.nan
    with sim.watch():
        sim(x).sum()


def test_masks_are_no_accident():
    attend = Forward(lambda m, x: F.softmax(m.fc(x).masked_fill(torch.eye(4, dtype=torch.bool), -torch.inf), -1), fc=nn.Linear(4, 4))
    sim = qsim.QuantSim(attend.eval(), torch.randn(4, 4))
    sim.calibrate([torch.randn(4, 4)], progress=False)
    with sim.watch() as watch:
        sim.train()(torch.randn(4, 4)).square().sum().backward()
        watch.step()
    assert watch.steps == 1


def test_watching_changes_nothing_and_leaves_nothing():
    sim = qsim.QuantSim(seeded(ConvNet), torch.randn(4, 1, 12, 12), qsim.int8().override("*", op_type="conv2d", learnable=True))
    x = torch.randn(4, 1, 12, 12)
    sim.calibrate([x], progress=False)
    sim.train()

    def step() -> list[torch.Tensor]:
        torch.manual_seed(0)
        sim.zero_grad()
        out = sim(x)
        out.sum().backward()
        return [out.detach(), *(p.grad for p in sim.parameters())]

    expected = step()
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in sim.modules()]
    with sim.watch() as watch:
        got = step()
        watch.step()
    assert all(map(torch.equal, got, expected))
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in sim.modules()] == hooks
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert sim.summary().notes == []


def test_the_message_lists_what_follows():
    sim = simulated(lambda x: torch.exp(x * 0 - -1e4) - torch.exp(x * 0 - -1e4))
    with pytest.raises(NonFiniteError) as caught, sim.watch():
        sim(torch.randn(3, 4))
    lines = str(caught.value).splitlines()
    assert len(caught.value.events) >= 3
    assert all(re.match(r"  then step 0, forward: \w+ in 'inner' made (NaN|Inf)", line) for line in lines[1:3])
