"""A tensor of unknown origin is an activation, and ranges come from whole tensors."""

import dataclasses
from collections import UserDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from by_hand import EXACT, decibels, on_grid
from models import Calls, Forward
from torch import nn

import qsim

WIDE = dataclasses.replace(
    EXACT, weight=dataclasses.replace(EXACT.weight, bits=16), activation=dataclasses.replace(EXACT.activation, bits=16)
)


def simulated(model: nn.Module, *inputs: Any, config: qsim.Config = EXACT) -> qsim.QuantSim:
    sim = qsim.QuantSim(model.eval(), inputs, config)
    sim.calibrate([inputs], forward=lambda m, given: m(*given), progress=False)
    return sim


# Ranges from a slice.

HIDDEN = {
    "F.hardswish": lambda x: F.hardswish(x * 2),
    "F.hardsigmoid": lambda x: F.hardsigmoid(x * 2),
    "nn.Hardswish": nn.Hardswish(),
    "nn.Hardsigmoid": nn.Hardsigmoid(),
    "torch.relu_": lambda x: torch.relu_(x * 2),
    "F.hardswish in place": lambda x: F.hardswish(x * 2, inplace=True),
    "F.leaky_relu_": lambda x: F.leaky_relu_(x * 2, 0.1),
}
# Columns of other magnitudes: the first is no guide to the rest.
_SEEDED = torch.Generator().manual_seed(0)
COLUMNS = torch.randn(64, 8, dtype=torch.float64, generator=_SEEDED) * torch.tensor([0.01, 1, 2, 3, 4, 5, 10, 50.0])


@pytest.mark.parametrize("name", HIDDEN)
def test_the_first_reader_reads_a_slice(name):
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = HIDDEN[name]

        def forward(self, x):
            y = self.act(x)
            return y[:, :1].sigmoid() * y

    model = Gate()
    sim = simulated(model, COLUMNS, config=WIDE)
    assert decibels(sim(COLUMNS), model(COLUMNS)) > 55  # 2 where the range is that of the slice


def test_the_grid_is_that_of_the_whole_tensor():
    sim = simulated(Calls(lambda x: (lambda y: y[:, :1].sigmoid() * y)(F.hardswish(x))), COLUMNS)
    whole = F.hardswish(COLUMNS)
    y = on_grid(F.hardswish(on_grid(COLUMNS)), whole)
    gate = on_grid(y[:, :1].sigmoid(), whole[:, :1].sigmoid())
    expected = on_grid(gate * y, whole[:, :1].sigmoid() * whole)
    torch.testing.assert_close(sim(COLUMNS), expected, rtol=1e-9, atol=1e-9)


# Unknown origins.


class Batch(dict):
    """As tokenizers return it."""


@dataclasses.dataclass
class Pair:
    q: Any
    k: Any


@dataclasses.dataclass
class Nested:
    pair: Any


class Slots:
    __slots__ = ("k", "q")

    def __init__(self, q, k) -> None:
        self.q, self.k = q, k


class Attributes:
    def __init__(self, q, k) -> None:
        self.parts = [q, {"k": k}]


CARRIERS = {
    "a subclass of dict": (lambda q, k: Batch(q=q, k=k), lambda b: (b["q"], b["k"])),
    "a UserDict": (lambda q, k: UserDict(q=q, k=k), lambda b: (b["q"], b["k"])),
    "a nested dataclass": (lambda q, k: Nested(Pair(q, k)), lambda b: (b.pair.q, b.pair.k)),
    "a dataclass in a list": (lambda q, k: [Pair(q, k)], lambda b: (b[0].q, b[0].k)),
    "slots": (Slots, lambda b: (b.q, b.k)),
    "attributes of attributes": (Attributes, lambda b: (b.parts[0], b.parts[1]["k"])),
}


class Scores(nn.Module):
    """Both operands of the product come in in `carrier`."""

    def __init__(self, unpack) -> None:
        super().__init__()
        self.unpack, self.a = unpack, nn.Linear(8, 8).double()

    def forward(self, b):
        q, k = self.unpack(b)
        return q @ k.mT


