"""BatchNorm, integer grids and calibration data: each check with a model or data that has the fault, and a twin that has not."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from models import Calls, Forward
from torch import Tensor, nn

import qsim
from qsim.clinic.targets import TARGETS

INT8 = "onnxruntime-int8"


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def examine(model, *batches, target=INT8, **options):
    return qsim.doctor(model, batches, target, progress=False, **options)


def found(diagnosis, *, least="warning"):
    severities = ("error", "warning", "info")[: {"warning": 2, "info": 3}[least]]
    return [(f.code, f.op or f.module) for f in diagnosis.findings if f.severity in severities]


def finding(diagnosis, code):
    (one,) = [f for f in diagnosis.findings if f.code == code]
    assert one.evidence
    assert one.fix.endswith(".")
    return one


def trained(model: nn.Module, x: Tensor) -> nn.Module:
    """The model with the statistics of the data in its BatchNorms, in eval mode."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    with torch.no_grad():
        for _ in range(4):
            model.train()(x)
    return model.eval()


X = noise(32, 3, 8, 8)


def convolutional(x: Tensor = X) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
    return trained(nn.Sequential(*layers), x)


@pytest.mark.parametrize("target", TARGETS)
def test_a_trained_network_is_healthy(target):
    assert not examine(convolutional(), X, target=target).findings


@pytest.mark.parametrize("target", ["float32", "tensorrt-fp16", INT8])
def test_batch_norm_in_training_mode(target):
    model = convolutional()
    model[1].train()
    assert found(examine(model, X, target=target)) == [("QS020", "1")]


@pytest.mark.parametrize("target", ["float32", "tensorrt-fp16", INT8])
def test_statistics_that_were_never_updated(target):
    model = convolutional(8 * X)
    model[1].reset_running_stats()
    diagnosis = examine(model, 8 * X, target=target)
    assert found(diagnosis) == [("QS021", "1")]
    seen = finding(diagnosis, "QS021").evidence
    into = model[0](8 * X)
    assert seen["variance of the data"] == pytest.approx(into.var((0, 2, 3), correction=0).median().item(), rel=1e-5)
    assert seen["mean of the data"] == pytest.approx(into.mean((0, 2, 3)).abs().median().item(), rel=1e-4)


def test_statistics_that_were_never_updated_and_fit_are_no_fault():
    model = nn.Sequential(nn.Identity(), nn.BatchNorm2d(3)).eval()
    assert found(examine(model, X), least="info") == [("QS021", "1"), ("QS024", "1")]
    with torch.no_grad():
        model[1].weight[0] = 1.5  # trained: the statistics are lost
    assert found(examine(model, X)) == [("QS021", "1")]


def test_a_variance_below_epsilon():
    model = convolutional()
    with torch.no_grad():
        model[4].running_var[2] = 1e-9
    diagnosis = examine(model, X)
    assert ("QS022", "4") in found(diagnosis)
    seen = finding(diagnosis, "QS022").evidence
    assert (seen["channels"], seen["of"]) == (1, 8)
    assert seen["largest gain"] == pytest.approx((1e-9 + 1e-5) ** -0.5, rel=1e-6)
    with torch.no_grad():
        model[4].weight[2] = 0  # switched off
    assert not found(examine(model, X))


def test_gains_that_differ_between_channels():
    model = convolutional()
    with torch.no_grad():
        model[1].weight[5] = 100.0
    diagnosis = examine(model, X)
    assert finding(diagnosis, "QS023").severity == "info"  # taken in by scales per channel
    assert finding(diagnosis, "QS023").evidence["layer"] == "0"
    one_scale = dataclasses.replace(TARGETS[INT8], per_channel=False)
    assert found(examine(model, X, target=one_scale)) == [("QS023", "1"), ("QS030", "0"), ("QS036", "3")]


def test_gains_along_input_channels():
    model = trained(nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 8, 3)), X)
    assert not examine(model, X).findings
    with torch.no_grad():
        model[0].weight[1] = 100.0
    assert ("QS023", "0") in found(examine(model, X))


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return self.norm(y) + y


