"""A weight that is computed anew in each call is a weight: on the grid that its spec says, whatever computes it."""

import copy

import pytest
import torch
import torch.nn.functional as F
from by_hand import EXACT, decibels, linear, on_grid, simulated, weight_on_grid
from models import Forward
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import qsim


class LowRank(nn.Module):
    """Adds a product of two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(6, 2)), nn.Parameter(torch.randn(2, 8))

    def forward(self, weight):
        return weight + self.a @ self.b


class Bent(nn.Module):
    """Through a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, weight):
        return torch.tanh(self.inner(weight)) * torch.arange(1.0, 7.0)[:, None]


def _registered(made):
    def register(layer):
        parametrize.register_parametrization(layer, "weight", made())
        return layer

    return register


def _pruned(layer):
    return prune.random_unstructured(layer, "weight", amount=0.5)


WAYS = {
    "spectral norm": parametrizations.spectral_norm,
    "weight norm": parametrizations.weight_norm,
    "orthogonal": parametrizations.orthogonal,
    "low rank": _registered(LowRank),
    "a layer of its own": _registered(Bent),
    "two in turn": lambda layer: parametrizations.spectral_norm(_registered(LowRank)(layer)),
    "spectral norm by hook": nn.utils.spectral_norm,
    "weight norm by hook": nn.utils.weight_norm,
}


@pytest.fixture(params=WAYS)
def layer(request):
    torch.manual_seed(0)
    found = WAYS[request.param](nn.Linear(8, 6)).eval()
    found(torch.zeros(1, 8))  # hooks set the weight
    return found


def by_hand(model, x):
    inner, out = torch.relu(model.a(x)), model(x)
    return on_grid(linear(model.b, on_grid(torch.relu(linear(model.a, on_grid(x))), inner)), out)


def test_it_is_per_channel(layer):
    model, x = Forward(lambda m, x: m.b(torch.relu(m.a(x))), a=layer, b=nn.Linear(6, 3)).eval(), torch.randn(16, 8)
    sim = simulated(model, x)
    assert torch.equal(sim(x), by_hand(model, x))
    weights = [quantizer.spec for key, quantizer in sim.quantizers().items() if quantizer.spec.axis is not None]
    assert len(weights) == 2


def test_where_a_function_reads_it(layer):
    model, x = Forward(lambda m, x: torch.relu(F.linear(x, m.a.weight)), a=layer).eval(), torch.randn(16, 8)
    expected = on_grid(torch.relu(F.linear(on_grid(x), weight_on_grid(layer.weight))), model(x))
    if any(hook for hook in layer._forward_pre_hooks):
        pytest.skip("without a call of the layer its hook computes nothing")
    assert torch.equal(simulated(model, x)(x), expected)


def test_compiled(layer):
    model, x = Forward(lambda m, x: m.b(torch.relu(m.a(x))), a=layer, b=nn.Linear(6, 3)).eval(), torch.randn(16, 8)
    sim = simulated(model, x)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(sim, backend="aot_eager")(x), sim(x))


class Own(nn.Linear):
    """A layer of the user's that multiplies with its parameter."""

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


class Standardized(nn.Linear):
    """A layer of the user's that computes its weight in its forward."""

    def forward(self, x):
        return F.linear(x, self.weight - self.weight.mean(1, keepdim=True), self.bias)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("way", [*WAYS, "pruned", "a class of the user's"])
def test_where_no_example_reached_it(way, compiled):
    torch.manual_seed(0)
    layer = Own(8, 6) if way == "a class of the user's" else WAYS.get(way, _pruned)(nn.Linear(8, 6))
    model, x = Forward(lambda m, x, more=False: m.a(x) if more else x * 2, a=layer.eval()).eval(), torch.randn(16, 8)
    sim = simulated(model, x)
    model(x, more=True)  # hooks set the weight
    torch._dynamo.reset()
    called = torch.compile(sim, backend="aot_eager") if compiled else sim
    with pytest.warns(UserWarning, match=r"'a(.linear)?' .*its weight is quantized, its result stays in float") as noted:
        found = called(x, more=True)
    torch.testing.assert_close(found, linear(layer, on_grid(x)))
    assert not any("parametrizations" in str(w.message) for w in noted)
    assert any("a.weight" in p or "a.linear.weight" in p for p in sim.calibrate([x], progress=False).problems)


