"""Compiled as eager, with every planned quantizer in the graph; or an error that says why not."""

import dataclasses
import importlib
import warnings
from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from by_hand import EXACT, linear, on_grid, simulated
from models import Forward
from torch import nn

X = torch.linspace(-2, 2, 256, dtype=torch.float64).view(32, 8).sin()


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def layers(*names: str) -> dict[str, nn.Linear]:
    torch.manual_seed(0)
    return {name: nn.Linear(8, 8).double() for name in names}


class Counted:
    """A backend that runs graphs as they are, and counts what they call."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def __call__(self, graph, inputs):
        self.calls.update(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    @property
    def quantizers(self) -> int:
        return sum(count for name, count in self.calls.items() if "fake_quantize" in name)


def gradients(run, sim, x, training=False):
    sim.train(training)
    sim.zero_grad()
    given = x.clone().requires_grad_()
    y = run(given)
    y.square().sum().backward()
    return [y.detach(), given.grad, *(p.grad for p in sim.model.parameters())]


def assert_same(compiled, sim, x, *, training=False):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, expected = gradients(compiled, sim, x, training), gradients(sim, sim, x, training)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


# Functions that Dynamo looks through.

FUNCTIONS = {
    "F.tanh": F.tanh,
    "F.sigmoid": F.sigmoid,
    "abs": abs,
    "F.threshold": lambda x: F.threshold(x, 0.1, 0.0),
    "F.upsample": lambda x: F.upsample(x[None], size=8)[0],
    "F.interpolate": lambda x: F.interpolate(x[None], size=8)[0],
    "F.hardswish": F.hardswish,
    "F.hardsigmoid": F.hardsigmoid,
    "F.relu6": F.relu6,
    "F.leaky_relu_": lambda x: F.leaky_relu_(x * 1.0, 0.1),
    "torch.relu_": lambda x: torch.relu_(x * 1.0),
    "F.logsigmoid": F.logsigmoid,
    "F.softsign": F.softsign,
    "F.tanhshrink": F.tanhshrink,
    "F.softmin": lambda x: F.softmin(x, -1),
    "F.normalize": lambda x: F.normalize(x, dim=-1),
    "F.cosine_similarity": lambda x: F.cosine_similarity(x, x * x, -1)[:, None] * x,
    "F.pairwise_distance": lambda x: F.pairwise_distance(x, x * x)[:, None] + x,
    "torch.tanh": torch.tanh,
    "Tensor.tanh": lambda x: x.tanh(),
    "-x": lambda x: -x,
    "2 - x": lambda x: 2 - x,
    "1 / x": lambda x: 1 / (x.abs() + 1.0),
    "x ** 2": lambda x: x**2,
    "round": lambda x: torch.round(x * 4),
    "F.glu": lambda x: F.glu(torch.cat([x, x], -1)),
    "torch.square": torch.square,
    "F.rrelu": lambda x: F.rrelu(x, 0.1, 0.2),
    "F.feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.5, False),
    "torch.logaddexp": lambda x: torch.logaddexp(x, x * 2),
    "torch.addcmul": lambda x: torch.addcmul(x, x, x, value=0.5),
    "torch.lerp": lambda x: torch.lerp(x, x * x, 0.3),
    "sum": lambda x: sum([x, x * 2, x * 3]),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_dynamo_looks_through_these_functions():
    """In float, all of them in one graph."""
    functions = [*FUNCTIONS.values()]
    model = Forward(lambda m, x: [m.c(torch.relu(m.b(function(m.a(x))))) for function in functions], **layers("a", "b", "c")).eval()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(X), model(X), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_follows_a_function_keeps_its_quantizers(name):
    function = FUNCTIONS[name]
    model = Forward(lambda m, x: m.c(torch.relu(m.b(function(m.a(x))))), **layers("a", "b", "c")).eval()
    sim = simulated(model, X)
    counted = Counted()
    compiled = torch.compile(sim, backend=counted, fullgraph=True)
    assert_same(compiled, sim, X)
    assert counted.quantizers >= len(sim.quantizers())


def test_seven_of_seven_quantizers():
    model = Forward(lambda m, x: m.c(torch.relu(m.b(F.tanh(m.a(x))))), **layers("a", "b", "c")).eval()
    sim, counted = simulated(model, X), Counted()
    assert len(sim.quantizers()) == 7
    found = torch.compile(sim, backend=counted, fullgraph=True)(X)
    fa = F.tanh(model.a(X))
    fb = torch.relu(model.b(fa))
    y = on_grid(F.tanh(linear(model.a, on_grid(X))), fa)
    y = on_grid(torch.relu(linear(model.b, y)), fb)
    torch.testing.assert_close(found, on_grid(linear(model.c, y), model.c(fb)), rtol=1e-9, atol=1e-9)
    assert counted.quantizers == 7


@pytest.mark.parametrize("training", [False, True])
def test_in_training(training):
    model = Forward(lambda m, x: m.c(torch.relu(m.b(F.sigmoid(m.a(x)))) + F.dropout(x, 0.0, m.training)), **layers("a", "b", "c")).eval()
    sim = simulated(model, X)
    sim.train(training)
    assert_same(torch.compile(sim, backend="aot_eager", fullgraph=True), sim, X, training=training)


# Branches under compilation alone.


def compiling_dynamo():
    return torch.compiler.is_dynamo_compiling()


def compiling_anything():
    return torch.compiler.is_compiling()


@pytest.mark.parametrize("is_compiling", [compiling_dynamo, compiling_anything])
def test_a_branch_under_compilation_alone_that_leaves_out_a_quantizer_is_an_error(is_compiling):
    def forward(m, x):
        y = m.a(x)
        return m.b(y.sin() if is_compiling() else torch.tanh(y))

    sim = simulated(Forward(forward, **layers("a", "b")).eval(), X)
    with pytest.raises(Exception, match=r"'sin' .* runs in place of 'tanh' .* asks whether it is being compiled"):
        torch.compile(sim, backend="eager", fullgraph=True)(X)


@pytest.mark.parametrize("is_compiling", [compiling_dynamo, compiling_anything])
def test_a_branch_under_compilation_alone_is_an_error_or_the_same(is_compiling):
    """As Mamba's scan: the graph would hold other quantizers than the plan."""

    def forward(m, x):
        y = m.a(x)
        y = torch.cumsum(y, 0) if not is_compiling() else torch.tril(torch.ones(32, 32, dtype=x.dtype)) @ y
        return m.b(torch.relu(y * 0.1))

    sim = simulated(Forward(forward, **layers("a", "b")).eval(), X)
    compiled = torch.compile(sim, backend="eager", fullgraph=True)
    expected = sim(X)
    try:
        found = compiled(X)
    except Exception as error:
        if "quanti" not in str(error):  # an error of another kind
            raise
        return
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


