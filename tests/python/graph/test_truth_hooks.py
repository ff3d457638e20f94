"""What runs in hooks, callbacks and other threads is not the model's: it takes no quantizer, and none away."""

import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from by_hand import EXACT, decibels, linear, on_grid, simulated
from models import Forward
from torch import nn

import qsim

X = torch.linspace(-2, 2, 256, dtype=torch.float64).view(32, 8).sin()


def multiplying(m, x, callback=None):
    y = F.relu(m.a(x))
    if callback is not None:
        callback(y)
    y = m.b(y)
    return m.c(y * 2.0 + y * y)


def model() -> Forward:
    torch.manual_seed(1)
    return Forward(multiplying, **{name: nn.Linear(8, 8).double() for name in "abc"}).eval()


def by_hand(m: nn.Module) -> torch.Tensor:
    """One quantizer for each result, at the end of each chain."""
    fa = F.relu(m.a(X))
    fb = m.b(fa)
    y = on_grid(F.relu(linear(m.a, on_grid(X))), fa)
    y = on_grid(linear(m.b, y), fb)
    twice, square = on_grid(y * 2.0, fb * 2.0), on_grid(y * y, fb * fb)
    both = on_grid(twice + square, fb * 2.0 + fb * fb)
    return on_grid(linear(m.c, both), m.c(fb * 2.0 + fb * fb))


def assert_by_hand(sim: qsim.QuantSim, m: nn.Module, **kwargs: object) -> None:
    expected = by_hand(m)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(sim(X, **kwargs), expected, rtol=1e-9, atol=1e-9)
    expected.square().sum().backward()
    wanted = {name: p.grad.clone() for name, p in m.named_parameters()}
    sim.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sim(X, **kwargs).square().sum().backward()
    for name, p in sim.model.named_parameters():
        torch.testing.assert_close(p.grad, wanted[name], rtol=1e-9, atol=1e-9)


LOG: list[torch.Tensor] = []


def square_of_result(module, args, output):
    LOG.append((output * output).mean())


def square_of_argument(module, args):
    LOG.append((args[0] * args[0] + 1.0).mean())


def test_without_hooks():
    m = model()
    assert_by_hand(simulated(m, X), m)


@pytest.mark.parametrize("name", ["a", "b", "c", ""])
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("early", [False, True])
def test_a_hook_that_computes(name, before, early):
    m = model()
    simulated_model = m if early else None
    if early:
        _hook(m.get_submodule(name), before)
    sim = simulated(m, X)
    if simulated_model is None:
        _hook(sim.model.get_submodule(name), before)
    assert_by_hand(sim, model_without_hooks(m))


def model_without_hooks(m: nn.Module) -> nn.Module:
    plain = model()
    plain.load_state_dict(m.state_dict())
    return plain


def _hook(module: nn.Module, before: bool) -> None:
    if before:
        module.register_forward_pre_hook(square_of_argument)
    else:
        module.register_forward_hook(square_of_result)


def test_a_hook_of_all_modules():
    m = model()
    sim = simulated(m, X)
    handle = nn.modules.module.register_module_forward_hook(square_of_result)
    try:
        found = sim(X)
    finally:
        handle.remove()
    torch.testing.assert_close(found, by_hand(m), rtol=1e-9, atol=1e-9)


def test_a_hook_of_gradients():
    m = model()

    def watched(m, x):
        y = F.relu(m.a(x))
        if y.requires_grad:
            y.register_hook(lambda g: LOG.append((g * g).mean()))
        y = m.b(y)
        return m.c(y * 2.0 + y * y)

    m.run = watched
    assert_by_hand(simulated(m, X), model_without_hooks(m))


def test_a_hook_that_adds_before_a_rectifier():
    """A chain that begins in a hook: no mode meets its beginning."""
    model = Forward(lambda m, x: m.act(x), act=nn.ReLU()).eval()
    model.act.register_forward_pre_hook(lambda m, args: (args[0] + 0.25,))
    x = torch.linspace(-1, 1, 64).view(8, 8)
    assert decibels(simulated(model, x)(x), model(x)) > 40


