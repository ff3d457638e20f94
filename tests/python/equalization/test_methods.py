"""The scales that methods choose, against formulas written out; what quantization gains."""

import copy

import pytest
import torch
from torch import nn
from transformer import Transformer, tokens

import qsim
from qsim.equalization import Awq, SmoothQuant


def outliers(model: Transformer) -> Transformer:
    """Channels 3 and 17 of what every norm returns are 100 times as large, and its readers' weights there as much smaller."""
    with torch.no_grad():
        for block in model.blocks:
            for norm, readers in ((block.ln1, [block.attn.q, block.attn.k, block.attn.v]), (block.ln2, [block.up])):
                for parameter in norm.parameters():
                    parameter[[3, 17]] *= 100
                for reader in readers:
                    reader.weight[:, [3, 17]] /= 100
    return model.eval()


def sqnr(model: nn.Module, of: nn.Module, x: torch.Tensor, config: qsim.Config) -> float:
    sim = qsim.QuantSim(model, x, config)
    sim.calibrate([x], progress=False)
    with torch.no_grad():
        exact = of(x)
        return float(10 * (exact.square().sum() / (sim(x) - exact).square().sum()).log10())


def test_cross_layer_makes_ranges_equal():
    """Nagel et al. 2019, equation 11: afterwards the ranges of both sides are the same in every channel."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.ReLU(), nn.Conv2d(8, 4, 1))
    with torch.no_grad():
        model[0].weight *= torch.logspace(-1.5, 1.5, 8).view(-1, 1, 1, 1)
    qsim.equalize(model, torch.randn(2, 3, 9, 9))
    first = model[0].weight.detach().abs().amax((1, 2, 3))
    middle = model[2].weight.detach().abs().amax((1, 2, 3))
    last = model[4].weight.detach().abs().amax((0, 2, 3))
    torch.testing.assert_close(first, middle, rtol=0.02, atol=0)
    torch.testing.assert_close(middle, last, rtol=0.02, atol=0)


def test_cross_layer_leaves_what_is_switched_off():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))
    with torch.no_grad():
        model[0].weight[1] = 0.0
        model[2].weight[:, 2] = 0.0
        model[0].weight[0] = 1e-20
    bias = model[0].bias.detach().clone()
    qsim.equalize(model, torch.randn(4, 3))
    assert torch.equal(model[0].bias[1:], bias[1:])
    torch.testing.assert_close(model[0].bias[0], bias[0] * 1e3)  # the largest factor


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.8])
def test_smooth_quant_formula(alpha):
    """Xiao et al. 2023, equation 4, with the readers of a norm as one weight."""
    model = outliers(Transformer(layers=1))
    before, x = copy.deepcopy(model), tokens(1, 12)
    report = qsim.equalize(model, tokens(0, 9), [x], methods=[SmoothQuant(alpha=alpha)])
    assert report.put_back == ""
    seen = []
    before.blocks[0].attn.q.register_forward_pre_hook(lambda m, args: seen.append(args[0].detach().abs().amax((0, 1))))
    before(tokens(0, 9)), before(x)
    largest = torch.stack(seen).amax(0)
    attention = before.blocks[0].attn
    weights = torch.stack([layer.weight.detach().abs().amax(0) for layer in (attention.q, attention.k, attention.v)]).amax(0)
    factors = largest**alpha / weights ** (1 - alpha)
    torch.testing.assert_close(model.blocks[0].ln1.weight, before.blocks[0].ln1.weight / factors, rtol=1e-4, atol=0)
    torch.testing.assert_close(model.blocks[0].attn.q.weight, attention.q.weight * factors, rtol=1e-4, atol=0)


@pytest.mark.parametrize("method", [SmoothQuant(), SmoothQuant(alpha=None)])
def test_smooth_quant_helps_where_there_are_outliers(method):
    model = outliers(Transformer())
    x, float_model = tokens(1, 32, 8), copy.deepcopy(model)
    config = qsim.int8()
    plain = sqnr(model, float_model, x, config)
    qsim.equalize(model, x[:2], [x], methods=[method])
    assert sqnr(model, float_model, x, config) > plain + 6


def test_awq_is_never_worse_on_what_it_searched():
    """An exponent of 0 is among those that are tried: the readers' error is at most that of no scales at all."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 16))
    with torch.no_grad():
        model[0].weight[[2, 9]] = 30.0
    x, spec = torch.randn(200, 32), Awq().weight
    before = copy.deepcopy(model)

    def error(network: nn.Sequential) -> float:
        quantizer = qsim.Quantizer(spec, network[1].weight.shape)
        quantizer.compute_encoding_from(network[1].weight)
        rounded = quantizer.quantize(network[1].weight) - network[1].weight
        return float((network[0](x) @ rounded.T).square().sum().detach())

    qsim.equalize(model, x[:4], [x], methods=["awq"])
    assert error(model) < 0.8 * error(before)


def test_searches_are_for_linear_layers():
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 1)).eval()
    x = torch.randn(2, 3, 5, 5)
    report = qsim.equalize(model, x, [x], methods=["awq"])
    assert report.refused["0"] == "'1' is a Conv2d: scales are searched for linear layers; give SmoothQuant an alpha"


def test_data_that_are_not_finite_are_refused():
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2))
    x = torch.randn(3, 4)
    report = qsim.equalize(model, x, [torch.full((3, 4), torch.nan)], methods=["smooth_quant"])
    assert report.refused["0"] == "'1' reads NaN or Inf on these data"
