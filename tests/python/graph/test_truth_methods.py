"""Other methods than forward, and generators: simulated, or the simulation says that they are not."""

import warnings

import pytest
import torch
from by_hand import EXACT, linear, on_grid, simulated
from torch import nn

import qsim

X = torch.linspace(-2, 2, 256, dtype=torch.float64).view(32, 8).sin()


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def encode(self, x):
        return torch.tanh(self.a(x))

    def forward(self, x):
        return self.b(self.encode(x))


def test_another_method_is_simulated_or_says_that_it_is_not():
    model = Encoder().double().eval()
    sim = simulated(model, X)
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        found = sim.model.encode(X)
    by_hand = on_grid(torch.tanh(linear(model.a, on_grid(X))), torch.tanh(model.a(X)))
    is_simulated = torch.allclose(found, by_hand, rtol=1e-9, atol=1e-9)
    assert is_simulated or any(issubclass(w.category, UserWarning) for w in noted)


def test_a_generator_is_simulated_or_says_that_it_is_not():
    class Streaming(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x):
            for part in x.split(8):
                yield torch.tanh(self.a(part))

    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        model = Streaming().double().eval()
        sim = qsim.QuantSim(model, X, EXACT)
        sim.calibrate([X], forward=lambda m, x: list(m(x)), progress=False)
        found = torch.cat(list(sim(X)))
    parts = [torch.tanh(linear(model.a, part)) for part in on_grid(X).split(8)]  # each turn of the loop has a quantizer of its own
    by_hand = torch.cat([on_grid(y, torch.tanh(model.a(x))) for y, x in zip(parts, X.split(8), strict=True)])
    is_simulated = torch.allclose(found, by_hand, rtol=1e-9, atol=1e-9)
    assert is_simulated or any(issubclass(w.category, UserWarning) for w in noted) or "generator" in str(sim.summary())


class Steps(nn.Module):
    """As many as it is asked for; the example asks for one."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x, more=False):
        yield torch.tanh(self.a(x))
        if more:
            yield torch.sigmoid(self.a(x) * 2.0)


@pytest.mark.parametrize("asked", [1, 2])
def test_a_generator_warns_of_what_the_example_did_not_show(asked):
    sim = qsim.QuantSim(Steps().double().eval(), X, EXACT)
    sim.calibrate([X], forward=lambda m, x: list(m(x)), progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(sim(X))
    generator = sim(X, more=True)
    next(generator)
    next(generator)
    ends = generator.close if asked == 1 else lambda: list(generator)  # a program may want no more
    with pytest.warns(UserWarning, match=r"'sigmoid' \(test_truth_methods.*its result stays in float"):
        ends()


class Methods(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.rnn = nn.Linear(8, 4), nn.GRU(8, 8)

    def forward(self, x):
        return self.head(self.rnn(x)[0])

    def encode(self, x):
        return self.rnn(x)[0]

    def turned(self, x):
        return x @ self.head.weight.t()

    def cut(self, x):
        return torch.nn.functional.linear(x, self.head.weight[:2])


@pytest.mark.parametrize(
    ("name", "told"),
    {
        "encode": "'rnn' was called by itself: its weight is quantized",
        "turned": "'turned' was called by itself: 'head.weight' and what it computes are in float",
        "cut": "'cut' was called by itself: 'head.weight' and what it computes are in float",
    }.items(),
)
def test_a_method_that_no_example_reached(name, told):
    torch.manual_seed(0)
    model, x = Methods().eval(), torch.randn(5, 2, 8)
    sim = qsim.QuantSim(model, x)
    sim.calibrate([x], progress=False)
    with pytest.warns(UserWarning, match=told):
        found = getattr(sim.model, name)(x)
    assert torch.equal(found, getattr(model, name)(x)) == ("in float" in told)
