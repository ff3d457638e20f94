"""Recording a model that changes all it can reach leaves no trace in it."""

import copy
import logging
import random
import threading
from collections import OrderedDict, deque

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import qsim
from qsim.graph.record.record import record
from qsim.runs.snapshot import ContentsLostError, Snapshot, unchanged

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


class Memory:
    def __init__(self) -> None:
        self.steps, self.mean, self.seen = 0, torch.zeros(4), []


class Slots:
    __slots__ = ("count", "last")

    def __init__(self) -> None:
        self.count = 0


class Keeping(nn.Module):
    """Keeps what it saw outside of parameters and buffers, as streaming models and memory banks do."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.cache, self.queue, self.plain, self.seen = nn.Linear(4, 4), {}, deque(maxlen=2), torch.zeros(4), {1}
        self.memory, self.slots, self.array, self.nest = Memory(), Slots(), np.zeros(2), ([], {"inner": [0, 0]})
        self.ordered, self.hidden = OrderedDict(a=1, b=2), [nn.BatchNorm1d(4)]

    def state(self) -> list[object]:
        memory, norm = self.memory, self.hidden[0]
        kept = [*self.cache.values(), *self.queue, self.plain, memory.mean, norm.running_mean, torch.from_numpy(self.array)]
        counted = memory.steps, memory.seen, self.slots.count, getattr(self.slots, "last", None), self.nest, self.seen, norm.training
        return copy.deepcopy([kept, counted, list(self.ordered.items()), len(self.hidden)])

    def forward(self, x):
        h = self.fc(x)
        y = h + self.plain + self.memory.mean + self.cache.get("before", 0) + len(self.queue) + self.memory.steps
        self.cache["before"] = h.detach()
        self.queue.append(h.detach())
        self.plain.add_(h.detach().mean(0))
        self.memory.mean = self.memory.mean.mul_(0.9).add_(h.detach().mean(0))
        self.memory.steps += 1
        self.memory.seen.append(h)
        self.slots.count += 1
        self.slots.last = 3
        self.array += 1
        self.nest[0].append(1)
        self.nest[1]["inner"][0] += 1
        self.seen.add(2)
        self.ordered.move_to_end("a")
        self.hidden.append(None)
        return self.hidden[0].train()(y)


@pytest.mark.filterwarnings("ignore:QuantSim")  # of what its second call does, which the example did not
def test_what_a_forward_writes_into_what_the_model_holds_is_put_back():
    torch.manual_seed(0)
    model, x = Keeping(), torch.randn(3, 4)
    same = copy.deepcopy(model)
    before, kept = model.state(), (model.cache, model.queue, model.memory, model.plain, model.nest[1]["inner"], model.ordered)
    sim = qsim.QuantSim(model, x, qsim.int16(), inplace=True)
    sim.calibrate([x, x], progress=False)
    for found, then in zip(tree_leaves(sim.model.state()), tree_leaves(before), strict=True):
        assert torch.equal(found, then) if isinstance(then, torch.Tensor) else found == then
    now = sim.model.cache, sim.model.queue, sim.model.memory, sim.model.plain, sim.model.nest[1]["inner"], sim.model.ordered
    assert all(a is b for a, b in zip(kept, now, strict=True))
    with sim.in_float():
        for _ in range(3):
            assert torch.equal(sim(x), same(x))


def test_a_buffer_that_was_given_a_gradient_has_none_afterwards():
    """It could be neither copied nor trained with again."""

    class Remembering(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("seen", torch.ones(4))

        def forward(self, x):
            self.seen.mul_(0.5).add_(self.layer(x).mean(0))
            return x + self.seen

    model = Remembering()
    with unchanged(model):
        model(torch.ones(2, 4))
        assert model.seen.requires_grad
    assert model.seen.is_leaf
    assert not model.seen.requires_grad
    assert torch.equal(copy.deepcopy(model).seen, torch.ones(4))


def test_a_large_tensor_that_is_no_buffer_is_looked_at(monkeypatch):
    monkeypatch.setattr("qsim.runs.snapshot._COPIED", 0)
    monkeypatch.setattr("qsim.runs.snapshot._SMALL", 0)
    model = Keeping()
    model.fc.weight.data, model.fc.bias.data = torch.zeros(4, 4), torch.zeros(4)
    with pytest.raises(ContentsLostError, match="changed a tensor that is neither a parameter nor a buffer"):
        record(model, [((torch.randn(3, 4),), {})])


def test_objects_of_others_are_not_looked_into():
    model, logger = nn.Linear(4, 4), logging.getLogger("a logger")
    model.logger, model.lock, model.wide, model.none = logger, threading.Lock(), torch.ones(1).expand(4), torch.empty(2, device="meta")
    before = Snapshot(model)
    logger.marker = 1
    before.restore()
    assert logger.marker == 1


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