@pytest.mark.parametrize("kind", [nn.GRUCell, nn.LSTMCell, nn.RNNCell, nn.MultiheadAttention])
def test_recurrent_cells_and_attention_that_no_example_reached(kind):
    """Compiled as in eager: their weights are on their grid."""
    layer = kind(8, 2 if kind is nn.MultiheadAttention else 8)

    def forward(m, x, other=False):
        out = (m.layer(x, x, x) if isinstance(m.layer, nn.MultiheadAttention) else m.layer(x)) if other else x.sigmoid()
        return out[0] if isinstance(out, tuple) else out

    model, x = Forward(forward, layer=layer).eval(), torch.randn(16, 8)
    sim = simulated(model, x)
    torch._dynamo.reset()
    compiled = torch.compile(sim, fullgraph=True, backend="eager")
    with pytest.warns(UserWarning, match=r"'layer[.\w]*' .*(its weight is quantized|stays in float)"):
        expected = sim(x, other=True)
    torch.testing.assert_close(compiled(x, other=True), expected)
    assert not torch.allclose(expected, model(x, other=True))


def test_a_weight_of_the_forwards_own_that_no_example_reached():
    model, x = Forward(lambda m, x, more=False: m.a(x) if more else x * 2, a=Standardized(8, 6)).eval(), torch.randn(16, 8)
    with pytest.warns(UserWarning, match=r"'a.linear' [^,]* ran where the example inputs did not show it, its result stays in float"):
        found = simulated(model, x)(x, more=True)
    assert torch.equal(found, model.a(on_grid(x)))


def test_convolutions_have_their_own_axes():
    torch.manual_seed(0)
    wrap = parametrizations.spectral_norm
    model = nn.Sequential(wrap(nn.Conv2d(3, 4, 3)), nn.ReLU(), wrap(nn.ConvTranspose2d(4, 5, 3))).eval()
    x = torch.randn(2, 3, 8, 8)
    sim = simulated(model, x)
    axes = {quantizer.spec.axis for quantizer in sim.quantizers().values()}
    assert axes == {None, 0, 1}
    sixteen = qsim.QuantSim(model, x, qsim.int16())
    sixteen.calibrate([x], progress=False)
    assert decibels(sixteen(x), model(x)) > 60


def test_training_moves_the_vectors_as_it_does_in_float():
    """Power iteration reads the weight, and no quantizer stands in it."""
    torch.manual_seed(0)
    model, x = nn.Sequential(parametrizations.spectral_norm(nn.Linear(8, 6)), nn.ReLU()), torch.randn(16, 8)
    sim, twin = simulated(copy.deepcopy(model).eval(), x), copy.deepcopy(model)
    sim.train(), twin.train()
    for _ in range(3):
        sim(x), twin(x)
    ours, theirs = sim.model[0].parametrizations.weight[0], twin[0].parametrizations.weight[0]
    assert torch.equal(ours._u, theirs._u)
    assert torch.equal(ours._v, theirs._v)


def test_a_weight_that_data_make_is_none():
    """A parametrization that reads what the forward left for it."""

    class Modulated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by = torch.ones(6, 1)

        def forward(self, weight):
            return weight * self.by

    def forward(m, x):
        m.a.parametrizations.weight[0].by = torch.sigmoid(m.b(x)).mean(0)[:, None]
        return m.a(x)

    torch.manual_seed(0)
    model, x = Forward(forward, a=_registered(Modulated)(nn.Linear(8, 6)), b=nn.Linear(8, 6)).eval(), torch.randn(16, 8)
    config = qsim.Config(weight=EXACT.weight, activation=qsim.TensorSpec(bits=16, method="minmax"), bias=False)
    sim = simulated(model, x, config=config)
    assert "a.linear.weight" not in sim.quantizers()
    assert decibels(sim(x), model(x)) > 35