def tensors(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of other magnitudes: a grid for each row, from another batch, would fit none here."""
    q, k = torch.randn(2, length, 8, dtype=torch.float64).unbind(0)
    return q * torch.linspace(0.1, 3, length).view(-1, 1), k * torch.linspace(2, 0.1, length).view(-1, 1)


@pytest.mark.parametrize("name", CARRIERS)
def test_operands_out_of_a_carrier(name):
    pack, unpack = CARRIERS[name]
    (q, k), (q2, k2) = tensors(5), tensors(7)
    sim = simulated(Scores(unpack), pack(q, k))
    torch.testing.assert_close(sim(pack(q, k)), on_grid(on_grid(q) @ on_grid(k).mT, q @ k.mT), rtol=1e-9, atol=1e-9)
    expected = on_grid(on_grid(q2, q) @ on_grid(k2, k).mT, q @ k.mT)
    torch.testing.assert_close(sim(pack(q2, k2)), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", CARRIERS)
def test_a_layer_that_reads_what_a_carrier_holds(name):
    pack, unpack = CARRIERS[name]
    q, k = tensors(5)
    model = Forward(lambda m, b: m.a(unpack(b)[0]) * unpack(b)[1], a=nn.Linear(8, 8).double())
    sim = simulated(model, pack(q, k), config=WIDE)
    with torch.no_grad():
        assert decibels(sim(pack(q, k)), model(pack(q, k))) > 60
        assert all(e.axis is None for name, e in sim.encodings().items() if not name.endswith("a.weight"))


@torch.jit.script
def scripted(x):
    return x * 2.0 + x.abs()


def through_sparse(x):
    return torch.sparse.mm(torch.eye(x.shape[0], dtype=x.dtype).to_sparse(), x)


def through_set(x):
    y = torch.empty(0, dtype=x.dtype)
    return y.set_(x.detach().clone())


def through_spectrum(x):
    padded = x.flatten().detach()
    return torch.stft(padded, 8, 4, window=torch.ones(8, dtype=x.dtype), return_complex=True).abs().mT[:, :4].repeat(1, 2)


SOURCES = {
    "a scripted function": scripted,
    "vmap": lambda x: torch.vmap(lambda row: row * 2.0 + row.sin())(x),
    "stft": through_spectrum,
    "a sparse product": through_sparse,
    "numpy": lambda x: torch.from_numpy(x.detach().numpy() * 1.5),
    "a list": lambda x: torch.tensor(x.tolist(), dtype=x.dtype),
    "set_": through_set,
    "dlpack": lambda x: torch.from_dlpack(x.detach().clone()),
}


@pytest.mark.parametrize("name", SOURCES)
def test_operands_of_unknown_make(name):
    source = SOURCES[name]

    class Product(nn.Module):
        def forward(self, x):
            y = source(x)
            return y @ y.mT

    model, (x, _), (x2, _) = Product(), tensors(8), tensors(12)
    sim = simulated(model, torch.cat([x, x2]), config=WIDE)
    with torch.no_grad():
        for given in (torch.cat([x, x2]), x, x2, x.flip(0), x2[:6]):  # other lengths, other rows
            assert decibels(sim(given), model(given)) > 60


@pytest.mark.parametrize("name", ["numpy", "a list", "set_", "dlpack"])
def test_an_activation_of_unknown_make_has_one_scale(name):
    source = SOURCES[name]
    x, _ = tensors(8)
    sim = simulated(Calls(lambda x: F.linear(source(x), source(x) * 0.5)), x)
    assert all(e.axis is None for e in sim.encodings().values())


def test_a_scripted_module_in_between():
    class Inner(nn.Module):
        def forward(self, x):
            return torch.tanh(x) * 3.0

    model = Forward(lambda m, x: m.b(m.inner(m.a(x))), a=nn.Linear(8, 8), inner=torch.jit.script(Inner()), b=nn.Linear(8, 8)).double()
    x, _ = tensors(8)
    sim = simulated(model, x, config=WIDE)
    with torch.no_grad():
        assert decibels(sim(x), model(x)) > 60
        assert decibels(sim(x[:3].flip(0)), model(x[:3].flip(0))) > 60


def test_what_no_mode_meets_is_quantized_once():
    """By dropout, which returns what it is given where nothing is dropped: scaled up, it lies on another grid."""
    model = Forward(lambda m, x: torch.sigmoid(F.dropout(F.hardswish(x), 0.1, m.training)[:, :1]))
    x = torch.linspace(-2, 2, 256, dtype=torch.float64).view(32, 8).sin() * 3
    sim = simulated(model, x)
    sim.train()
    torch.manual_seed(0)
    found = sim(x)
    torch.manual_seed(0)
    y = F.dropout(on_grid(F.hardswish(on_grid(x)), F.hardswish(x)), 0.1)[:, :1]
    torch.testing.assert_close(found, on_grid(y.sigmoid(), F.hardswish(x)[:, :1].sigmoid()), rtol=0, atol=1e-9)


def test_arguments_behind_the_asterisk_keep_their_quantizers():
    """The scale's own is not put on what stands in its position."""
    model = Starred()
    x, r0, r1, scale = torch.randn(4, 32, 8, dtype=torch.float64).unbind(0)
    r1, scale = r1 * 100, scale * 0.01
    sim = qsim.QuantSim(model.eval(), {"x": x, "scale": scale}, WIDE)
    sim.calibrate([{"x": x, "scale": scale}], progress=False)
    with torch.no_grad():
        found, expected = sim(x, r0, r1, scale=scale), model(x, r0, r1, scale=scale)
    assert decibels(found[1], expected[1]) > 90  # r1, on nobody's grid
    assert decibels(found[0], expected[0]) > 60


class Starred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8).double()

    def forward(self, x, *rest, scale=None):
        y = self.a(x) * scale
        return y, (rest[1] if rest else y)


def test_attention_between_what_dropout_hands_on():
    """Dropout in evaluation returns what it is given; attention asks whether two of its operands are one tensor, also in calibration."""

    def forward(m, x):
        y = F.tanh(x)  # quantized where dropout reads it
        return m.attention(F.dropout(y, 0.1, m.training), y, y, need_weights=False)[0]

    model = Forward(forward, attention=nn.MultiheadAttention(8, 2, batch_first=True)).eval()
    x = torch.randn(2, 5, 8)
    sim = qsim.QuantSim(model, x, qsim.int16())
    assert not sim.calibrate([x], progress=False).problems
    with torch.no_grad():
        assert decibels(sim(x), model(x)) > 60
        sim.disable("tanh*")
        assert decibels(sim(x), model(x)) > 60
