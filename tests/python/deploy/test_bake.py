"""The baked model is plain, and computes what the simulation does with its quantizers of weights alone."""

import copy
import dataclasses
import itertools

import pytest
import torch
import torch.nn.functional as F
from language_model import TOKENS, LanguageModel
from models import Forward
from torch import nn

import qsim

X = torch.randn(4, 3, 9, 9, generator=torch.Generator().manual_seed(0))
FOUR = qsim.Config(qsim.TensorSpec(bits=4, axis=0), None)


def calibrated(model, example, config):
    sim = qsim.QuantSim(model.eval(), example, config)
    sim.calibrate([example], progress=False)
    return sim


def network():
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 6, 2, groups=2), nn.Flatten(), nn.Linear(384, 5)
    return nn.Sequential(*layers)


GROUPS = [
    qsim.TensorSpec(bits=bits, symmetric=symmetric, axis=1, block_size=group)
    for bits, symmetric, group in itertools.product((2, 3, 4, 8), (True, False), (32, 64, 128))
]


@pytest.mark.parametrize(
    "spec", GROUPS, ids=lambda spec: f"{spec.bits}-{'symmetric' if spec.symmetric else 'asymmetric'}-{spec.block_size}"
)
def test_groups_and_their_integers(spec):
    torch.manual_seed(0)
    sim = calibrated(nn.Sequential(nn.Linear(256, 48), nn.ReLU(), nn.Linear(48, 3)), torch.randn(5, 256), qsim.Config(spec, None))
    baked, x, state = sim.bake(), torch.randn(7, 256), sim.integer_state_dict()
    assert torch.equal(baked(x), sim(x))
    for name in ("0.weight", "2.weight"):
        q, scale, zero_point = (state[f"{name}{end}"] for end in ("", "_scale", "_zero_point"))
        assert int(q.max()) - int(q.min()) < 2**spec.bits
        assert torch.equal(qsim.ops.dequantize(q, scale, zero_point, axis=1, block_size=spec.block_size), baked.state_dict()[name])
    assert torch.equal(state["0.bias"], sim.model[0].bias)


@pytest.mark.parametrize("config", [FOUR, qsim.Config(qsim.TensorSpec(bits=8, symmetric=True), None), qsim.Config(qsim.fp8().weight, None)])
def test_convolutions_folded_and_transposed(config):
    sim = calibrated(network(), X, config)
    before = copy.deepcopy(sim.state_dict())
    baked = sim.bake()
    assert torch.equal(baked(X), sim(X))
    assert not any(module.__class__.__module__.startswith("qsim") or "_qsim" in "".join(vars(module)) for module in baked.modules())
    assert [type(m) for m in baked.modules()] == [getattr(type(m), "_original", type(m)) for m in sim.model.modules()]
    assert {t.data_ptr() for t in baked.state_dict().values()}.isdisjoint(t.data_ptr() for t in sim.model.state_dict().values())
    assert all(torch.equal(before[name], t) or t.isnan().any() for name, t in sim.state_dict().items())


def test_float8_as_it_is_stored():
    sim = calibrated(nn.Linear(16, 4), torch.randn(2, 16), qsim.Config(qsim.fp8().weight, None))
    state = sim.integer_state_dict()
    assert state["weight"].dtype is torch.float8_e4m3fn
    scale = state["weight_scale"].reshape(-1, 1)
    assert torch.equal(state["weight"].float() * scale, sim.bake().weight)
    assert "weight_zero_point" not in state


@pytest.mark.filterwarnings("ignore:QuantSim. 'attention")
@pytest.mark.parametrize("tied", [False, True])
def test_a_language_model_generates_the_same(tied):
    torch.manual_seed(0)
    sim = calibrated(LanguageModel(tied=tied), {"input_ids": TOKENS}, FOUR)
    baked = sim.bake().requires_grad_(False)  # torch chooses another kernel for a weight that requires a gradient
    assert torch.equal(baked.generate(TOKENS, 64), sim.generate(TOKENS, 64))
    assert (baked.lm_head.weight is baked.embed.weight) is tied


def test_recurrent_layers():
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(6, 5, batch_first=True)

        def forward(self, x):
            return self.lstm(x)[0]

    torch.manual_seed(0)
    sim = calibrated(Recurrent(), torch.randn(2, 4, 6), FOUR)
    x = torch.randn(3, 9, 6)
    baked = sim.bake()
    torch.testing.assert_close(baked(x), sim(x), rtol=1e-5, atol=1e-6)
    assert not torch.equal(baked.lstm.weight_hh_l0, sim.model.lstm.weight_hh_l0)


@pytest.mark.filterwarnings("ignore:QuantSim. what runs in float")
def test_solved_weights_are_in_it():
    sim = calibrated(network(), X, FOUR)
    plain = sim.bake()(X)
    sim.solve_weights([X], progress=False)
    assert torch.equal(sim.bake()(X), sim(X))
    assert not torch.equal(sim(X), plain)


def test_activations_are_not_in_it_and_that_is_said():
    sim = calibrated(network(), X, qsim.w4a8())
    with pytest.warns(UserWarning, match="quantizers of activations are not in the baked model"):
        baked = sim.bake()
    simulated = sim(X)
    sim.disable("input", "*.output")
    assert torch.equal(baked(X), sim(X))
    assert not torch.equal(baked(X), simulated)