def test_batch_norms_that_cannot_be_folded():
    model = trained(Shared(), X)
    one = finding(examine(model, X), "QS024")
    assert (one.severity, one.module) == ("info", "norm")
    assert "conv" in one.evidence["reason"]
    assert not examine(model, X, target="tensorrt-fp16").findings
    broken = convolutional()
    broken[1].running_var[3] = -1.0
    one = finding(examine(broken, X), "QS024")
    assert (one.severity, one.module) == ("warning", "1")


def test_one_channel_takes_the_range_of_the_weight():
    model = convolutional()
    with torch.no_grad():
        model[3].weight[1] *= 64
    one = finding(examine(model, X), "QS030")
    folded = qsim.fold_batch_norms(model, X)
    assert folded.folded
    largest = model[3].weight.abs().amax((1, 2, 3))
    assert one.op == "3"
    assert one.evidence["bits lost in the median channel"] == pytest.approx((largest.max() / largest.median()).log2().item(), rel=1e-5)


def test_transposed_convolutions_and_channels_of_zeros():
    torch.manual_seed(0)
    model = nn.Sequential(nn.ConvTranspose2d(3, 8, 3))
    with torch.no_grad():
        model[0].weight[:, :6] = 0
    assert not examine(model, X).findings
    with torch.no_grad():
        model[0].weight[:, 6] *= 0.01
        model[0].weight[:, 5] = 0.001
    assert finding(examine(model, X), "QS030").op == "0"


def test_a_bias_beyond_int32():
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    x = noise(32, 8)
    assert not examine(model, x).findings
    with torch.no_grad():
        model.weight[2] = 1e-10
        model.bias.fill_(1.0)
    diagnosis = examine(model, x)
    assert found(diagnosis)[0][0] == "QS031"
    seen = finding(diagnosis, "QS031").evidence
    scale = (x.max() - x.min()).double().item() / 255 * 1e-10 / 127
    assert seen["channels"] == 1
    assert seen["largest"] == pytest.approx(1 / scale, rel=1e-4)
    assert seen["largest"] > seen["limit"] == 2**31 - 1
    assert finding(examine(model, x, target="openvino-int8"), "QS031").severity == "info"  # its biases are in float32


def test_it_is_the_bias_that_the_simulation_raises_scales_for():
    torch.manual_seed(0)
    model, x = nn.Linear(8, 4), noise(32, 8)
    with torch.no_grad():
        model.weight[2] = 1e-10
    problems = qsim.QuantSim(model, x, qsim.int8()).calibrate([x], progress=False).problems
    assert bool(problems) == ("QS031" in [f.code for f in examine(model, x).findings])


def test_concatenations():
    def head(boxes: float):
        return Calls(lambda x: torch.cat([x.sigmoid(), x.tanh() * boxes], 1))

    diagnosis = examine(head(640.0), X)
    assert found(diagnosis) == [("QS032", "cat")]
    seen = finding(diagnosis, "QS032").evidence
    assert seen["input"] == 0
    assert seen["width of all"] == pytest.approx(2 * 640, rel=0.01)
    assert not examine(head(2.0), X).findings


def test_a_class_token_is_worth_knowing():
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Parameter(0.01 * noise(1, 1, 8))

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.token.expand(len(x), -1, -1), x.tanh()], 1)

    diagnosis = examine(Tokens(), noise(32, 4, 8))
    assert found(diagnosis, least="info") == [("QS032", "cat")]
    assert diagnosis.healthy


def test_evaluation_data_of_another_scale():
    model, images = nn.Conv2d(3, 4, 3), noise(32, 3, 8, 8).sigmoid()
    assert not examine(model, images, evaluation=[images.flip(0)]).findings
    diagnosis = examine(model, images, evaluation=[images * 255])
    assert found(diagnosis) == [("QS033", "")]
    assert finding(diagnosis, "QS033").evidence["ratio"] == pytest.approx(255, rel=1e-4)


def test_halves_of_the_data():
    model, images = nn.Conv2d(3, 4, 3), noise(32, 3, 8, 8).sigmoid()
    assert not examine(model, images, images.flip(0)).findings
    assert "QS033" in [f.code for f in examine(model, images * 255, images).findings]


