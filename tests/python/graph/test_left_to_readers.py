"""What is in float because of what reads it in the examples: others that read it, on a path that no example took, are told."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import qsim


class Network(nn.Module):
    """Convolution `a`, whose result is quantized behind the rectifier, then `b`; `way` says what else is done with the former."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x, other=False):
        y = self.a(x)
        return self.rest(y, F.relu(y), other)


class Returned(Network):
    def rest(self, y, r, other):
        z = self.b(r)
        return (z, y) if other else (z, z)


class ReturnedInside(Network):
    def rest(self, y, r, other):
        return {"z": [self.b(r), y.flatten(1) if other else None]}


class Read(Network):
    def rest(self, y, r, other):
        return self.b(y if other else r)


class ReadThroughView(Network):
    def rest(self, y, r, other):
        return self.b((y if other else r).view(2, 4, 4, 16))


class ReadByAddition(Network):
    def rest(self, y, r, other):
        return self.b(r) + (y if other else r)


class ReadInAList(Network):
    def rest(self, y, r, other):
        return torch.cat([self.b(r), y if other else r], 1)


class Compared(Network):
    def rest(self, y, r, other):
        z = r * r
        if (z > 1e9).any() or other:
            r = z
        return self.b(r)


class Outside(nn.Module):
    """The parts of a network in containers of their own."""

    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Conv2d(3, 4, 3, padding=1)

        def forward(self, x):
            y = self.a(x)
            return y, F.relu(y)

    def __init__(self):
        super().__init__()
        self.first, self.b = self.First(), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x, other=False):
        y, r = self.first(x)
        return self.b(y if other else r)


TOLD = {
    Returned: r"what 'a' \(.*\) computes was returned",
    ReturnedInside: r"what 'a' \(.*\) computes was returned",
    Read: r"'b' \(.*\) read what 'a' \(.*\) computes",
    ReadThroughView: r"'b' \(.*\) read what 'a' \(.*\) computes",
    ReadByAddition: r"'add' \(.*\) read what 'a' \(.*\) computes",
    ReadInAList: r"'cat' \(.*\) read what 'a' \(.*\) computes",
    Compared: r"'b' \(.*\) read what 'mul' \(.*\) computes",
    Outside: r"'b' \(.*\) read what 'first.a' \(.*\) computes",
}


def made(model, examples, config=None):
    sim = qsim.QuantSim(model.eval(), examples, config)
    sim.calibrate([torch.randn(2, 3, 8, 8)], progress=False)
    return sim


@pytest.mark.parametrize("graded", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("saves", [True, False], ids=["saving", "plain"])
@pytest.mark.parametrize("cls", TOLD)
def test_other_readers_are_told(cls, saves, graded):
    x = torch.randn(2, 3, 8, 8)
    sim = made(cls(), x)
    sim.savings = saves
    with torch.set_grad_enabled(graded):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            sim(x)
        with pytest.warns(UserWarning, match=f"{TOLD[cls]}.*Give the call as an example too"):
            sim(x, other=True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            sim(x, other=True)
    assert any("example inputs did not show it" in note for note in sim.summary().notes)


@pytest.mark.parametrize("cls", [cls for cls in TOLD if cls is not Compared])  # Dynamo leaves what asks for data to Python
def test_compiled_they_are_told_too(cls):
    x = torch.randn(2, 3, 8, 8)
    sim = made(cls(), x)
    torch._dynamo.reset()
    compiled = torch.compile(sim, backend="eager", fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(x)
    with pytest.warns(UserWarning, match=TOLD[cls]):
        compiled(x, other=True)


@pytest.mark.parametrize("cls", TOLD)
def test_shown_as_an_example_they_have_their_grid_without_a_word(cls):
    x = torch.randn(2, 3, 8, 8)
    sim = made(cls(), [x, (x, True)])
    sim.calibrate([x, (x, True)], progress=False)
    key = {Compared: "mul.output", Outside: "first.a.output"}.get(cls, "a.output")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sim(x)
        before = sim(x, other=True)
    assert key in sim.quantizers()
    sim.disable(key)
    leaves = (torch.utils._pytree.tree_leaves(out) for out in (before, sim(x, other=True)))
    assert any(not torch.equal(a, b) for a, b in zip(*leaves, strict=True) if a is not None)


class InPlace(Network):
    """Its rectifier changes what the convolution returned, and whoever reads that reads the rectified."""

    def forward(self, x, other=False):
        y = self.a(x)
        y.relu_()
        z = self.b(y)
        return z, (y if other else x)


def test_what_was_changed_in_place_is_what_changed_it():
    x = torch.randn(2, 3, 8, 8)
    sim = made(InPlace(), x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sim(x)
    with pytest.warns(UserWarning, match="QuantSim: what 'relu' .* computes was returned") as told:
        sim(x, other=True)
    assert len(told) == 1
    assert "'a'" not in str(told[0].message)


@pytest.mark.parametrize("saves", [True, False], ids=["saving", "plain"])
@pytest.mark.parametrize("inplace", [True, False])
def test_what_is_quantized_in_the_same_memory_is_not_in_float(inplace, saves):
    x = torch.randn(2, 3, 8, 8)
    sim = made(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace), nn.AdaptiveAvgPool2d(1), nn.Conv2d(4, 4, 1)), x)
    sim.savings = saves
    for graded in (True, False):
        with torch.set_grad_enabled(graded), warnings.catch_warnings():
            warnings.simplefilter("error")
            sim(x)


def test_hooks_are_no_readers():
    x, seen = torch.randn(2, 3, 8, 8), []
    sim = made(Returned(), x)
    sim.model.a.register_forward_hook(lambda module, args, out: seen.append((out * 2).mean()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sim(x)
    assert len(seen) == 1


class Checkpointed(Network):
    def forward(self, x, other=False):
        return checkpoint(super().forward, x, other, use_reentrant=False)

    def rest(self, y, r, other):
        return self.b(y if other else r)


def test_what_a_checkpoint_runs_again_says_no_more():
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    sim = made(Checkpointed(), x.detach())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sim(x).sum().backward()
    with pytest.warns(UserWarning, match="read what 'a'"):
        sim(x, other=True).sum().backward()


class Stream(nn.Module):
    """Additions that only a normalization reads, which ONNX Runtime computes in float."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.c = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x, other=False):
        y = self.a(x) + x
        h = self.norm(y)
        return self.c(y if other else h)


def test_what_the_target_computes_in_float_for_its_readers_is_told():
    x = torch.randn(2, 4)
    sim = qsim.QuantSim(Stream().eval(), x, qsim.Config(target="onnxruntime"))
    sim.calibrate([x], progress=False)
    with pytest.warns(UserWarning, match=r"'c' \(.*\) read what 'add' \(.*\) computes"):
        sim(x, other=True)


def test_where_readers_quantize_what_they_read_nothing_is_left():
    x = torch.randn(2, 3, 8, 8)
    sim = made(Read(), x, qsim.Config(target="tensorrt"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sim(x, other=True)


def test_weights_alone_leave_nothing_to_readers():
    x = torch.randn(2, 3, 8, 8)
    sim = made(Read(), x, qsim.Config(activation=None))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sim(x, other=True)
