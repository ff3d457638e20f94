"""Paths that the example did not take: weights are quantized wherever they are read, results by their own place or not; and it warns."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from by_hand import EXACT, linear, on_grid, simulated, weight_on_grid
from models import Forward
from torch import nn
from torch.utils.checkpoint import checkpoint

import qsim

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def layers(*names: str, factor: float = 1.0) -> dict[str, nn.Linear]:
    made = {name: nn.Linear(8, 8).double() for name in names}
    for layer in made.values():
        layer.weight.data *= factor
    return made


def quiet(call, *args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call(*args, **kwargs)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def either(m, x, big=False):
    y = F.relu(m.a(x))
    return m.n2(y) if big else m.n1(y)


def two_ways() -> Forward:
    model = Forward(either, **layers("a", "n1", "n2"))
    model.n2.weight.data *= 50
    return model.eval()


X = torch.linspace(-2, 2, 256, dtype=torch.float64).view(32, 8).sin()


def test_the_other_layer_has_its_own_weight_and_nobody_elses_range():
    model = two_ways()
    sim = simulated(model, X)
    y = on_grid(F.relu(model.a(X)))  # what calibration saw
    x = on_grid(X)
    y = on_grid(F.relu(linear(model.a, x)), F.relu(model.a(X)))
    close(quiet(sim, X, big=True), linear(model.n2, y))
    close(sim(X), on_grid(linear(model.n1, y), model.n1(F.relu(model.a(X)))))


@pytest.mark.parametrize("big", [False, True])
def test_compiled_as_eager(big):
    sim = simulated(two_ways(), X)
    compiled = torch.compile(sim, backend="eager", fullgraph=True)
    close(quiet(compiled, X, big=big), quiet(sim, X, big=big))


class Attention(nn.Module):
    """As in a decoder: what is cached is put before the keys."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.o_proj = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x, cache=None, use_cache=True):
        q, k = self.q_proj(x), self.k_proj(x)
        if use_cache:
            cache = k if cache is None else torch.cat([cache, k], 1)
            k = cache * 1.0
        y = F.scaled_dot_product_attention(q, k, k)
        y = self.o_proj(y)
        return (y, cache) if use_cache else y


def test_without_the_cache_that_the_example_had():
    model, x = Attention().double().eval(), torch.randn(2, 5, 8, dtype=torch.float64)
    sim = simulated(model, x)
    q, k = model.q_proj(x), model.k_proj(x)
    attended = F.scaled_dot_product_attention(q, k, k)
    qx = on_grid(x)
    qq, qk = on_grid(linear(model.q_proj, qx), q), on_grid(linear(model.k_proj, qx), k)
    qy = on_grid(F.scaled_dot_product_attention(qq, qk, qk), attended)
    close(quiet(sim, x, use_cache=False), on_grid(linear(model.o_proj, qy), model.o_proj(attended)))


def leaving_early(m, x, early=False):
    y = m.a(x)
    if early:
        return y
    return m.b(F.relu(y)) + y


def test_an_early_exit_compiled():
    sim = simulated(Forward(leaving_early, **layers("a", "b")).eval(), X)
    for early in (False, True):
        compiled = torch.compile(sim, backend="eager", fullgraph=True)
        found, expected = quiet(compiled, X, early=early), quiet(sim, X, early=early)
        close(found, expected)
        gradients = []
        for result in (found, expected):
            sim.zero_grad()
            result.square().sum().backward()
            gradients.append(sim.model.a.weight.grad.clone())
        close(*gradients)


def test_an_early_exit_by_hand():
    model = Forward(leaving_early, **layers("a", "b")).eval()
    sim = simulated(model, X)
    close(quiet(sim, X, early=True), on_grid(linear(model.a, on_grid(X)), model.a(X)))


def scaled_between(m, x, scale=None):
    y = m.a(x)
    if scale is not None:
        y = y * scale
    return m.b(F.relu(y))


@pytest.mark.parametrize("warm", [False, True])
def test_an_operation_inside_of_a_chain_compiled(warm):
    """What is noticed while Dynamo traces is no state of the graph that it could guard."""
    model = Forward(scaled_between, **layers("a", "b")).eval()
    sim = simulated(model, X)
    compiled = torch.compile(sim, backend="eager", fullgraph=True)
    if warm:
        compiled(X)
    with pytest.warns(UserWarning, match=r"'mul' .* 'relu' .* its result stays in float"):
        found = compiled(X, scale=3.0)
    close(found, on_grid(linear(model.b, F.relu(3 * linear(model.a, on_grid(X)))), model.b(F.relu(model.a(X)))))
    close(found, quiet(sim, X, scale=3.0))


def test_what_was_met_and_not_planned_warns_once_by_name_and_line():
    sim = simulated(two_ways(), X)
    with pytest.warns(UserWarning, match="n2") as noted:
        sim(X, big=True)
    line = either.__code__.co_firstlineno + 2
    assert any(str(line) in str(w.message) for w in noted)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sim(X, big=True)


