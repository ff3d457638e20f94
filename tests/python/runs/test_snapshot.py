"""Recording a model that changes all it can reach leaves no trace in it."""

import copy
import random

import pytest
import torch
from torch import nn

from qsim.graph.record.record import record
from qsim.runs.snapshot import ContentsLostError, Snapshot

X = torch.randn(2, 4, 6, 6)


class Restless(nn.Module):
    """Changes all it can reach while it runs."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.conv, self.bn, self.fails, self.calls = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), fails, 0
        self.embedding = nn.Embedding(10, 4, max_norm=0.1)
        self.register_buffer("seen", torch.zeros(1))
        self.bn.eval()

    def forward(self, x):
        self.calls += 1
        self.cache = x
        self.seen = self.seen + 1
        self.conv.weight.data.clamp_(-0.01, 0.01)
        self.embedding(torch.arange(10))
        self.extra = nn.Linear(2, 2)
        self.conv.register_forward_hook(lambda module, args, out: out)
        y = self.bn(self.conv(x.mul_(2))) + torch.rand(1) + random.random()
        self.bn.running_mean.fill_(7)
        if self.fails:
            raise RuntimeError("as asked")
        return y


@pytest.mark.parametrize("fails", [False, True])
def test_model_is_left_as_it_was(fails):
    model, x = Restless(fails), X.clone()
    parameters, attributes = dict(model.named_parameters()), [set(vars(m)) for m in model.modules()]
    state, flags, classes = copy.deepcopy(model.state_dict()), [m.training for m in model.modules()], [type(m) for m in model.modules()]
    seen, versions = model.seen, [p._version for p in model.parameters()]
    rng, python = torch.get_rng_state(), random.getstate()

    tape, report = record(model, [((x,), {})])

    assert torch.equal(rng, torch.get_rng_state())
    assert python == random.getstate()
    assert torch.equal(x, X)
    assert all(a is b for a, b in zip(parameters.values(), model.parameters(), strict=True))
    torch.testing.assert_close(dict(model.state_dict()), dict(state), rtol=0, atol=0)
    assert flags == [m.training for m in model.modules()]
    assert classes == [type(m) for m in model.modules()]
    assert attributes == [set(vars(m)) for m in model.modules()]
    assert model.seen is seen
    assert model.calls == 0
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert versions[:2] == [p._version for p in model.conv.parameters()]  # a graph that the caller holds stays usable
    assert bool(tape.steps) != fails
    assert len(report) == 2 * fails


class Codebook(nn.Module):
    """Renews its entries as it runs, as some do that quantize vectors."""

    def __init__(self, writes: str = "") -> None:
        super().__init__()
        self.entries, self.writes = nn.Parameter(torch.randn(7, 3), requires_grad=False), writes
        self.embedding = nn.Embedding(10, 3, max_norm=0.1)
        self.register_buffer("seen", torch.zeros(7))

    def forward(self, x):
        self.seen.add_(1)
        if self.writes == ("training" if self.training else "eval"):
            self.entries.data[-1, -1] += 1
        return x @ self.entries.T + self.embedding.weight.sum() + self.embedding(torch.arange(10)).sum()


def test_parameters_of_large_models_are_looked_at_in_place_of_being_copied(monkeypatch):
    model, x = Codebook(), torch.randn(2, 3)
    copied = {t.data_ptr() for t, _ in Snapshot(model, whole=False).tensors}
    assert copied == {t.data_ptr() for t in (*model.parameters(), *model.buffers())}  # of small ones all are

    monkeypatch.setattr("qsim.runs.snapshot._COPIED", 0)
    monkeypatch.setattr("qsim.runs.snapshot._SMALL", 0)
    before = copy.deepcopy(model.state_dict())
    copied = {t.data_ptr() for t, _ in Snapshot(model, whole=False).tensors}
    assert copied == {model.embedding.weight.data_ptr(), model.seen.data_ptr()}  # a forward writes to these
    record(model, [((x,), {})])
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)

    for writes in ("eval", "training"):
        with pytest.raises(ContentsLostError, match=r"changed its parameter 'entries'.*register_buffer.*load the model again"):
            record(Codebook(writes), [((x,), {})])
