"""Data where the example had a constant, constants that flags place, and operands that come from two kinds of places."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qsim

SIXTEEN = qsim.Config(weight=qsim.TensorSpec(bits=16, symmetric=True), activation=qsim.TensorSpec(bits=16))


def on(target):
    return qsim.Config(weight=SIXTEEN.weight, activation=SIXTEEN.activation, target=target)


def ratio(got, wanted):
    return 10 * torch.log10(wanted.square().mean() / (got - wanted).square().mean().clamp_min(1e-30))


class Cell(nn.Module):
    """Its state is zero, or what its caller passes."""

    def __init__(self, step):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(8, 4)
        self.u, self.gru = nn.Parameter(torch.randn(4, 4)), nn.GRUCell(4, 4)
        self.step = step

    def forward(self, x, h=None):
        if h is None:
            h = torch.zeros(len(x), 4)
        return self.step(self, x, h)


STEPS = {
    "product": lambda m, x, h: m.a(x) + h @ m.u,
    "layer": lambda m, x, h: m.a(x) + m.b(h),
    "gru": lambda m, x, h: m.gru(x, h),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_a_state_where_the_example_had_zeros(step, compiled):
    model, x, h = Cell(step).eval(), torch.randn(3, 4), torch.randn(3, 4)
    sim = qsim.QuantSim(model, x, on("tensorrt"))
    sim.calibrate([x], progress=False)
    torch._dynamo.reset()
    run = torch.compile(sim, backend="eager", fullgraph=True) if compiled else sim
    with torch.no_grad():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert ratio(run(x), model(x)) > 60
        with pytest.warns(UserWarning, match=r"ran on what the example inputs did not show it: its operand 0 stays in float"):
            got = run(x, h)
        assert ratio(got, model(x, h)) > 60


def test_what_adds_it_is_told():
    model, x, h = Cell(lambda m, x, h: m.a(x) + h).eval(), torch.randn(3, 4), torch.randn(3, 4)
    sim = qsim.QuantSim(model, x, SIXTEEN)
    sim.calibrate([x], progress=False)
    with pytest.warns(UserWarning, match=r"'add' \(.*\) ran on what the example inputs did not show it: its operand 1 stays in float"):
        sim(x, h)


def test_a_layer_of_torch_that_starts_from_zeros():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.LSTM(4, 4, batch_first=True)

        def forward(self, x, state=None):
            return self.layer(x, state)[0]

    model, x = Layer().eval(), torch.randn(3, 1, 4)
    state = torch.randn(1, 3, 4), torch.randn(1, 3, 4)
    sim = qsim.QuantSim(model, x, on("tensorrt"))
    sim.calibrate([x], progress=False)
    with pytest.warns(UserWarning, match="operand 0 stays in float"):
        got = sim(x, state)
    assert ratio(got, model(x, state)) > 60


def test_calibrated_on_states_it_is_quantized_as_they_are():
    model, x, h = Cell(STEPS["layer"]).eval(), torch.randn(3, 4), torch.randn(3, 4)
    sim = qsim.QuantSim(model, x, SIXTEEN)
    sim.calibrate([x], forward=lambda model, x: (model(x), model(x, h)), progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ratio(sim(x, h), model(x, h)) > 60


class Default(nn.Module):
    def __init__(self, step):
        super().__init__()
        self.a, self.w = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4))
        self.register_buffer("b", torch.rand(3, 4))
        self.step = step

    def forward(self, x, given=None):
        return self.step(self, self.a(x), given)


DEFAULTS = {
    "weight": (lambda m, y, given: y @ (m.w if given is None else given), torch.randn(4, 4), "matmul"),
    "buffer": (lambda m, y, given: y + (m.b if given is None else given), torch.randn(3, 4) * 9, "add"),
}


@pytest.mark.parametrize(("step", "given", "name"), DEFAULTS.values(), ids=DEFAULTS)
def test_data_where_the_example_had_a_parameter_or_buffer(step, given, name):
    model, x = Default(step).eval(), torch.randn(3, 4)
    sim = qsim.QuantSim(model, x, SIXTEEN)
    sim.calibrate([x], progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ratio(sim(x), model(x)) > 60
    with pytest.warns(UserWarning, match=rf"'{name}' \(.*\) ran where the example inputs did not show it"):
        got = sim(x, given)
    assert ratio(got, model(x, given)) > 60


def test_parameters_that_functional_call_swaps_are_the_models():
    model, x = Default(DEFAULTS["weight"][0]).eval(), torch.randn(3, 4)
    sim = qsim.QuantSim(model, x, SIXTEEN)
    sim.calibrate([x], progress=False)
    swapped = {name: p.detach().clone() for name, p in sim.named_parameters()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(torch.func.functional_call(sim, swapped, (x,)), sim(x))


class Masked(nn.Module):
    """Attention whose mask is zeros, filled where there is padding."""

    def __init__(self, mask, fused):
        super().__init__()
        self.a, self.b, self.mask, self.fused = nn.Linear(4, 4), nn.Linear(4, 4), mask, fused

    def forward(self, x, tokens):
        mask = self.mask(x, tokens)[:, None]
        if self.fused:
            return F.scaled_dot_product_attention(self.a(x), x, self.b(x), attn_mask=mask)
        return torch.softmax(self.a(x) @ x.mT / 2 + mask, -1) @ self.b(x)


def filled_by_index(x, tokens):
    mask = torch.zeros(tokens.shape)
    mask[tokens == 0] = -1e9
    return mask


MASKS = {
    "new_zeros": lambda x, tokens: x.new_zeros(tokens.shape).masked_fill(tokens == 0, -1e9),
    "zeros, -inf": lambda x, tokens: torch.zeros(tokens.shape).masked_fill(tokens == 0, -torch.inf),
    "zeros_like, in place": lambda x, tokens: torch.zeros_like(tokens, dtype=x.dtype).masked_fill_(tokens == 0, torch.finfo(x.dtype).min),
    "by index": filled_by_index,
    "the rest opened": lambda x, tokens: torch.full(tokens.shape, -1e9).masked_fill(tokens != 0, 0.0),
}


@pytest.mark.parametrize("target", ["default", "tensorrt"])
@pytest.mark.parametrize("fused", [False, True], ids=["softmax", "sdpa"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_masks_made_of_zeros_are_masks_without_padding_too(mask, fused, target):
    model, x, whole = Masked(mask, fused).eval(), torch.randn(3, 6, 4), torch.ones(3, 6, dtype=torch.long)
    padded = whole.clone()
    padded[0, 3:] = 0
    sim = qsim.QuantSim(model, (x, whole), on(target))
    sim.calibrate([(x, padded)], progress=False)
    assert ratio(sim(x, padded), model(x, padded)) > 60
    assert sim.quantizers().keys().isdisjoint({"add.input[1]", "scaled_dot_product_attention.input[attn_mask]"})


@pytest.mark.parametrize("way", ["attention", "encoder"])
def test_padding_in_torchs_own_attention(way):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
            self.part = nn.MultiheadAttention(4, 2, batch_first=True) if way == "attention" else nn.TransformerEncoder(layer, 2)

        def forward(self, x, padding):
            if way == "attention":
                return self.part(x, x, x, key_padding_mask=padding, need_weights=False)[0]
            return self.part(x, src_key_padding_mask=padding)

    model, x, none = Model().eval(), torch.randn(3, 6, 4), torch.zeros(3, 6, dtype=torch.bool)
    padding = none.clone()
    padding[0, 3:] = True
    sim = qsim.QuantSim(model, (x, none), SIXTEEN)
    sim.calibrate([(x, padding)], progress=False)
    assert ratio(sim(x, padding)[~padding], model(x, padding)[~padding]) > 60


class TwoOrigins(nn.Module):
    """Reads a concatenation, which lies on a grid of its own, or what a layer makes of it."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, flag=False):
        h = torch.cat([x[:, :2], x[:, 2:]], 1)
        if flag:
            h = self.first(h)
        return self.last(h)


