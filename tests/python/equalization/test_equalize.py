"""The face: what is computed stays, what is wrong is said, and what does not agree is put back."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from models import Forward, data, trained
from torch import nn
from transformer import Transformer, tokens

import qsim
from qsim.equalization import Awq, BiasAbsorption, CrossLayer, Rotation, SmoothQuant

LAYERS = {
    "norm": lambda: nn.BatchNorm2d(4),
    "conv": lambda: nn.Conv2d(4, 4, 3, padding=1),
    "depthwise": lambda: nn.Conv2d(4, 4, 3, groups=4, padding=1, bias=False),
    "grouped": lambda: nn.Conv2d(4, 4, 1, groups=2),
    "transposed": lambda: nn.ConvTranspose2d(4, 4, 3, padding=1, groups=2),
    "reflecting": lambda: nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
    "relu": lambda: nn.ReLU(inplace=True),
    "prelu": lambda: nn.PReLU(4, init=-0.3),
    "leaky": lambda: nn.LeakyReLU(0.1),
    "gelu": lambda: nn.GELU(),
    "relu6": lambda: nn.ReLU6(),
    "dropout": lambda: nn.Dropout2d(),
    "max": lambda: nn.MaxPool2d(3, 1, 1),
    "mean": lambda: nn.AvgPool2d(3, 1, 1),
    "shuffle": lambda: nn.ChannelShuffle(2),
}


@given(st.lists(st.sampled_from(sorted(LAYERS)), min_size=2, max_size=8), st.sampled_from(["cross_layer", "smooth_quant"]))
@settings(max_examples=40)
def test_any_chain_keeps_its_outputs(names, method):
    model = trained(nn.Sequential(*(LAYERS[name]() for name in names)), torch.float64)
    x, other = data(2, dtype=torch.float64), data(2, dtype=torch.float64)
    expected = model(other)
    report = qsim.equalize(model, x, [x], methods=[method])
    assert report.put_back == ""
    torch.testing.assert_close(model(other), expected, rtol=1e-9, atol=1e-12 * float(expected.detach().abs().max()))


@pytest.mark.parametrize(
    "methods", [["cross_layer"], ["smooth_quant"], [SmoothQuant(alpha=None)], ["awq"], ["rotation"], ["awq", "rotation"]]
)
@pytest.mark.parametrize("options", [{}, {"rms": True}, {"rms": True, "kv": 1, "gated": True}, {"fused": True, "bias": False}])
def test_a_transformer_keeps_its_outputs(options, methods):
    model = Transformer(**options).eval()
    other = tokens(3, 17)
    expected = copy.deepcopy(model).double()(other).detach()
    report = qsim.equalize(model, tokens(1, 9), [tokens(2, 12)], methods=methods)
    assert report.changes
    assert report.put_back == ""
    assert float((model(other).detach() - expected).abs().max() / expected.abs().max()) < 1e-5


def test_training_flags_and_parameters_stay():
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Dropout(), nn.Conv2d(8, 4, 1)).train()
    model[2].eval()
    weights = list(model.parameters())
    qsim.equalize(model, data(2))
    assert [m.training for m in model.modules()] == [True, True, True, False, True]
    assert all(a is b for a, b in zip(weights, model.parameters(), strict=True))


class Drifting(nn.Module):
    """Not what it was when it is run again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.second(F.relu(self.first(x))) * (1 + 0.01 * self.first.weight.abs().max())


def test_a_weight_that_is_read_elsewhere_is_refused():
    model = Drifting()
    before = copy.deepcopy(model.state_dict())
    report = qsim.equalize(model, torch.randn(3, 4))
    assert "the weight of 'first' is also read by 'abs'" in report.refused["first"]
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())


class Secret(nn.Module):
    """Its output depends on a weight in a way that no recording sees."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.first.weight.data[1] *= 100

    def forward(self, x):
        peeked = sum(self.first.weight.tolist()[1])
        return self.second(F.relu(self.first(x))) + peeked


def test_what_does_not_agree_is_put_back():
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Flatten(), nn.LazyLinear(4), Secret()).eval()
    x = data(2)
    model(x)
    before, expected = copy.deepcopy(model.state_dict()), model(x)
    report = qsim.equalize(model, x)
    assert report.error > 1e-3
    assert "outputs differed by" in report.put_back
    assert "everything was put back" in str(report)
    assert isinstance(model[1], nn.BatchNorm2d)
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    assert torch.equal(model(x), expected)


def test_where_nothing_can_be_compared_all_is_put_back():
    model = Forward(lambda m, x: m.b(F.relu(m.a(x))) * torch.nan, a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    before = copy.deepcopy(model.state_dict())
    report = qsim.equalize(model, torch.randn(3, 4))
    assert report.put_back == "the model returns no finite number that could be compared"
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())


def test_errors():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    x = torch.randn(3, 4)
    with pytest.raises(ValueError, match="'smooth'; expected 'cross_layer', 'bias_absorption', 'smooth_quant', 'awq', 'rotation'"):
        qsim.equalize(model, x, methods=["smooth"])
    with pytest.raises(ValueError, match="'smooth_quant' looks at what layers read: pass data"):
        qsim.equalize(model, x, methods=["smooth_quant"])
    with pytest.raises(ValueError, match=r"alpha=2; expected 0 to 1"):
        SmoothQuant(alpha=2)
    with pytest.raises(TypeError, match=r"got methods='awq'; expected a list"):
        qsim.equalize(model, x, [x], methods="awq")
    with pytest.raises(ValueError, match=r"'0.weight' is torch.float16, which scaling would round; equalize the model in float32"):
        qsim.equalize(copy.deepcopy(model).half(), x)
    with pytest.raises(ValueError, match="got a simulation; equalize the float model"):
        qsim.equalize(qsim.QuantSim(model, x), x)
    with pytest.raises(ValueError, match=r"'0.weight' has no shape yet: run the model once"):
        qsim.equalize(nn.Sequential(nn.LazyLinear(3)), x)
    with pytest.raises(ValueError, match="got no batch"):
        qsim.equalize(model, x, [], methods=["awq"])
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        qsim.equalize(model, torch.randn(3, 5))


def test_report_reads_well():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2))
    with torch.no_grad():
        model[0].weight[3].mul_(100)
    report = qsim.equalize(model, torch.randn(5, 4))
    (change,) = report.changes
    assert (change.method, change.producer, change.readers) == ("cross_layer", "0", ("2",))
    assert change.before > 50
    assert change.after < change.before / 5
    text = str(report)
    assert "Equalization: 1 done, 2 refused, outputs differ by" in text
    assert "refused '2': what it returns is read by '3': gelu of a scaled value is not the scaled gelu of it" in text
    assert "refused '4': what it returns is returned by the model" in text


def test_nothing_to_do():
    report = qsim.equalize(Forward(lambda m, x: x.sin()), torch.randn(3))
    assert (report.changes, report.refused, report.error) == ((), {}, 0.0)


@pytest.mark.parametrize("method", [CrossLayer(), BiasAbsorption(), SmoothQuant(), Awq(), Rotation()])
def test_a_layer_without_data_in_eval_mode(method):
    """Called in training alone: nothing is known of it."""
    model = Forward(lambda m, x: m.b(F.relu(m.a(x))) if m.training else x, a=nn.Linear(4, 4), b=nn.Linear(4, 4)).eval()
    report = qsim.equalize(model, torch.randn(3, 4), [torch.randn(3, 4)], methods=[method])
    assert not report.changes
    assert "'a' is not called in eval mode" in report.refused["a"]