class Adapted(nn.Module):
    """A layer with a product of low rank beside it, as PEFT puts LoRA into a model."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.a, self.b = base, nn.Linear(8, 2, bias=False), nn.Linear(2, 6, bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.b(self.a(x))


@pytest.mark.parametrize("compiled", [False, True])
def test_an_adapter_around_a_simulated_layer(compiled):
    """The weight, and what the layer reads with scales from tokens, are quantized there too; the adapter is in float, and trains."""
    torch.manual_seed(0)
    model, x = Forward(lambda m, x: m.last(m.a(x)), a=nn.Linear(8, 6), last=nn.Linear(6, 6)).eval(), torch.randn(16, 8)
    sim = simulated(model, x, config=qsim.w8a8_dynamic())  # which leaves the last layer in float
    layer, quantizers = sim.model.a, sim.quantizers()
    before = F.linear(quantizers["input"].quantize(x), quantizers["a.weight"].quantize(layer.weight), layer.bias)
    assert torch.equal(sim(x), model.last(before))
    sim.requires_grad_(False)
    sim.model.a = adapted = Adapted(sim.model.a)
    torch._dynamo.reset()
    called = torch.compile(sim, backend="aot_eager") if compiled else sim
    with pytest.warns(UserWarning, match="its weight is quantized"):
        found = called(x)
    assert torch.equal(found, model.last(before + adapted.b(adapted.a(x))))
    with torch.no_grad():
        assert torch.equal(called(x), found)
    found.square().sum().backward()
    assert adapted.a.weight.grad.norm() > 0
    assert adapted.base_layer.weight.grad is None


@pytest.mark.parametrize("compiled", [False, True])
def test_another_weight_at_the_same_place_is_not_on_the_grid_of_the_first(compiled):
    """What a call reads is asked in each call. Of a parameter of no layer nobody knows before that it is a weight."""
    torch.manual_seed(0)

    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small, self.large = nn.Parameter(torch.randn(6, 8) / 100), nn.Parameter(torch.randn(6, 8) * 10)

        def forward(self, x, other=False):
            return F.linear(x, self.large if other else self.small)

    model, x = Either().eval(), torch.randn(16, 8)
    sim = simulated(model, x)
    torch._dynamo.reset()
    called = torch.compile(sim, backend="aot_eager") if compiled else sim
    with torch.no_grad():
        assert torch.equal(sim(x), on_grid(F.linear(on_grid(x), weight_on_grid(model.small)), model(x)))
        with pytest.warns(UserWarning, match="'linear' [^,]* ran where the example inputs did not show it, its result stays in float"):
            found = called(x, other=True)
        torch.testing.assert_close(found, F.linear(on_grid(x), model.large))


def zero_a_row(weight):
    weight.data[3] = 0


def clip(weight):
    weight.data.clamp_(-0.06, 0.06)


def write_as_an_array(weight):
    weight.detach().numpy()[:, 5] = 0.05


@pytest.mark.parametrize("write", [zero_a_row, clip, write_as_an_array])
def test_a_few_weights_that_are_written_without_a_version_are_read(write):
    x = torch.randn(4, 256)
    sim = qsim.QuantSim(nn.Sequential(nn.Linear(256, 256), nn.ReLU()), x)
    sim.calibrate([x], progress=False)
    with torch.no_grad():
        before = sim(x)
        write(sim.model[0].weight)
        after = sim(x)
        assert not torch.equal(after, before)
        sim.savings = False
        assert torch.equal(after, sim(x))


@pytest.mark.parametrize("table", [nn.Embedding, nn.EmbeddingBag])
def test_a_quantized_table_has_a_dense_gradient(table):
    ids = torch.tensor([[0, 3, 3], [7, 1, 0]])
    m = nn.Sequential(table(10, 8, sparse=True), nn.Linear(8, 3))
    with pytest.warns(UserWarning, match="'0' has sparse=True"):
        sim = simulated(m, ids, config=EXACT)
    sim(ids).square().sum().backward()
    dense = copy.deepcopy(m)
    dense[0].sparse = False
    other = simulated(dense, ids, config=EXACT)
    other(ids).square().sum().backward()
    assert torch.equal(sim.model[0].weight.grad, other.model[0].weight.grad)
    assert m[0].sparse  # the model that was given is as it was


def test_a_table_in_float_keeps_its_sparse_gradient():
    ids = torch.tensor([[0, 3, 3], [7, 1, 0]])
    sim = simulated(nn.Sequential(nn.Embedding(10, 8, sparse=True), nn.Linear(8, 3)), ids, config=EXACT.override("0", weight=None))
    sim(ids).square().sum().backward()
    assert sim.model[0].weight.grad.is_sparse


READERS = {
    "transposed": lambda m, z: F.linear(z, m.fc.weight.t()),
    "a row": lambda m, z: z * m.fc.weight[0],
    "a part": lambda m, z: F.linear(z, m.fc.weight[:4]),
    "scaled": lambda m, z: F.linear(z, m.fc.weight * 0.5),
}


@pytest.mark.parametrize("reads", READERS.values(), ids=READERS)
def test_a_weight_that_the_example_reads_in_another_form_is_quantized_where_its_layer_is_called(reads, recwarn):
    torch.manual_seed(0)
    x = torch.randn(32, 8).double()
    model = Forward(lambda m, x, layer=False: m.fc(x) if layer else reads(m, x), fc=nn.Linear(8, 8).double()).eval()
    sim = simulated(model, x)
    assert not recwarn.list  # something does read it
    with pytest.warns(UserWarning, match="its weight is quantized, its result stays in float"):
        y = sim(x, layer=True)
    torch.testing.assert_close(y, linear(model.fc, on_grid(x)), rtol=1e-9, atol=1e-9)
