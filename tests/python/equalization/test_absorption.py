"""High biases absorbed into the next layer: exact on the data, told where it is not, refused where a constant would not arrive."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from models import Forward
from torch import nn

import qsim
from qsim.equalization import BiasAbsorption


def high(layer: nn.Module, by: float = 5.0) -> nn.Module:
    """Its channels with even numbers are never negative on normal data."""
    with torch.no_grad():
        layer.bias[::2] += by
    return layer


def images(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (16, 3, 6, 6)), generator=torch.Generator().manual_seed(1)).double()


def absorbed(model: nn.Module, x: torch.Tensor, **options: float) -> qsim.equalization.EqualizeReport:
    return qsim.equalize(model, x[:2], [x], methods=[BiasAbsorption(**options)])


def test_the_constant_is_the_least_value_or_three_deviations_below_the_mean():
    torch.manual_seed(0)
    model = nn.Sequential(high(nn.Linear(4, 6)), nn.ReLU(), nn.Linear(6, 3)).double().eval()
    x = images(300, 4)
    before = copy.deepcopy(model)
    for sigmas in (0.0, 3.0):
        changed = copy.deepcopy(before)
        report = absorbed(changed, x, sigmas=sigmas)
        y = before[0](torch.cat([x[:2], x])).detach()  # the example inputs are looked at too
        expected = torch.minimum(y.amin(0), y.mean(0) - sigmas * y.std(0, correction=0)).clamp_min(0)
        assert (expected[::2] > 0).all()
        torch.testing.assert_close(before[0].bias - changed[0].bias, expected, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(changed[2].bias, before[2].bias + before[2].weight @ expected, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(changed(x), before(x), rtol=1e-12, atol=1e-12)
        (change,) = report.changes
        assert (change.method, change.producer, change.readers, change.largest) == ("bias_absorption", "0", ("2",), 1.0)
        assert "channels of '0' were never below what was absorbed" in report.notes[0]
        assert report.notes[0] in str(report)


def test_other_data_below_the_constant_become_it():
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
        model[0].bias.fill_(5.0)
    x = torch.linspace(-1, 1, 9).double()[:, None]
    absorbed(model, x, sigmas=0.0)  # 4 is the least
    assert model(torch.tensor([[-3.0], [-1.0], [2.0]]).double()).flatten().tolist() == [5.0, 5.0, 8.0]


BETWEEN = {
    "relu": nn.ReLU(),
    "in place": nn.ReLU(inplace=True),
    "leaky": nn.LeakyReLU(0.1),
    "max pool": nn.MaxPool2d(3, 1, 1),
    "mean": nn.AvgPool2d(3, 1),
    "shuffle": nn.ChannelShuffle(2),
}
READERS = {
    "plain": lambda: nn.Conv2d(4, 4, 3),
    "no bias": lambda: nn.Conv2d(4, 4, 3, bias=False),
    "depthwise": lambda: nn.Conv2d(4, 4, 2, stride=2, groups=4),
    "grouped": lambda: nn.Conv2d(4, 6, 1, groups=2),
    "reflecting": lambda: nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
    "same": lambda: nn.Conv2d(4, 4, 1, padding="same"),
}


@given(st.lists(st.sampled_from(sorted(BETWEEN)), min_size=1, max_size=3), st.sampled_from(sorted(READERS)))
@settings(max_examples=30, deadline=None)
def test_any_chain_keeps_its_outputs_on_the_data(names, reader):
    torch.manual_seed(0)
    model = nn.Sequential(high(nn.Conv2d(3, 4, 3, padding=1), 9.0), *(copy.deepcopy(BETWEEN[name]) for name in names), READERS[reader]())
    model = model.double().eval()
    x = images(16, 3, 10, 10)
    before = copy.deepcopy(model)
    report = absorbed(model, x)
    assert [change.producer for change in report.changes] == ["0"], str(report)
    assert bool((before[0].bias[::2] > model[0].bias[::2]).all())
    torch.testing.assert_close(model(x), before(x), rtol=1e-10, atol=1e-10)


def test_flattened_channels_and_two_readers():
    torch.manual_seed(0)
    model = Forward(
        lambda m, x: (y := F.relu(m.a(x)), m.b(y.flatten(1)) + m.c(y).mean((2, 3)))[1],
        a=high(nn.Conv2d(3, 4, 3), 9.0),
        b=nn.Linear(64, 5),
        c=nn.Conv2d(4, 5, 1),
    ).double()
    x = images()
    before = copy.deepcopy(model)
    report = absorbed(model, x)
    assert [set(change.readers) for change in report.changes] == [{"b", "c"}]
    torch.testing.assert_close(model(x), before(x), rtol=1e-10, atol=1e-10)


REFUSED = {
    "pads with zeros": nn.Sequential(high(nn.Conv2d(3, 4, 3)), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1)),
    "is transposed": nn.Sequential(high(nn.Conv2d(3, 4, 3)), nn.ReLU(), nn.ConvTranspose2d(4, 4, 3)),
    "has no bias that could be absorbed": nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.ReLU(), nn.Conv2d(4, 4, 3)),
    "no channel of '0' is high enough": nn.Sequential(high(nn.Conv2d(3, 4, 3), -9), nn.ReLU(), nn.Conv2d(4, 4, 3)),
    "does not arrive at '2' as it is": nn.Sequential(high(nn.Conv2d(3, 4, 3)), nn.AvgPool2d(3, 1, 1), nn.Conv2d(4, 4, 1)),
    "as it is in training mode": nn.Sequential(high(nn.Conv2d(3, 4, 3)), nn.Dropout(), nn.Conv2d(4, 4, 1)),
    "'mul' behind 'a'": Forward(  # 1 in the examples, not everywhere
        lambda m, x: m.b(F.relu(m.a(x)) * (x.abs().amax() < 1e6).to(x)), a=high(nn.Conv2d(3, 4, 3)), b=nn.Conv2d(4, 4, 1)
    ),
    "gelu of a scaled value": nn.Sequential(high(nn.Conv2d(3, 4, 3)), nn.GELU(), nn.Conv2d(4, 4, 3)),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refused(reason):
    model = copy.deepcopy(REFUSED[reason]).double().eval()
    before = copy.deepcopy(model.state_dict())
    report = absorbed(model, images())
    assert not report.changes
    assert any(reason in why for why in report.refused.values()), str(report)
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())


def test_after_cross_layer_the_reason_is_a_note():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1)).double().eval()
    with torch.no_grad():
        model[1].bias += 4
    x = images()
    expected = model(x)
    report = qsim.equalize(model, x[:2], [x], methods=["cross_layer", "bias_absorption"])
    assert [change.method for change in report.changes] == ["cross_layer"]
    assert report.notes == ("no bias was absorbed: '3', which reads '0', pads with zeros, from which no constant is taken",)
    torch.testing.assert_close(model(x), expected, rtol=1e-9, atol=1e-9)


def test_a_grid_that_need_not_reach_down_is_finer():
    """What the reader gets is from 20 to 26: quantized from zero on, most of the grid says nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    with torch.no_grad():
        model[0].bias += 20
    x = images(512, 4).float()
    exact, config = model(x).detach(), qsim.Config(weight=None, activation=qsim.TensorSpec(bits=4))
    errors = []
    for methods in (["cross_layer"], ["cross_layer", "bias_absorption"]):
        changed = copy.deepcopy(model)
        assert not qsim.equalize(changed, x[:2], [x], methods=methods).put_back
        sim = qsim.QuantSim(changed, x[:2], config.override("0", activation=config.activation).override("2", off=True))
        sim.calibrate([x], progress=False)
        errors.append(float((sim(x).detach() - exact).square().mean()))
    assert errors[1] < errors[0] / 20


def test_without_data():
    with pytest.raises(ValueError, match="'bias_absorption' looks at what layers read: pass data"):
        qsim.equalize(nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2), methods=["bias_absorption"])
    with pytest.raises(ValueError, match=r"BiasAbsorption: got sigmas=-1; expected at least 0"):
        BiasAbsorption(sigmas=-1)
