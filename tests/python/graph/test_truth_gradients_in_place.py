"""What is written to in place is the tensor that it was: where gradients are off it keeps its own, and older names have the new one."""

import pytest
import torch
import torch.nn.functional as F
from models import Forward
from torch import nn
from torch.utils.checkpoint import checkpoint

import qsim

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

X = torch.linspace(-2, 2, 256).view(32, 8).sin() + 0.05
SIXTEEN = qsim.Config(weight=qsim.TensorSpec(bits=16, symmetric=True), activation=qsim.TensorSpec(bits=16))


def returned(m, x):
    h = m.a(x)
    with torch.no_grad():
        y = h.mul_(2)
    return m.b(y)


def by_the_same_name(m, x):
    h = m.a(x)
    with torch.no_grad():
        h *= 2
    return m.b(h)


def rectified(m, x):
    h = m.a(x)
    with torch.no_grad():
        h = F.relu(h, inplace=True)
    return m.b(h)


def by_both_names(m, x):
    h = m.a(x)
    with torch.no_grad():
        y = h.add_(0.5)
    return m.b(h) * y


def of_another(m, x):
    h = m.a(x)
    with torch.no_grad():
        h += m.b(h)
    return h * h


def of_a_part(m, x):
    h = m.a(x)
    with torch.no_grad():
        h.chunk(2, -1)[0].mul_(2)
    return m.b(h)


def of_a_slice(m, x):
    h = m.a(x)
    with torch.no_grad():
        h[:, 2:5].mul_(2)
    return m.b(h)


def of_a_view(m, x):
    h = m.a(x)[:, 1:7]
    with torch.no_grad():
        h.mul_(2)
    return torch.cat([h, h.square()[:, :2]], -1).tanh()


def of_a_transpose(m, x):
    h = m.a(x).t()
    with torch.no_grad():
        g = h.mul_(2)
    return m.b(g.t())


def of_a_view_and_its_base(m, x):
    h = m.a(x)
    part = h[:, :4]
    with torch.no_grad():
        part *= 2
    return m.b(h) + part.sum()


def under_a_checkpoint(m, x):
    return checkpoint(lambda x: by_the_same_name(m, x) + x, m.b(x).tanh(), use_reentrant=False)


def under_a_reentrant_checkpoint(m, x):
    def inner(x):
        h = x.clone().mul_(2)
        return m.b(h.add_(0.1))

    return checkpoint(inner, m.a(x), use_reentrant=True)


def older_name_of_the_input(m, x):
    """Seed 1741354 of the fuzzer: the other name needs a gradient once it was written to."""
    x = x.clone()
    y = x.relu_()
    z = m.a(x * 0.5)
    y += z
    return z + x


def older_name_of_a_result(m, x):
    h = torch.zeros_like(x) + x
    y = h.tanh_()
    y.mul_(m.a(x))
    return m.b(h) + y


WAYS = [
    returned,
    by_the_same_name,
    rectified,
    by_both_names,
    of_another,
    of_a_part,
    of_a_slice,
    of_a_view,
    of_a_transpose,
    of_a_view_and_its_base,
    under_a_checkpoint,
    under_a_reentrant_checkpoint,
    older_name_of_the_input,
    older_name_of_a_result,
]


def gradients(model: nn.Module, owner: nn.Module) -> list[torch.Tensor]:
    owner.zero_grad()
    y = model(X.clone())
    (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    return [y.detach(), *(p.grad.clone() for p in owner.parameters() if p.grad is not None)]


def assert_near(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).abs().max() < 5e-3 * theirs.abs().max()


@pytest.fixture(params=WAYS, ids=lambda f: f.__name__)
def made(request):
    """A model and its simulation, whose ranges have room: no value lies at the end of one, which would pass no gradient."""
    torch.manual_seed(0)
    model = Forward(request.param, a=nn.Linear(8, 8), b=nn.Linear(8, 8)).eval()
    sim = qsim.QuantSim(model, X.clone(), SIXTEEN)
    sim.calibrate([X * factor for factor in (-4.0, 1.0, 2.0, 4.0)], progress=False)
    return model, sim


def test_gradients_are_those_of_the_float_model(made):
    model, sim = made
    expected = gradients(model, model)
    for _ in range(4):  # calls are followed without Python once they are known
        assert_near(gradients(sim, sim.model), expected)


@pytest.mark.parametrize("format", ["float32", "fp16"])
def test_where_everything_falls_back(made, format):
    model, sim = made
    sim.fallback("*", to=format)
    assert_near(gradients(sim, sim.model), gradients(model, model))


def test_without_savings_and_compiled(made, request):
    model, sim = made
    expected = gradients(model, model)
    sim.savings = False
    assert_near(gradients(sim, sim.model), expected)
    if "reentrant" not in request.node.name:  # Dynamo traces none of these
        assert_near(gradients(torch.compile(sim, backend="eager", fullgraph=True), sim.model), expected)