def test_few_samples_are_worth_knowing():
    few = examine(nn.Linear(4, 2), noise(8, 4), noise(8, 4, seed=1))
    assert found(few, least="info") == [("QS034", "")]
    assert finding(few, "QS034").evidence["samples"] == 16
    assert few.healthy


def test_a_range_that_still_grows():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    calm = [noise(32, 4, seed=i) for i in range(4)]
    assert not examine(model, *calm).findings
    one = finding(examine(model, *calm, 3 * calm[0]), "QS035")
    assert one.op == "0"
    assert one.evidence["width"] / one.evidence["width before"] == pytest.approx(one.evidence["factor"])


def test_ranges_leave_the_data_and_the_model_as_they_are():
    model, x = convolutional(), X.clone()
    state = {name: t.clone() for name, t in model.state_dict().items()}
    examine(model, x, evaluation=[x])
    assert torch.equal(x, X)
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())


CHANNELS = torch.ones(16).index_fill(0, torch.tensor([2]), 40.0)


class Attending(nn.Module):
    """Keys with a channel of outliers."""

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x * CHANNELS, x)


def first_token(x: Tensor) -> Tensor:
    return torch.cat([x[:, :1] * 50, x[:, 1:]], 1)


PRODUCTS = {
    "linear": (lambda: nn.Linear(16, 4), "input"),
    "addmm": (lambda: Forward(lambda m, x: torch.addmm(m.a.bias, x.flatten(0, -2), m.a.weight.T), a=nn.Linear(16, 4)), "input"),
    "matmul with a constant": (lambda: Forward(lambda m, x: x @ m.a.weight.T, a=nn.Linear(16, 4)), "first operand"),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_outlier_channels_and_tokens(name):
    make, operand = PRODUCTS[name]
    x = noise(4, 64, 16)
    assert not {"QS036", "QS037"} & {f.code for f in examine(make(), x).findings}
    channels = finding(examine(make(), x * CHANNELS), "QS036")
    assert (channels.evidence["channels"], channels.evidence["of"], channels.evidence["operand"]) == ("2", 16, operand)
    assert 4.5 < channels.evidence["bits lost in the median channel"] < 6
    tokens = finding(examine(make(), first_token(x)), "QS037")
    assert tokens.evidence["largest"] == pytest.approx(first_token(x).abs().max().item())
    assert "QS036" not in {f.code for f in examine(make(), first_token(x)).findings}


def test_outlier_channels_of_a_convolution():
    model = nn.Conv2d(16, 4, 1)
    one = finding(examine(model, noise(32, 16, 8, 8) * CHANNELS[:, None, None]), "QS036")
    assert one.evidence["channels"] == "2"
    assert "smooth_quant" in one.fix


def test_outlier_channels_of_keys():
    one = finding(examine(Attending(), noise(2, 2, 32, 16)), "QS036")
    assert one.evidence["operand"] == "key"
    assert "kv_cache" in one.fix


def test_outliers_of_a_stream_are_one_finding():
    """What three layers read is named with the worst of them."""
    model = Forward(lambda m, x: m.q(x) + m.k(x) + m.v(2 * x), **{name: nn.Linear(16, 16) for name in "qkv"})
    one = finding(examine(model, noise(4, 64, 16) * CHANNELS), "QS036")
    assert (one.evidence["operations"], one.evidence["named"]) == (3, "q, k, v")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_outliers_are_those_of_finite_values(value):
    x = noise(4, 64, 16)
    x[0, 0, 0] = value
    assert not {"QS036", "QS037"} & {f.code for f in examine(nn.Linear(16, 4), x).findings}


def test_the_advised_cure_of_outlier_channels_cures():
    torch.manual_seed(0)
    norm = nn.LayerNorm(16)
    norm.weight.data[2] = 40.0
    model = nn.Sequential(nn.Linear(16, 16), norm, nn.Linear(16, 16)).eval()
    x = noise(64, 8, 16)
    assert finding(examine(model, x), "QS036").op == "2"
    qsim.equalize(model, x, [x], methods=["smooth_quant"])
    assert "QS036" not in {f.code for f in examine(model, x).findings}


def test_tokens_are_counted_as_samples():
    one = finding(examine(nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 2)), torch.randint(0, 10, (5, 7))), "QS034")
    assert one.evidence["samples"] == 5