# Recurrent layers.


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("training", [False, True])
def test_recurrent_layers(kind, training):
    torch.manual_seed(0)
    model = Forward(lambda m, x: m.out(m.r(x)[0]), r=kind(8, 8, batch_first=True), out=nn.Linear(8, 4)).double().eval()
    x = torch.randn(2, 4, 8, dtype=torch.float64)
    sim = simulated(model, x)
    assert_same(torch.compile(sim, backend="eager"), sim, x, training=training)  # in float too Dynamo breaks the graph there


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_recurrent_cells(kind):
    torch.manual_seed(0)
    first = (lambda y: y[0]) if kind is nn.LSTMCell else (lambda y: y)
    model = Forward(lambda m, x: m.out(first(m.r(x))), r=kind(8, 8), out=nn.Linear(8, 4)).double().eval()
    sim = simulated(model, X)
    assert_same(torch.compile(sim, backend="eager", fullgraph=True), sim, X)


def test_properties_in_frames_that_dynamo_skips():
    """`z.real` among them."""

    def forward(m, x):
        z = torch.view_as_complex(torch.stack([m.a(x), m.b(x)], -1))
        return m.c(z.real * 2.0 + z.imag) + z.real.mT.mT

    sim = simulated(Forward(forward, **layers("a", "b", "c")).eval(), X)
    assert_same(torch.compile(sim, backend="eager"), sim, X)


# Paths that the example did not take.


@pytest.mark.parametrize("flag", [False, True])
def test_another_layers_weight(flag):
    def forward(m, x, big=False):
        y = torch.relu(m.a(x))
        y = m.n2(y) if big else m.n1(y)
        return m.c(y)

    sim = simulated(Forward(forward, **layers("a", "n1", "n2", "c")).eval(), X)
    compiled = torch.compile(sim, backend="eager", fullgraph=True)
    assert_same(lambda x: compiled(x, big=flag), _With(sim, flag), X)


class _With(nn.Module):
    """A simulation with its flag given."""

    def __init__(self, sim: nn.Module, flag: bool) -> None:
        super().__init__()
        self.sim, self.flag, self.model = sim, flag, sim.model

    def forward(self, x):
        return self.sim(x, big=self.flag)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_another_number_of_steps(steps):
    class Looping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.steps = *layers("a", "b").values(), 2

        def forward(self, x):
            for i in range(self.steps):
                x = torch.relu(self.a(x))
                if i == 2:
                    return x
            return self.b(x)

    sim = simulated(Looping().eval(), X, config=dataclasses.replace(EXACT, bias=None))
    sim.model.steps = steps
    assert_same(torch.compile(sim, backend="eager", fullgraph=True), sim, X)


def in_place(a):
    a = a + 1
    a += 1
    a -= 3
    a *= 2
    a /= 3
    a **= 2
    a //= 0.1
    a %= 7
    return a