def test_an_operand_that_lies_on_a_grid_in_one_example_alone():
    x = torch.randn(3, 6, 4)
    sim = qsim.QuantSim(TwoOrigins().eval(), [x, (x, True)], qsim.int8(target="tensorrt"))
    assert "last.input[0]" in sim.quantizers()


class Shared(nn.Module):
    """A part that reads features in one call, and learned queries in the other."""

    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(x)

    def __init__(self):
        super().__init__()
        self.part, self.layer, self.queries = self.Part(), nn.Linear(4, 4), nn.Parameter(torch.randn(6, 4))

    def forward(self, x):
        return self.part(self.layer(x)), self.part(self.queries.expand(3, -1, -1))


def test_an_operand_that_is_a_parameter_in_some_calls_alone():
    x = torch.randn(3, 6, 4)
    sim = qsim.QuantSim(Shared().eval(), x)
    left = {entry.name: entry.reason for entry in sim.summary().left}
    assert "in some of its calls" in left["part.layer.input[0]"]
    assert "part.layer.input[0]" in qsim.QuantSim(Shared().eval(), x, qsim.int8(target="tensorrt")).quantizers()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_a_constant_of_another_dtype_is_the_same(dtype):
    """A third is another number in each."""

    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 6)

        def forward(self, x):
            return self.layer(x) * torch.softmax(torch.zeros(x.shape[0], 6, dtype=x.dtype), -1) * 0.9

    x = torch.randn(4, 8)
    sim = qsim.QuantSim(Weighted().eval(), x, qsim.int8())
    sim.calibrate([x], progress=False)
    expected = sim(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = sim.to(dtype)(x.to(dtype))
    assert ratio(found.float(), expected) > 20


def test_integers_that_a_module_has_are_on_no_grid():
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.positions = nn.Linear(8, 8), torch.arange(8)

        def forward(self, x):
            return self.layer(x) * self.positions

    x = torch.randn(4, 8)
    sim = qsim.QuantSim(Positions().eval(), x, qsim.int8())
    sim.calibrate([x], progress=False)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(sim, backend="eager", fullgraph=True)(x), sim(x))


HELD = {
    "an attribute": lambda m: m.held["table"],
    "cast": lambda m: m.held["table"].to(torch.float32),
    "moved": lambda m: m.held["table"].t().contiguous().mT,
    "in a list": lambda m: m.listed[0],
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("read", HELD.values(), ids=HELD)
def test_a_plain_tensor_that_a_module_has(read, compiled):
    """Dynamo takes it for an input of the graph."""

    class Projection(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, table = nn.Linear(8, 6), torch.rand(6, 5)
            self.held, self.listed = {"table": table}, [table]

        def forward(self, x):
            return self.layer(x) @ read(self)

    x = torch.randn(16, 8)
    model = Projection().eval()
    sim = qsim.QuantSim(model, x, qsim.int8())
    sim.calibrate([x], progress=False)
    with sim.in_float():
        plain = sim(x)
    expected = sim(x)
    torch._dynamo.reset()
    run = torch.compile(sim.model, backend="eager", fullgraph=True) if compiled else sim
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(run(x), expected)
    assert ratio(expected, plain) < 60
    other = copy.deepcopy(sim)
    for each in (sim, other):
        each.model.held["table"] = each.model.listed[0] = each.model.held["table"] * 5
    with pytest.warns(UserWarning, match="ran on what the example inputs did not show it: its operand 1 stays in float"):
        found = run(x)
    assert torch.equal(found, other(x))
