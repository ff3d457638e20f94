"""What a product reads lies on one grid: what was put together from parts on several grids is quantized where it is read, and so are
sums that a function computes which else only moves values, and what comes out of complex numbers."""

import pytest
import torch
import torch.nn.functional as F
from by_hand import linear, on_grid, simulated
from models import Forward
from torch import nn

import qsim

X = torch.linspace(-2, 2, 256, dtype=torch.float64).view(32, 8).sin()
FEW = torch.tensor([0, 0, 3])


def filled(x, y):
    z = torch.zeros_like(x)
    for i in range(8):
        z[:, i] = (x, y)[i % 2][:, i]
    return z


def written(x, y):
    z = x.clone()
    z[:, 2:5] = y[:, 2:5]
    return z


PIECED = {
    "where": lambda x, y: torch.where(x > 0.5, x, y),
    "setitem": written,
    "filled": filled,
    "select_scatter": lambda x, y: torch.select_scatter(x, y[:, 0], 1, 1),
    "index_copy": lambda x, y: x.index_copy(0, torch.tensor([0, 3]), y[:2]),
    "masked_scatter": lambda x, y: x.masked_scatter(x < 0, y),
    "index_put": lambda x, y: torch.index_put(x, (torch.tensor([1, 2]),), y[:2]),
    "moved on": lambda x, y: torch.where(x > 0.5, x, y).flip(0).cummax(0).values,
}


def expected_of(put, x: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
    """`put` takes what was quantized: x, and its hyperbolic tangent times three."""
    q = on_grid(x)
    y = on_grid(on_grid(torch.tanh(q), torch.tanh(x)) * 3.0, torch.tanh(x) * 3.0)
    seen = put(x, torch.tanh(x) * 3.0)
    return on_grid(linear(layer, on_grid(put(q, y), seen)), layer(seen))


@pytest.mark.parametrize("put", PIECED.values(), ids=PIECED)
def test_what_is_pieced_together_is_quantized_as_a_whole(put):
    torch.manual_seed(0)
    m = Forward(lambda m, x: m.c(put(x, torch.tanh(x) * 3.0)), c=nn.Linear(8, 8).double()).eval()
    sim = simulated(m, X)
    torch.testing.assert_close(sim(X), expected_of(put, X, m.c), rtol=1e-9, atol=1e-9)
    assert "c.input[0]" in sim.quantizers()


def test_biases_are_integers_then():
    m = Forward(lambda m, x: m.c(torch.where(x > 0.5, x, torch.tanh(x) * 3.0)), c=nn.Linear(8, 8)).eval()
    summary = simulated(m, X.float(), config=qsim.int8()).summary()
    assert [left.name for left in summary.left] == []


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("function", [torch.matmul, F.scaled_dot_product_attention], ids=["matmul", "attention"])
def test_products_of_activations(function, bits):
    def forward(m, x):
        mixed = torch.where(x > 0.5, x, torch.tanh(x) * 3.0)
        return function(mixed, mixed.mT) if function is torch.matmul else function(x, mixed, mixed)

    config = qsim.Config(activation=qsim.TensorSpec(bits=bits, method="minmax"))
    sim = simulated(Forward(forward).eval(), X.float(), config=config)
    read = [key for key in sim.quantizers() if ".input[" in key]
    assert len(read) == (2 if function is torch.matmul else 1)  # attention reads one tensor twice


def test_one_grid_is_no_reason():
    """Parts of one tensor, and calls with one tensor each."""
    torch.manual_seed(0)

    def forward(m, x):
        y = x.clone()
        y[:, :4] = x[:, 4:]
        return m.c(y) + m.c(torch.tanh(x))

    sim = simulated(Forward(forward, c=nn.Linear(8, 8).double()).eval(), X)
    assert not any(".input[" in key for key in sim.quantizers())


def accumulated(x, y):
    return torch.index_put(x, (FEW,), y[:3], accumulate=True)


def accumulated_in_place(x, y):
    return x.clone().index_put_((FEW,), y[:3], True)


def scattered(x, y):
    return (x + y).scatter(0, torch.zeros(4, 8, dtype=torch.long), 0.3, reduce="add")


def folded(x, y):
    blocks = F.unfold(torch.stack([x, y])[:, None], 3, padding=1)
    return F.fold(blocks, (32, 8), 3, padding=1)[0, 0]


@pytest.mark.parametrize("add", [accumulated, accumulated_in_place, scattered, folded])
@pytest.mark.parametrize("compiled", [False, True])
def test_sums_are_quantized_where_they_are_made(add, compiled):
    torch.manual_seed(0)
    torch._dynamo.reset()
    m = Forward(lambda m, x: m.c(add(x, torch.tanh(x) * 3.0)), c=nn.Linear(8, 8).double()).eval()
    config = qsim.Config(activation=qsim.TensorSpec(bits=4, method="minmax"), bias=False)
    sim = simulated(m, X, config=config)
    with torch.no_grad():
        y = sim(X)
        read = []
        handle = sim.model.c.register_forward_pre_hook(lambda module, args: read.append(args[0]))
        sim(X)
        handle.remove()
        assert len(read[0].unique()) <= 16
        if compiled:
            torch.testing.assert_close(torch.compile(sim, backend="eager", fullgraph=True)(X), y, rtol=1e-9, atol=1e-9)


def test_blocks_that_do_not_overlap_are_moved_alone():
    m = Forward(lambda m, x: m.c(F.fold(F.unfold(x, 2, stride=2), (8, 8), 2, stride=2)), c=nn.Conv2d(1, 4, 1)).eval()
    assert list(simulated(m, torch.randn(2, 1, 8, 8)).quantizers()) == ["input", "c.weight", "c.output"]


COMPLEX = {
    "transform": lambda x: torch.fft.fft(x, dim=-1).real,
    "product": lambda x: (torch.complex(x, torch.tanh(x)) * 2j).imag,
    "cast": lambda x: x.to(torch.complex128).mul(1.7j).imag,
}


@pytest.mark.parametrize("through", COMPLEX.values(), ids=COMPLEX)
def test_what_comes_out_of_complex_numbers_is_quantized_where_it_is_read(through):
    torch.manual_seed(0)
    m = Forward(lambda m, x: m.c(through(x)), c=nn.Linear(8, 8).double()).eval()
    sim = simulated(m, X)
    with torch.no_grad():
        values = through(X) if "input" not in sim.quantizers() else through(on_grid(X))
        seen = through(X)
        expected = on_grid(linear(m.c, on_grid(values, seen)), m.c(seen))
        torch.testing.assert_close(sim(X), expected, rtol=1e-9, atol=1e-9)


def test_a_complex_constant_is_one():
    """As tables of rotary embeddings are."""
    m = Forward(lambda m, x: x * torch.polar(torch.ones(8).double(), torch.arange(8.0).double()).real).eval()
    assert not any("does not see" in note for note in simulated(m, X).summary().notes)