def test_what_falls_back_or_is_off_stays_in_float():
    sim = calibrated(network(), X, FOUR)
    sim.disable("5.weight")
    baked = sim.bake()
    assert torch.equal(baked[5].weight, sim.model[5].weight)
    assert torch.equal(baked(X), sim(X))
    assert "5.weight_scale" not in sim.integer_state_dict()


def test_before_calibration():
    with pytest.raises(qsim.NoEncodingError, match="no encoding"):
        qsim.QuantSim(network().eval(), X, FOUR).bake()


class Computed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(8, 1))

    def forward(self, x):
        return F.linear(x, self.fc.weight * self.scale)


def test_computed_weights_are_refused_by_name():
    sim = calibrated(Computed(), torch.randn(2, 8), FOUR)
    with pytest.raises(ValueError, match=r"'linear.weight'.*sim\.disable\('linear.weight'"):
        sim.bake()
    sim.disable("linear.weight")
    assert torch.equal(sim.bake()(X[0, 0, :, :8]), sim(X[0, 0, :, :8]))


class TwiceRead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        return self.fc(x) + self.fc.weight.sum(1)


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(8, 8))

    def forward(self, x):
        return torch.relu(x @ self.table) @ self.table


def test_a_buffer_is_a_weight_too():
    torch.manual_seed(0)
    sim = calibrated(Table(), torch.randn(2, 8), FOUR)
    assert sim.integer_state_dict()["table"].dtype is torch.int8


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mid, self.head = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)

    def forward(self, x):
        return self.head(torch.tanh(self.mid(F.embedding(x.long().abs() % 8, self.head.weight).sum(1))))


@pytest.mark.parametrize("make", [TwiceRead, Tied])
@pytest.mark.parametrize("caller", ["bake", "integer_state_dict", "save_compressed"])
def test_a_weight_that_is_read_in_float_too_is_refused(make, caller, tmp_path):
    pytest.importorskip("safetensors")
    sim = calibrated(make(), torch.randn(2, 8), dataclasses.replace(FOUR, target=qsim.w4a16().target))
    with pytest.raises(RuntimeError, match=f"QuantSim.{caller}.* read at one place where it is quantized and at another where it is not"):
        getattr(sim, caller)(*([tmp_path / "new"] if caller == "save_compressed" else []))
    assert not any(tmp_path.iterdir())
    assert all(quantizer.enabled for quantizer in sim.quantizers().values())
    sim.disable("*.weight")
    sim.bake()


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("config", [FOUR, qsim.Config(qsim.fp8().weight, None)])
@pytest.mark.parametrize("caller", ["integer_state_dict", "save_compressed"])
def test_what_no_grid_has_is_not_stored(caller, config, value, tmp_path):
    pytest.importorskip("safetensors")
    sim = calibrated(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), torch.randn(2, 8), config)
    with torch.no_grad():
        sim.model[0].weight[3, 5] = value
    with pytest.raises(ValueError, match=rf"QuantSim\.{caller}: NaN or Inf in '0\.weight'"):
        getattr(sim, caller)(*([tmp_path / "new"] if caller == "save_compressed" else []))
    assert not any(tmp_path.iterdir())


@dataclasses.dataclass
class Result:
    logits: torch.Tensor


class Named(dict):
    pass


@pytest.mark.parametrize("wrap", [Result, lambda y: Named(y=y), lambda y: iter([y]), lambda y: {"all": [Result(y)]}])
def test_it_is_so_whatever_the_model_returns(wrap):
    sim = calibrated(Forward(lambda m, x: wrap(m.inner(x)), inner=TwiceRead()), torch.randn(2, 8), FOUR)
    with pytest.raises(RuntimeError, match="read at one place where it is quantized and at another where it is not"):
        sim.bake()


def test_half_precision_is_refused():
    with pytest.raises(ValueError, match=r"half precision; that is model\.half"):
        calibrated(network(), X, qsim.fp16()).bake()


class Remembering(nn.Module):
    def __init__(self, rebinds):
        super().__init__()
        self.fc, self.rebinds = nn.Linear(4, 4), rebinds
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        if self.rebinds:
            self.seen = self.seen * 0.5 + x.mean(0)
        else:
            self.seen.mul_(0.5).add_(x.mean(0))
        return self.fc(x) + self.seen


@pytest.mark.parametrize("rebinds", [False, True])
def test_what_the_model_remembers_stays(rebinds):
    """The comparison on the example inputs leaves no trace, in the simulation nor in the baked model."""
    x = torch.randn(3, 4)
    sim = calibrated(Remembering(rebinds), x, FOUR)
    sim.quantizers()["fc.weight"].observing = True
    before = {name: t.clone() for name, t in sim.state_dict().items()}
    baked = sim.bake()
    sim.integer_state_dict()
    assert all(torch.equal(t.nan_to_num(), before[name].nan_to_num()) for name, t in sim.state_dict().items())
    assert torch.equal(baked.seen, torch.zeros(4))


def test_in_training_mode():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3)).eval()
    x = torch.randn(5, 6)
    sim = calibrated(model, x, dataclasses.replace(qsim.int8(), batch_norm="keep", activation=None))
    expected = sim.bake()
    baked = sim.train().bake()
    assert all(module.training for module in (*sim.modules(), *baked.modules()))
    assert torch.equal(baked.eval()(x), expected(x))