ON_ARRAYS = [
    lambda a: 2 * a + a * a - a / 3,
    lambda a: 1 - a**2,
    lambda a: -abs(a) // 2 % 3,
    lambda a: 2 / (a @ a.T @ a),
    lambda a: (a > 0) * 1.0 + (a <= 1) * 2.0 + (a == 0) + (a != 0),
    lambda a: np.maximum(a[:1], 0.5).reshape(-1),
    in_place,
]


@pytest.mark.parametrize("function", ON_ARRAYS)
def test_arithmetic_on_arrays_stays_that(function):
    """Dynamo hands it to modes as methods of tensors, which arrays do not have."""
    model = Forward(lambda m, x: F.relu(m.a(x) + torch.from_numpy(np.asarray(function(x.detach().numpy())))), **layers("a"))
    sim = simulated(model, X)
    with torch.no_grad():
        expected = sim(X)
        torch.testing.assert_close(torch.compile(sim, backend="eager", fullgraph=True)(X), expected, rtol=1e-9, atol=1e-9)


class Derived(nn.Linear):
    def forward(self, x):
        return super().forward(x * 0.5)


FORWARDS = {
    "a method": lambda m, x: m.c(torch.tanh(m.a.forward(x))),
    "of the class": lambda m, x: m.c(torch.tanh(nn.Linear.forward(m.a, x))),
    "mapped": lambda m, x: m.c(sum(map(m.a.forward, (x, x * 2.0)))),
    "one of several": lambda m, x: m.c(sum(forward(x) for forward in (m.a.forward, m.b.forward))),
    "of a subclass": lambda m, x: m.c(torch.tanh(m.derived.forward(x))),
}


@pytest.mark.parametrize("forward", FORWARDS.values(), ids=FORWARDS)
def test_the_forward_of_a_layer_is_the_layer_however_it_is_called(forward):
    torch.manual_seed(0)
    model = Forward(forward, **layers("a", "b", "c"), derived=Derived(8, 8).double()).eval()
    sim = simulated(model, X)
    layer = "derived.linear" if forward is FORWARDS["of a subclass"] else "a"
    assert f"{layer}.output" in sim.quantizers()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(torch.compile(sim, backend="eager", fullgraph=True), sim, X)


COPIED = """
from torch import nn


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.b = nn.Linear(8, 8)

    def forward(self, x):
        twice = lambda u: u + u
        return self.b(twice(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.part = nn.Linear(8, 8), Part()

    def forward(self, x):
        return self.part(self.a(x))
"""


def test_functions_inside_of_others_are_those_of_their_own_file(tmp_path, monkeypatch):
    """Code is equal to code of another file, and Dynamo keeps one for all."""
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("qsim_one_copy", "qsim_another_copy"):
        (tmp_path / f"{name}.py").write_text(COPIED)
        torch.manual_seed(0)
        sim = simulated(importlib.import_module(name).Model().double().eval(), X)
        assert "part.add.output" in sim.quantizers()
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("error")
            expected = sim(X)
            sim.model.part.compile(backend="eager")
            torch.testing.assert_close(sim(X), expected, rtol=1e-9, atol=1e-9)


RETURNS_ITS_OPERAND = {
    "F.dropout of nothing": lambda m, x: F.dropout(x, 0.0, m.training),
    "F.dropout in evaluation": lambda m, x: F.dropout(x, 0.5, training=False),
    "F.dropout in place": lambda m, x: F.dropout(x, 0.0, m.training, inplace=True),
    "torch.dropout": lambda m, x: torch.dropout(x, p=0.3, train=False),
    "nn.Dropout": lambda m, x: m.drop(x),
    "F.alpha_dropout": lambda m, x: F.alpha_dropout(x, 0.0, m.training),
    "torch.feature_dropout": lambda m, x: torch.feature_dropout(x, 0.4, False),
    "contiguous": lambda m, x: x.contiguous(),
    "to": lambda m, x: x.to(torch.float64).type_as(x),
}


@pytest.mark.parametrize("name", RETURNS_ITS_OPERAND)
@pytest.mark.parametrize("training", [False, True])
def test_a_chain_through_a_function_that_returns_its_operand(name, training):
    """To Dynamo the result of a dropout in evaluation is another tensor than its operand: the chain's end had no quantizer."""
    between = RETURNS_ITS_OPERAND[name]
    sim = simulated(Forward(lambda m, x: m.b(F.gelu(between(m, m.a(x)))), **layers("a", "b"), drop=nn.Dropout(0.0)), X)
    backend = Counted()
    compiled = torch.compile(sim, backend=backend, fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradients(compiled, sim, X, training)
    assert backend.quantizers == len(sim.quantizers())
    assert_same(compiled, sim, X, training=training)