@pytest.mark.parametrize("hooked", ["a", "block.b", "block"])
@pytest.mark.parametrize("way", ["a", "block"])
def test_a_hook_beside_a_chain_that_did_not_begin(hooked, way):
    """It is not on the way from the addition to the rectifier, and hands on nothing in the place of that."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.b = nn.Linear(8, 8).double()

        def forward(self, x):
            return self.b(x)

    def forward(m, x, way=""):
        y = x + 0.25
        return F.relu(m.get_submodule(way)(y) if way else y)

    sim = simulated(Forward(forward, a=nn.Linear(8, 8).double(), block=Block()).eval(), X)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = sim(X, way=way)
        sim.model.get_submodule(hooked).register_forward_hook(square_of_result)
        assert torch.equal(sim(X, way=way), expected)


@pytest.mark.parametrize("module", ["relu", "add"])
def test_a_hook_that_looks_at_a_container(module):
    """As tools that extract features do, on a block in the middle."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return x * torch.sigmoid(self.b(F.relu(self.a(x)))) + x

    sim = simulated(nn.Sequential(Block(), Block(), nn.Linear(8, 4)).double().eval(), X)
    expected = sim(X)
    LOG.clear()
    sim.model[0].register_forward_hook(lambda m, i, o: LOG.append(torch.sigmoid(o * i[0] + o) if module == "add" else F.relu(o)))
    sim.model[1].register_forward_pre_hook(lambda m, i: LOG.append(F.relu(i[0]) * 2 + i[0]))
    assert torch.equal(sim(X), expected)
    assert len(LOG) == 2


def test_hooks_compute_in_float():
    m = model()
    sim = simulated(m, X)
    seen = []
    sim.model.b.register_forward_hook(lambda module, args, out: seen.append((out.detach(), (out * 0.37).detach())))
    sim(X)
    ((out, product),) = seen
    assert torch.equal(product, out * 0.37)


def test_a_callback():
    m = model()
    sim = simulated(m, X)
    assert_by_hand(sim, m, callback=lambda y: LOG.append((y * y).mean() + F.relu(y * 2.0).sum()))


def test_a_thread_that_the_model_starts():
    m = model()

    def threaded(m, x):
        y = F.relu(m.a(x))
        with ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: (y * y).mean()).result()
        y = m.b(y)
        return m.c(y * 2.0 + y * y)

    m.run = threaded
    assert_by_hand(simulated(m, X), model_without_hooks(m))


def test_a_hook_compiled():
    torch._dynamo.reset()
    m = model()
    sim = simulated(m, X)
    noted = []
    sim.model.b.register_forward_hook(lambda module, args, out: noted.append((out * out).mean()))
    compiled = torch.compile(sim, backend="eager")
    torch.testing.assert_close(compiled(X), by_hand(m), rtol=1e-9, atol=1e-9)


