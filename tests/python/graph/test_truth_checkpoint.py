"""Recomputation gives the gradients that it gives without: of leaves, methods, lambdas and sequences, reentrant or not."""

import dataclasses
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from by_hand import EXACT, simulated
from models import Forward
from recomputed import WAYS, Adding, Recomputed, X, gradients, plainly
from torch import nn
from torch.utils.checkpoint import checkpoint


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_gradients_are_those_without_recomputation(way, reentrant, training):
    x = X * 1.5  # beyond the range too
    recomputed = simulated(Recomputed(way, reentrant).double().eval(), X)
    plain = simulated(Recomputed(way, reentrant, plainly).double().eval(), X)
    y, found = gradients(recomputed, x, training)
    expected, wanted = gradients(plain, x, training)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(found, wanted, strict=True):
        if theirs is None or ours is None:
            assert ours is theirs
        else:
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_near_those_of_the_float_model(way):
    """At 16 bits: an oracle that is no simulation."""
    model = Recomputed(way, True).double().eval()
    config = dataclasses.replace(
        EXACT, weight=dataclasses.replace(EXACT.weight, bits=16), activation=dataclasses.replace(EXACT.activation, bits=16)
    )
    wide = torch.cat([X * factor for factor in (-2.0, -1.0, 1.0, 1.5, 2.0)] + [X.roll(3, 1) * 2.0])
    sim = simulated(model, wide, config=config)  # so that no value lies at the end of its range, where the gradient ends
    _, found = gradients(sim, X, False)
    x = X.clone().requires_grad_()
    model.zero_grad()
    model(x).square().sum().backward()
    for ours, theirs in zip(found, [x.grad, *(p.grad for p in model.parameters())], strict=True):
        if theirs is not None:
            assert (ours - theirs).abs().max() < 0.02 * theirs.abs().max()


def test_the_call_of_a_reentrant_checkpoint_is_no_call_under_it():
    """torch hands it to function modes as `CheckpointFunction.apply`, before anything runs again."""
    model = Forward(lambda m, x: checkpoint(m.same, torch.relu_(x * 2.0), use_reentrant=True), same=nn.Identity())
    sim = simulated(model.double(), X)
    with torch.no_grad():
        assert torch.equal(sim(X), sim.quantizers()["mul.output"](torch.relu(sim.quantizers()["input"](X) * 2.0)))


class AsItIs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, g):
        return g


@pytest.mark.parametrize("hand_on", [AsItIs.apply, lambda y: checkpoint(lambda a: a, y, use_reentrant=True)])
@pytest.mark.parametrize("function", [F.hardswish, torch.tanh, F.relu])
def test_what_autograd_hands_back_as_it_is_keeps_its_gradient(hand_on, function):
    """torch makes a view of it where gradients are off: no place for a quantizer."""
    layers = {"a": nn.Linear(8, 8).double(), "b": nn.Linear(8, 8).double()}
    grads = []
    for between in (lambda y: y, hand_on):
        sim = simulated(Forward(lambda m, x, between=between: m.b(between(function(m.a(x)))), **layers).eval(), X / 2)
        x = X.clone().requires_grad_()
        sim(x).square().sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_a_chain_that_did_not_begin_does_not_when_it_runs_again(reentrant, inside):
    """What it began with is outside the checkpoint, where a container alone knows nothing of it."""
    act = Forward(lambda m, x: F.relu(x).cos())
    act = Forward(lambda m, x: m.act(x), act=act) if inside else act

    def made(how):
        run = lambda m, x, add=True: how(m.act, m.add(x) if add else x, use_reentrant=reentrant)  # noqa: E731
        return simulated(Forward(run, add=Adding(), act=act).eval(), X)

    found = []
    for how in (checkpoint, plainly):
        sim, x = made(how), (X * 3.0).requires_grad_()
        y = sim(x, add=False)
        y.square().sum().backward()
        found.append((y.detach(), x.grad))
    assert all(map(torch.equal, *found))