def skipping(m, x, use=True):
    y = F.relu(m.a(x))
    if use:
        y = m.b(y)
    return torch.tanh(m.c(y))


def test_what_was_planned_and_skipped_warns_once_by_name():
    sim = simulated(Forward(skipping, **layers("a", "b", "c")).eval(), X)
    with pytest.warns(UserWarning, match=r"\bb\b"):
        sim(X, use=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sim(X, use=False)


def test_a_function_that_dynamo_hides_warns_where_it_is_passed_by():
    """Its result is quantized where it is read: on another path something else has that grid, and no mode could tell while it is traced."""
    model = Forward(lambda m, x, squashed=True: m.b(F.sigmoid(m.a(x)) if squashed else m.a(x)), **layers("a", "b"))
    x = torch.randn(16, 8).double()
    sim = simulated(model, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sim(x)
    with pytest.warns(UserWarning, match=r"'sigmoid' \(test_truth_paths.py:\d+\) is planned, and was not reached"):
        sim(x, False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sim(x, False)


def test_a_function_that_dynamo_hides_and_nothing_reads_is_left_in_float():
    def forward(m, x, squashed=False):
        y = F.sigmoid(m.a(x))
        return m.b(y if squashed else x)

    assert "sigmoid" in [left.name for left in simulated(Forward(forward, **layers("a", "b")), X).summary().left]


def test_nothing_warns_on_the_recorded_path():
    sim = simulated(two_ways(), X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sim(X)
        sim.train()(X)


def test_skipping_a_layer_by_hand():
    """What comes after has its own place, and so its own quantizers."""
    model = Forward(skipping, **layers("a", "b", "c")).eval()
    sim = simulated(model, X)
    before = F.relu(model.a(X))
    y = on_grid(F.relu(linear(model.a, on_grid(X))), before)
    close(quiet(sim, X, use=False), on_grid(torch.tanh(linear(model.c, y)), torch.tanh(model.c(model.b(before)))))


def test_a_rectifier_in_place_whose_addition_did_not_run():
    """A chain that did not begin has no grid at its end, whoever owns the memory."""
    sim = simulated(Forward(lambda m, x, add=True: F.relu(x + x.roll(1, 0) if add else x, inplace=True)).eval(), X)
    with torch.no_grad():
        close(quiet(sim, X, add=False), F.relu(on_grid(X)))


class Added(nn.Module):
    def forward(self, x):
        return x + x.roll(1, 0)


class Rectified(nn.Module):
    def forward(self, x):
        return F.relu(x)


@pytest.mark.parametrize("rectify", [Rectified, nn.ReLU])
@pytest.mark.parametrize("how", ["eager", "compiled", "hooked", "checkpointed"])
def test_a_chain_across_containers(rectify, how):
    """Its end has a quantizer where its beginning ran, in whichever container."""
    run = (lambda f, x: checkpoint(f, x, use_reentrant=False)) if how == "checkpointed" else lambda f, x: f(x)
    forward = lambda m, x, add=True: run(m.act, run(m.add, x) if add else x)  # noqa: E731
    sim = simulated(Forward(forward, add=Added(), act=rectify()).eval(), X)
    if how == "hooked":
        sim.model.add.register_forward_hook(lambda m, args, out: out.clone())
    called = torch.compile(sim, fullgraph=True, backend="eager") if how == "compiled" else sim
    x = on_grid(X)
    close(called(X), on_grid(F.relu(x + x.roll(1, 0)), F.relu(X + X.roll(1, 0))))
    close(quiet(called, X, add=False), F.relu(x))


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("how", ["eager", "compiled", "checkpointed"])
def test_a_chain_whose_end_no_mode_meets(inside, how):
    """Where it is read it has the grid of the chain, if it took what that hands on: in the same container, or in one inside."""
    run = (lambda f, x: checkpoint(f, x, use_reentrant=False)) if how == "checkpointed" else lambda f, x: f(x)

    def forward(m, x, first=True, before=True):
        y = run(m.a, x) if before else x
        return m.b(F.hardswish(y if first else x))

    a, b = layers("a", "b").values()
    model = Forward(forward, a=nn.Sequential(a) if inside else a, b=b).eval()
    sim = simulated(model, X)
    called = torch.compile(sim, fullgraph=True, backend="eager") if how == "compiled" else sim
    x, seen = on_grid(X), F.hardswish(a(X))
    close(called(X), on_grid(linear(b, on_grid(F.hardswish(linear(a, x)), seen)), b(seen)))
    for before in (False, True):
        close(quiet(called, X, first=False, before=before), on_grid(linear(b, F.hardswish(x)), b(seen)))


def test_a_chain_whose_end_no_mode_meets_computed_once_more():
    """The gradients of a checkpoint are those of what ran."""

    def forward(m, x, first=True):
        y = m.a(x)
        return checkpoint(m.tail, y if first else x, use_reentrant=False)

    a, b = layers("a", "b").values()
    model = Forward(forward, a=nn.Sequential(a), tail=nn.Sequential(nn.Hardswish(), b)).eval()
    sim = simulated(model, X)
    for first in (True, False):
        x = X.clone().requires_grad_()
        quiet(sim, x, first=first).square().sum().backward()
        y = X.clone().requires_grad_()
        seen = F.hardswish(a(X))
        h = F.hardswish(linear(a, on_grid(y))) if first else F.hardswish(on_grid(y))
        out = on_grid(linear(b, on_grid(h, seen) if first else h), b(seen))
        out.square().sum().backward()
        close(x.grad, y.grad)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_chain_that_begins_under_a_checkpoint(compiled):
    forward = lambda m, x: checkpoint(m.block, m.act(checkpoint(m.a, x, use_reentrant=False)), use_reentrant=False).relu()  # noqa: E731
    model = Forward(forward, a=nn.Linear(8, 8).double(), act=Rectified(), block=Added()).eval()
    sim = simulated(model, X)
    called = torch.compile(sim, fullgraph=True, backend="eager") if compiled else sim
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        found = called(X)
    y = on_grid(F.relu(linear(model.a, on_grid(X))), F.relu(model.a(X)))
    close(found, on_grid(y + y.roll(1, 0), model(X)))


@pytest.mark.parametrize("compiled", [False, True])
def test_part_of_a_weight_that_the_example_did_not_reach(compiled):
    """Attention to something else reads its packed weight in parts."""
    model = Forward(lambda m, x, y=None: x if y is None else m.m(x, y, y)[0], m=nn.MultiheadAttention(8, 2).double()).eval()
    wanted, sim = copy.deepcopy(model), simulated(model, X)
    for weight in (wanted.m.in_proj_weight, wanted.m.out_proj.weight):
        weight.data = weight_on_grid(weight).data
    called = torch.compile(sim, fullgraph=True, backend="eager") if compiled else sim
    close(quiet(called, X, X.flip(0)), wanted(X, X.flip(0)))


def test_a_layer_that_is_called_past_its_container():
    """It has its own quantizers there too."""

    def forward(m, x, past=False):
        for layer in m.block if past else [m.block]:
            x = layer(x)
        return x

    model = Forward(forward, block=nn.Sequential(*layers("a", "b").values())).eval()
    sim = simulated(model, X)
    assert torch.equal(sim(X), quiet(sim, X, past=True))


@pytest.mark.parametrize("add", [False, True])
def test_what_a_chain_that_did_not_begin_changed_in_place(add):
    """It stays in float where it is read by its older name too."""

    def forward(m, x, add=True):
        y = x + x.roll(1, 0) if add else x.roll(1, 0)
        y.relu_()
        return m.a(y)

    model = Forward(forward, **layers("a")).eval()
    sim = simulated(model, X)
    x, y = on_grid(X), F.relu(X + X.roll(1, 0))
    y = on_grid(F.relu(x + x.roll(1, 0)), y) if add else F.relu(x.roll(1, 0))
    close(quiet(sim, X, add=add), on_grid(linear(model.a, y), model(X)))


def test_what_the_example_hands_to_a_container_twice():
    """Once an addition, once something else: nothing warns, and the one grid spans both."""
    model = Forward(lambda m, x: m.act(m.act(x).roll(1, 0) + x), act=Rectified()).eval()
    sim = simulated(model, X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = sim(X)
    x, results = on_grid(X), (F.relu(X), model(X))
    close(found, on_grid(F.relu(on_grid(F.relu(x), *results).roll(1, 0) + x), *results))


def test_several_calls_are_recorded():
    model = two_ways()
    calls = [{"x": X}, {"x": X, "big": True}]
    sim = qsim.QuantSim(Keywords(model), calls, EXACT)
    sim.calibrate(calls, forward=lambda m, call: m(**call), progress=False)
    before = F.relu(model.a(X))
    y = on_grid(F.relu(linear(model.a, on_grid(X))), before)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        close(sim(x=X), on_grid(linear(model.n1, y), model.n1(before)))
        close(sim(x=X, big=True), on_grid(linear(model.n2, y), model.n2(before)))


class Keywords(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x, big=False):
        return self.model(x, big=big)


def test_more_steps_than_recorded():
    def looped(m, x, steps=2):
        for _ in range(steps):
            x = torch.relu(m.a(x))
        return m.b(x)

    model = Forward(looped, **layers("a", "b")).eval()
    sim = simulated(model, X)
    one = F.relu(model.a(X))
    two = F.relu(model.a(one))
    y = on_grid(F.relu(linear(model.a, on_grid(X))), one)
    y = on_grid(F.relu(linear(model.a, y)), two)
    close(sim(X), on_grid(linear(model.b, y), model.b(two)))
    third = F.relu(linear(model.a, y))
    found = quiet(sim, X, steps=3)
    quantized = [on_grid(linear(model.b, t), model.b(two)) for t in (third, on_grid(third, two), on_grid(third, one))]
    # the third step has no place of its own: it is in float, or has its layer's quantizer
    assert any(torch.allclose(found, expected, rtol=1e-9, atol=1e-9) for expected in quantized)