def test_a_hook_that_puts_another_tensor_in_place_of_what_is_changed():
    """`F.relu(x)` read what the module had written to; behind the hook the module writes to another tensor."""

    def forward(m, x):
        m.act(x)
        return m.c(F.relu(x))

    m = Forward(forward, act=nn.ReLU(inplace=True), c=nn.Linear(8, 8).double()).eval()
    sim = qsim.QuantSim(m, X.clone(), EXACT)
    sim.model.act.register_forward_pre_hook(lambda module, args: (args[0] + 0.25,))
    with pytest.warns(UserWarning, match=r"'relu' \(test_truth_hooks.*: its operand 0 stays in float"):
        report = sim.calibrate([X.clone()], progress=False)
    assert any("'act.output' has no range" in problem and "stays in float" in problem for problem in report.problems)
    read = F.relu(on_grid(X))
    seen = F.relu(X)
    torch.testing.assert_close(sim(X.clone()), on_grid(linear(m.c, on_grid(read, seen)), m.c(seen)), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_chain_goes_on_behind_a_hook_that_changes_what_is_handed_on(compiled):
    torch._dynamo.reset()
    sim = simulated(Forward(lambda m, x: F.relu(m.a(x)), a=nn.Linear(8, 8).double()).eval(), X)
    quantizers = sim.quantizers()
    with torch.no_grad():
        linear = F.linear(quantizers["input"](X), quantizers["a.weight"](sim.model.a.weight), sim.model.a.bias)
        sim.model.a.register_forward_hook(lambda m, args, out: out * 0.75)
        run = torch.compile(sim, backend="eager", fullgraph=True) if compiled else sim
        assert torch.equal(run(X), quantizers["a.output"](F.relu(linear * 0.75)))


CHANGING = {
    "before": lambda m: m.register_forward_pre_hook(lambda module, args: (args[0] * 0.75,)),
    "after": lambda m: m.register_forward_hook(lambda module, args, out: out * 0.75),
    "around": lambda m: m.register_forward_hook(lambda module, args, out: F.relu(out) + args[0]),
}


@pytest.mark.parametrize("hook", CHANGING.values(), ids=CHANGING)
@pytest.mark.parametrize("name", ["b", "block"])
def test_a_hook_that_the_model_came_with_is_no_reason_to_warn(name, hook):
    """What it hands on is quantized where it is read."""
    layers = {name: nn.Linear(8, 8).double() for name in "abc"}
    block = Forward(lambda m, x: torch.tanh(m.inner(x)), inner=nn.Linear(8, 8).double())
    m = Forward(lambda m, x: m.c(m.b(m.block(m.a(x)))), **layers, block=block).eval()
    hook(getattr(m, name))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sim = simulated(m, X)
        sim(X)
    assert len(sim.quantizers()["c.weight"].encoding.scale) == 8
    assert not any("not reached" in note for note in sim.summary().notes)
    read = []
    sim.model.c.register_forward_pre_hook(lambda module, args: read.append(args[0]))
    sim(X)
    assert len(read[0].unique()) <= 256


class Twice(nn.Module):
    """A block that ends a chain of another container: once in the example, and on another path with its own results too."""

    def __init__(self):
        super().__init__()
        self.layer, self.cell = nn.Linear(8, 8), nn.GRUCell(8, 8)
        self.block = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8, bias=False), nn.Linear(8, 8))

    def forward(self, x, twice=False):
        return self.block(self.block(self.cell(x)) if twice else self.cell(self.layer(x)))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("savings", [True, False])
def test_a_hook_begins_no_chain_that_went_on_elsewhere(savings):
    torch.manual_seed(0)
    x, model, found = torch.randn(16, 8), Twice().eval(), []
    for hooked in (False, True):
        sim = qsim.QuantSim(model, x, qsim.int8())
        sim.calibrate([x], progress=False)
        sim.savings = savings
        if hooked:
            sim.model.block.register_forward_pre_hook(lambda m, i: None)
        found.append(sim.model(x, twice=True))
    assert torch.equal(*found)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_hook_that_looks_begins_no_chain_with_what_no_example_showed(register, compiled):
    """The chain of the example ends with the rectifier; here another sum reaches that."""

    def forward(m, x, times=2):
        y = x
        for _ in range(times):
            y = x + y
        return m.act(y)

    sim = simulated(Forward(forward, act=nn.ReLU()).eval(), X)
    run = torch.compile(sim, backend="eager") if compiled else sim
    with pytest.warns(UserWarning, match="more often|did not show"):
        expected = run(X, times=3)
    getattr(sim.model.act, register)(lambda *given: None)
    torch.testing.assert_close(run(X, times=3), expected, rtol=0, atol=0)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_hook_behind_the_end_of_a_chain_hands_nothing_on_to_it(compiled):
    """The activation is not given what the layer returned, and a hook on what it returns itself is not why."""

    def forward(m, x, skips=False):
        y = m.layer(x)
        return m.act(x if skips else y)

    sim = simulated(Forward(forward, layer=nn.Linear(8, 8).double(), act=nn.Tanh()).eval(), X)
    run = torch.compile(sim, backend="eager") if compiled else sim
    sim.model.act.register_forward_hook(square_of_result)
    with pytest.warns(UserWarning, match="'act' .* did not show"):
        found = run(X, skips=True)
    torch.testing.assert_close(found, torch.tanh(sim.quantizers()["input"](X)))
