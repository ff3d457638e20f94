"""Who uses the parameters of a module."""

import pytest
import torch
import torch.nn.functional as F
from models import Forward
from torch import nn

from qsim.graph.record.record import record
from qsim.graph.record.uses import Uses, computed_anew, owner


def recorded(forward, **modules):
    model = Forward(forward, **modules)
    tape, _ = record(model, [((torch.randn(3, 4),), {})])
    return model, tape


CASES = [
    (lambda m, x: m.a(x), None),
    (lambda m, x: m.b(m.a(m.a(x))), "'a' is called 2 times in one forward"),
    (lambda m, x: m.b(x), "'a' is not called in eval mode with these example inputs"),
    (lambda m, x: m.a(x) if m.training else m.b(x), "'a' is not called in eval mode with these example inputs"),
    (lambda m, x: m.a(x) * m.a.bias.sum(), "the bias of 'a' is also read by 'sum'"),
    (lambda m, x: (m.a(x), m.a.weight), "the weight of 'a' is also returned by the model or read out as a mask or number"),
    (lambda m, x: m.a(x) + (F.linear(x, m.a.weight) if m.training else 0), "the weight of 'a' is also read by 'linear' in training mode"),
]


@pytest.mark.parametrize(("forward", "obstacle"), CASES, ids=[str(reason)[:30] for _, reason in CASES])
def test_obstacles(forward, obstacle):
    model, tape = recorded(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    assert Uses(model, tape).obstacle("a") == obstacle


def test_norms_and_embeddings_count_as_called():
    class Twice(nn.Module):
        """Reads its weight twice in one call."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return x * self.weight * self.weight

    model, tape = recorded(
        lambda m, x: m.norm(m.own(x)) + m.table(torch.zeros(3, dtype=torch.long)),
        norm=nn.LayerNorm(4),
        own=Twice(),
        table=nn.Embedding(5, 4),
    )
    uses = Uses(model, tape)
    assert [uses.obstacle(name) for name in ("norm", "own", "table")] == [None, None, None]


def test_computed_anew():
    model, tape = recorded(lambda m, x: m.b(m.a(x)), a=nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), b=nn.Linear(4, 4))
    layers = {owner(step): computed_anew(step) for step in Uses(model, tape).products}
    assert layers == {"a": "weight", "b": None}
