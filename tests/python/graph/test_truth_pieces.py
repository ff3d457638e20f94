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


TOKEN = torch.linspace(-5, 5, 8, dtype=torch.float64)
BESIDE = {
    "parameter": lambda m, y: torch.where(y > 0.5, m.token, y),
    "computed": lambda m, y: torch.where(y > 0.5, m.token * 2.0, y),
    "masked_fill": lambda m, y: y.masked_fill(y > 0.5, 7.0),
    "number": lambda m, y: torch.where(y > 0.5, 7.0, y),
    "pad": lambda m, y: F.pad(y[:, 1:], (1, 0), value=7.0),
    "index_fill": lambda m, y: y.index_fill(1, torch.tensor([0, 3]), 7.0),
    "setitem": lambda m, y: _set(y, m.token),
    "base": lambda m, y: torch.full_like(y, 7.0).index_copy(0, torch.tensor([0, 3]), y[:2]),
    "ones": lambda m, y: torch.where(y > 0.5, torch.ones_like(y) * 7, y),
}


def _set(y, value):
    z = y.clone()
    z[:, 1:3] = value[1:3]
    return z


def _filled(y):
    z = y.clone()
    z[:, 0].fill_(7.0)
    return z


def test_a_view_that_is_filled():
    """What is changed under another name is quantized where it is read, once."""
    m = Forward(lambda m, x: m.c(_filled(torch.tanh(x) * 3.0)), c=nn.Linear(8, 8).double()).eval()
    with torch.no_grad():
        seen = _filled(torch.tanh(X) * 3.0)
        values = _filled(on_grid(torch.tanh(on_grid(X)), torch.tanh(X)) * 3.0)
        torch.testing.assert_close(simulated(m, X)(X), on_grid(linear(m.c, on_grid(values, seen)), m.c(seen)), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("put", BESIDE.values(), ids=BESIDE)
def test_numbers_that_are_put_in_are_quantized_with_what_they_stand_in(put, compiled):
    torch.manual_seed(0)
    torch._dynamo.reset()
    m = Forward(lambda m, x: m.c(put(m, torch.tanh(x) * 3.0)), c=nn.Linear(8, 8).double()).eval()
    m.token = nn.Parameter(TOKEN.clone())
    sim = simulated(m, X)
    assert "c.input[0]" in sim.quantizers()
    with torch.no_grad():
        y = sim(X)
        grid = sim.quantizers()["c.input[0]"].encoding
        assert max(-float(grid.min), float(grid.max)) > 3.4  # three times a hyperbolic tangent is below three
        y1, y3 = torch.tanh(X), torch.tanh(X) * 3.0
        values = put(m, on_grid(on_grid(torch.tanh(on_grid(X)), y1) * 3.0, y3))
        torch.testing.assert_close(y, on_grid(linear(m.c, on_grid(values, put(m, y3))), m.c(put(m, y3))), rtol=1e-9, atol=1e-9)
        if compiled:
            torch.testing.assert_close(torch.compile(sim, backend="eager", fullgraph=True)(X), y, rtol=1e-9, atol=1e-9)


NO_NUMBERS = {
    "zeros": lambda m, y: F.pad(y[:, 1:], (1, 0)).masked_fill(y > 5, 0.0),
    "zero buffer": lambda m, y: torch.where(y > 0.5, m.zero, y),
    "empty": lambda m, y: _copied(torch.empty_like(y), y),
    "new": lambda m, y: _copied(torch.empty(y.shape, dtype=y.dtype), y),
    "shape": lambda m, y: y.flatten().view_as(m.token.expand(32, 8)).type_as(m.token),
    "beside": lambda m, y: torch.broadcast_tensors(y, m.token)[0],
}


def _copied(out, y):
    out[:, ::2] = y[:, 1::2]
    out[:, 1::2] = y[:, ::2]
    return out


@pytest.mark.parametrize("put", NO_NUMBERS.values(), ids=NO_NUMBERS)
def test_what_puts_in_no_numbers_keeps_its_grid(put):
    m = Forward(lambda m, x: m.c(put(m, torch.tanh(x) * 3.0)), c=nn.Linear(8, 8).double()).eval()
    m.token = nn.Parameter(TOKEN.clone())
    m.register_buffer("zero", torch.zeros(8).double())
    assert not any(".input[" in key for key in simulated(m, X).quantizers())


def test_what_training_alone_puts_in_is_no_reason():
    """As wav2vec 2 does with its mask."""

    def forward(m, x):
        y = torch.tanh(x) * 3.0
        if m.training:
            y[:, 2] = m.token[2]
        return m.c(y)

    m = Forward(forward, c=nn.Linear(8, 8).double()).eval()
    m.token = nn.Parameter(TOKEN.clone())
    sim = simulated(m, X, config=qsim.int8())
    assert not any(".input[" in key for key in sim.quantizers())
    assert not sim.summary().left  # the bias is on the grid of what it is added to


FLAGS = {
    "cast": lambda x: (x > 0.3).double(),
    "where": lambda x: torch.where(x > 0.3, 1.0, 0.25).double(),
    "positions": lambda x: x.argsort(1).to(x.dtype),
    "counts": lambda x: (x * 3).long().to(x),
}


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_numbers_made_of_flags_and_positions_have_grids_of_their_own(flags):
    """Not that of what was compared."""
    torch.manual_seed(0)
    m = Forward(lambda m, x: m.c(flags(torch.tanh(x))), c=nn.Linear(8, 8).double()).eval()
    sim = simulated(m, X)
    with torch.no_grad():
        x = on_grid(X) if "input" in sim.quantizers() else X  # what is compared alone needs no grid
        q = on_grid(torch.tanh(x), torch.tanh(X)) if "tanh.output" in sim.quantizers() else torch.tanh(x)
        seen = flags(torch.tanh(X))
        expected = on_grid(linear(m.c, on_grid(flags(q), seen)), m.c(seen))
        torch.testing.assert_close(sim(X), expected, rtol=1e-6, atol=1e-6)
    assert not any("does not see" in note for note in sim.summary().notes)


def test_constants_as_large_as_an_operand_are_constants():
    m = Forward(lambda m, x: m.c(x + torch.ones_like(x)), c=nn.Linear(8, 8)).eval()
    sim = simulated(m, X.float())
    assert "add.input[1]" in sim.quantizers()


@pytest.mark.parametrize(("add", "name"), [(accumulated, "index_put"), (scattered, "scatter"), (folded, "fold")])
def test_sums_on_a_path_that_no_example_took_are_warned_of(add, name):
    m = Forward(lambda m, x, sums=False: m.c(add(x, x) if sums else x), c=nn.Linear(8, 8).double()).eval()
    sim = simulated(m, X)
    with pytest.warns(UserWarning, match=name):
        sim(X, sums=True)


SPECTRAL = {
    "masked": lambda m, x: torch.istft(m.bend(m.c(x)) * torch.polar(torch.ones(5, 4), m.turn), 8, 4, window=m.window, center=False),
    "written": lambda m, x: torch.view_as_real(torch.complex(m.bend(m.c(x)), torch.tanh(x))).sum(-1),
    "magnitude": lambda m, x: torch.complex(m.bend(m.c(x)), x * 1.5).abs().log1p(),
    "inverse": lambda m, x: torch.fft.irfft(torch.complex(m.bend(m.c(x)), x), dim=1) * 0.3,
}


@pytest.mark.parametrize("forward", SPECTRAL.values(), ids=SPECTRAL)
def test_complex_numbers_in_between_are_data(forward):
    """What they are made of, what real numbers come out, and what is computed with these: neither metrics nor positions."""
    torch.manual_seed(0)
    m = Forward(forward, c=nn.Conv1d(5, 5, 1), bend=nn.Sigmoid()).eval()
    m.turn, m.window = torch.randn(5, 4), torch.hann_window(8) + 0.1
    x = torch.randn(3, 5, 4)
    sim = simulated(m, x)
    keys = sim.quantizers().keys()
    assert "bend.output" in keys or any(key.startswith("c.") and key.endswith("output") for key in keys)
    told = {left.name for left in sim.summary().left if left.reason.startswith("complex numbers")}
    reasons = {left.reason for left in sim.summary().left if left.name not in told}
    assert told == ({"mul"} if forward is SPECTRAL["masked"] else set())
    assert not reasons or reasons == {"bias in float: Config.bias is off"}
    assert not any("window" in key for key in keys)
    assert sim(x).unique().numel() <= 256


def test_complex_inputs_are_data():
    z = torch.randn(4, 5, dtype=torch.complex64)
    sim = simulated(Forward(lambda m, z: (z.abs() + 1) * 2), z)
    assert list(sim.quantizers()) == ["abs.output", "add.output", "mul.output"]


def test_angles_of_positions_are_none():
    """A rotary embedding by complex numbers."""
    m = Forward(lambda m, x, at: torch.polar(torch.ones(4), at.float() * 0.1).real * x)
    assert [left.name for left in simulated(m, torch.randn(3, 4), torch.arange(4)).summary().left] == ["mul"]