def changes(m, x):
    y = m.a(x)
    z = m.b(y)
    y.add_(0.3)
    return z


@pytest.mark.parametrize("way", ["module", "function"])
def test_what_is_kept_and_written_to_under_a_checkpoint_is_an_error(way):
    """torch stops before the float model's change, and runs on to the quantizer behind it; it looks at no version there."""
    layers = {"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)}
    inner = Forward(changes, **layers)
    run = (lambda m, x: m.inner(x)) if way == "module" else lambda m, x: changes(m.inner, x)
    model = Forward(lambda m, x: checkpoint(run, m, x, use_reentrant=False), inner=inner).double().eval()
    sim, x = simulated(model, X), X.clone().requires_grad_()
    model(x).sum().backward()
    y = sim(x)
    with pytest.raises(RuntimeError, match="under a checkpoint changes a tensor in place"):
        y.sum().backward()


def test_what_runs_again_saves_what_it_saved_the_first_time():
    """Of the operand of a rectifier, which a checkpoint keeps when it runs again, and does not before."""

    def forward(m, x):
        y = m.a(x)
        abs(y)  # keeps its operand for its gradient
        return m.act(y)

    block = Forward(forward, a=nn.Linear(8, 8), act=nn.ReLU())
    x = torch.linspace(-2, 2, 1 << 15).view(-1, 8)
    found = []
    for how in (checkpoint, plainly):
        sim = simulated(Forward(lambda m, x, how=how: how(m.block, x, use_reentrant=False), block=block), x)
        given = x.clone().requires_grad_()
        sim.train()(given).square().sum().backward()
        found.append(given.grad)
    assert torch.equal(*found)


@pytest.mark.parametrize("options", [{"use_reentrant": True}, {"use_reentrant": False}, {"use_reentrant": False, "context_fn": True}])
@pytest.mark.parametrize("way", ["leaf", "lambda", "function"])
def test_what_torch_asks_before_a_function_runs_is_no_call_under_the_checkpoint(way, options):
    """`requires_grad` and `device` of its arguments: methods like `.mT`, which hands on a chain here, so that its place is asked for."""

    def forward(m, x, how):
        run = {"leaf": m.a, "lambda": lambda t: F.relu(m.a(t)) + t, "function": F.hardtanh}[way]
        x = m.a(x) if way == "function" else x
        kept = m.act(x).mT  # the end of the chain is read behind it
        if how is plainly:
            return run(x) @ kept
        given = {**options, "context_fn": lambda: (nullcontext(kept.mT), nullcontext(x.mT))} if "context_fn" in options else options
        return how(run, x, **given) @ kept

    layers = {"a": nn.Linear(8, 8).double(), "act": nn.Sequential(nn.Hardswish())}
    found = []
    for how in (checkpoint, plainly):
        sim = simulated(Forward(lambda m, x, how=how: forward(m, x, how), **layers).eval(), X)
        x = (X * 1.5).requires_grad_()
        sim.zero_grad()
        y = sim(x)
        y.square().sum().backward()
        found.append((y.detach(), x.grad, *(p.grad.clone() for p in sim.model.a.parameters())))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def test_what_attention_returns_from_a_reentrant_checkpoint_is_a_view_as_in_training():
    """In evaluation torch's fast path lets the float model write to it: one operation, with none inside to quantize."""

    def forward(m, x):
        y = checkpoint(lambda t: m.attend(t, t, t, need_weights=False)[0], x, use_reentrant=True)
        y += 1.0
        return y

    x = X.view(4, 8, 8).clone().requires_grad_()
    model = Forward(forward, attend=nn.MultiheadAttention(8, 2, batch_first=True)).double().eval()
    sim = simulated(model, x.detach())
    assert model(x).requires_grad
    for raising in (sim, sim.train(), model.train()):
        with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
            raising(x)
