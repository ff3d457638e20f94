"""Experts in one parameter: every member on the grid of its own weight, whichever function multiplies with it."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qsim
from qsim.config.profile import LINEAR_LAYERS
from qsim.graph.plan.rules import WeightAxes
from qsim.graph.plan.weight_stacks import stack_spec

EXPERTS, WIDTH, WIDER = 4, 32, 48


class Mixture(nn.Module):
    """As transformers has them: `turned` stores ``[experts, in, out]``."""

    def __init__(self, how: str, turned: bool = False) -> None:
        super().__init__()
        shapes = [(EXPERTS, WIDTH, WIDER), (EXPERTS, WIDER, WIDTH)]
        torch.manual_seed(0)
        self.up, self.down = (nn.Parameter(torch.randn(e, *((i, o) if turned else (o, i))) / 8) for e, i, o in shapes)
        self.router, self.how, self.turned = nn.Linear(WIDTH, EXPERTS), how, turned

    def product(self, x, stack, experts):
        if self.how == "eager":
            rows = [None] * len(x)
            for e in experts.unique():
                (chosen,) = torch.where(experts == e)
                y = x[chosen] @ stack[e] if self.turned else F.linear(x[chosen], stack[e])
                rows = [y[chosen.tolist().index(i)] if i in chosen.tolist() else row for i, row in enumerate(rows)]
            return torch.stack(rows)
        if self.how == "batched":
            if self.turned:
                return torch.bmm(x.unsqueeze(1), stack[experts]).squeeze(1)
            return torch.bmm(stack[experts], x.unsqueeze(-1)).squeeze(-1)
        order = experts.argsort()
        ends = torch.histc(experts.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0).int()
        y = F.grouped_mm(x[order], stack if self.turned else stack.transpose(-2, -1), offs=ends)
        return y[order.argsort()]

    def forward(self, x):
        share, experts = self.router(x).softmax(-1).max(-1)
        return self.product(F.silu(self.product(x, self.up, experts)), self.down, experts) * share[:, None]


WAYS = [(how, turned) for how in ("grouped", "batched", "eager") for turned in (False, True)]
X = torch.randn(10, WIDTH, generator=torch.Generator().manual_seed(1))
SPECS = {
    "per channel": {"bits": 4, "axis": 0},
    "per tensor": {"bits": 4},
    "in groups": {"bits": 4, "axis": 1, "block_size": 16},
    "in tiles": {"bits": 4, "axis": (0, 1), "block_size": (16, 8)},
    "per input channel": {"bits": 4, "axis": 1},
    "mxfp4": {"dtype": "mxfp4"},
    "lpbq": {"dtype": "lpbq", "block_size": 16},
}


def simulated(model, spec, activation=None, **options):
    weight = qsim.TensorSpec(method="minmax", symmetric=True, **spec)
    config = qsim.Config(weight, activation, target=LINEAR_LAYERS, **options).override("router", off=True)
    sim = qsim.QuantSim(model.eval(), X, config)
    sim.calibrate([X], progress=False)
    return sim


def by_hand(model, spec):
    """Each member quantized as the weight of a linear layer."""
    made = copy.deepcopy(model)
    for stack in (made.up, made.down):
        for i, member in enumerate(stack.data):
            layer = nn.Linear(*reversed(member.mT.shape if model.turned else member.shape), bias=False)
            layer.weight.data = (member.mT if model.turned else member).contiguous()
            x = torch.randn(2, layer.in_features)
            config = qsim.Config(qsim.TensorSpec(method="minmax", symmetric=True, **spec), None)
            sim = qsim.QuantSim(layer.eval(), x, config)
            sim.calibrate([x], progress=False)
            on_grid = sim.bake().weight.detach()
            stack.data[i] = on_grid.mT if model.turned else on_grid
    return made


@pytest.mark.parametrize(("how", "turned"), WAYS)
@pytest.mark.parametrize("name", SPECS)
def test_each_member_is_a_weight_of_its_own(how, turned, name):
    model = Mixture(how, turned).eval()
    sim, expected = simulated(model, SPECS[name]), by_hand(model, SPECS[name])
    with torch.no_grad():
        found = sim(X)
        assert torch.equal(found, expected(X))
        assert not torch.equal(found, model(X))
        other = torch.randn(7, WIDTH)
        assert torch.equal(sim(other), expected(other))
    baked = sim.bake()
    assert torch.equal(baked.up, expected.up)
    assert type(baked) is Mixture
    if name != "mxfp4":
        assert sim.integer_state_dict()["down"].shape == model.down.shape


@pytest.mark.parametrize("how", ["grouped", "batched"])
def test_compiled_it_is_the_same(how):
    x = X.bfloat16()  # of which Dynamo knows grouped products alone
    sim = qsim.QuantSim(Mixture(how).bfloat16().eval(), x, qsim.Config(qsim.TensorSpec(bits=4, axis=0, method="minmax"), None))
    sim.calibrate([x], progress=False)
    with torch.no_grad():
        assert torch.equal(torch.compile(sim, backend="aot_eager", fullgraph=True)(x), sim(x))


@pytest.mark.parametrize("how", ["grouped", "batched", "eager", "traced"])
def test_switches_copies_and_states(how):
    model = Mixture("batched" if how == "traced" else how)
    if how == "traced":  # a module that copies and pickles itself
        model = torch.fx.symbolic_trace(model)
    sim = simulated(model, SPECS["per channel"])
    saved = io.BytesIO()
    torch.save(sim, saved)
    saved.seek(0)
    other = qsim.QuantSim(model, X, sim.config)
    other.load_state_dict(sim.state_dict())
    with torch.no_grad():
        found = sim(X)
        for again in (copy.deepcopy(sim), torch.load(saved, weights_only=False), other):
            assert torch.equal(again(X), found)
        with sim.in_float():
            assert torch.equal(sim(X), model(X))
        sim.disable("up", "down")
        assert torch.equal(sim(X), model(X))
        sim.enable("up")
        assert not torch.equal(sim(X), model(X))
        sim.enable("down")
        sim.model.up.mul_(2)
        assert not torch.equal(sim(X), found)
    assert type(sim.model.up) is nn.Parameter
    assert sim.model.up is dict(sim.model.named_parameters())["up"]


@pytest.mark.parametrize("how", ["grouped", "batched", "eager"])
def test_gradients_reach_every_expert_straight_through(how):
    sim = simulated(Mixture(how), SPECS["per channel"])
    x = torch.randn(64, WIDTH)
    sim.train()
    sim(x).square().sum().backward()
    expected = by_hand(Mixture(how), SPECS["per channel"])
    expected(x).square().sum().backward()
    for name in ("up", "down"):
        found, wanted = getattr(sim.model, name).grad, getattr(expected, name).grad
        inside = found != 0  # clipped weights pass none
        torch.testing.assert_close(found[inside], wanted[inside])
        assert inside.float().mean() > 0.9


@pytest.mark.parametrize("turned", [False, True])
def test_tokens_lie_along_what_is_summed(turned):
    """A scale for each token, whether the weight comes first or second."""
    token = qsim.TensorSpec(bits=3, method="dynamic", axis=-1, symmetric=True)
    with torch.no_grad():
        batched, eager = (simulated(Mixture(how, turned), SPECS["per channel"], token)(X) for how in ("batched", "eager"))
        torch.testing.assert_close(batched, eager, atol=1e-6, rtol=0)
        assert (batched - simulated(Mixture("batched", turned), SPECS["per channel"])(X)).abs().max() > 0.01


def test_what_no_mode_meets_says_that_activations_are_float():
    token = qsim.TensorSpec(method="dynamic", axis=-1, symmetric=True)
    with pytest.warns(UserWarning, match=r"'grouped_mm' reads stays in float beside quantized weights.*batched_mm"):
        simulated(Mixture("grouped"), SPECS["per channel"], token)


def test_where_all_readers_fall_back_the_stack_is_not_on_its_grid():
    sim = simulated(Mixture("batched"), SPECS["per channel"])
    sim.fallback("bmm*", to="fp16")
    half = copy.deepcopy(sim.model.up.detach()).half().float()
    with torch.no_grad():
        plain = Mixture("batched")
        for stack in (plain.up, plain.down):
            stack.data = stack.data.half().float()
        torch.testing.assert_close(sim(X), plain(X), atol=2e-3, rtol=0)
    assert torch.equal(plain.up, half)
    assert {"up", "down"} <= set(sim.released())


def test_a_batch_of_matrices_is_one_weight_where_the_target_has_a_kernel_for_it():
    class Batched(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 8, 8))

        def forward(self, x):
            return x @ self.weight

    x = torch.randn(3, 5, 8)
    specs = {}
    for target in ("onnxruntime", LINEAR_LAYERS):
        sim = qsim.QuantSim(Batched(), x, qsim.Config(qsim.TensorSpec(axis=0, symmetric=True, method="minmax"), None, target=target))
        (specs[str(target)],) = (planned.spec for planned in sim.decisions.quantizers.values())
    assert [(spec.axis, spec.block_size) for spec in specs.values()] == [(2, None), (1, 8)]


class Others(nn.Module):
    """Weights of three axes that are no stacks of matrices."""

    def __init__(self):
        super().__init__()
        self.conv, self.pair, self.heads = nn.Conv1d(8, 16, 3), nn.Bilinear(16, 16, 16), nn.Parameter(torch.randn(16, 4, 4))
        self.filters, self.first, self.last = nn.Parameter(torch.randn(8, 8, 3)), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        x = self.conv(F.conv1d(x, self.filters)).transpose(1, 2)
        return self.last(self.first(torch.einsum("btd,dnh->btnh", self.pair(x, x), self.heads).flatten(2)))


def test_weights_of_other_operations_are_no_stacks():
    x = torch.randn(2, 8, 10)
    sim = qsim.QuantSim(Others().eval(), x, qsim.w4a16(group=8))
    sim.calibrate([x], progress=False)
    assert list(sim.weights()) == ["first.weight"]


@pytest.mark.parametrize(
    ("fields", "axis", "size"),
    [({}, 0, None), ({"axis": 0}, 2, 7), ({"axis": 1}, 1, 5), ({"axis": 1, "block_size": 4}, 2, 4), ({"dtype": "nvfp4"}, 2, 16)],
)
def test_specs_of_stacks(fields, axis, size):
    spec = stack_spec(qsim.TensorSpec(method="minmax", **fields), WeightAxes(1, 2), (3, 5, 7))
    assert (spec.axis, spec.block_size) == (axis, size)


@pytest.mark.parametrize(("how", "turned"), WAYS)
def test_overrides_are_told_the_shape_of_the_parameter(how, turned):
    model = Mixture(how, turned).eval()
    config = qsim.Config(qsim.TensorSpec(bits=4, axis=0, method="minmax"), None, target=LINEAR_LAYERS)
    config = config.override(lambda site: site.weight_shape == model.up.shape, bits=2)
    sim = qsim.QuantSim(model, X, config)
    assert {key: quantizer.spec.bits for key, quantizer in sim.quantizers().items()} == {"router.weight": 4, "up": 2, "down": 4}


class AddedScores(nn.Module):
    """Attention whose scores are added to biases by the product itself, as Bloom's are."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.biases = nn.Linear(8, 24), nn.Linear(8, 8), nn.Parameter(torch.randn(1, 1, 5))

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = torch.baddbmm(self.biases, q, k.mT, alpha=8**-0.5)
        return self.out(torch.bmm(scores.softmax(-1), v))


def test_batched_products_are_no_linear_layers_and_what_they_add_is_no_stack():
    model, x = nn.Sequential(AddedScores(), nn.Linear(8, 4)).eval(), torch.randn(2, 5, 8)
    sim = qsim.QuantSim(model, x, qsim.w8a8_dynamic())
    assert [key for key in sim.quantizers() if key.startswith("0.") and not key.startswith(("0.qkv", "0.out"))] == []
    assert {"0.qkv.weight", "0.out.weight"} <= set(sim.quantizers())
    sim = qsim.QuantSim(model, x, qsim.int8())
    assert [key for key in sim.quantizers() if "baddbmm" in key] == ["0.baddbmm.output"]
