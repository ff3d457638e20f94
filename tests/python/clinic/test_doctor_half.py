"""The doctor in half precision: the true first culprit of each faulty model, and silence about its healthy twin."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from models import Calls, trained
from torch import Tensor, nn

import qsim

LOWEST = torch.finfo(torch.float32).min


def examine(model, *batches, target="tensorrt-fp16", **options):
    return qsim.doctor(model if isinstance(model, nn.Module) else Calls(model), batches, target, progress=False, **options)


def codes(diagnosis):
    return [(finding.code, finding.op) for finding in diagnosis.findings]


def layer_norm(x):
    centred = x - x.mean(-1, keepdim=True)
    return centred * (centred.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()


def zero_row(rows=4, columns=16):
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    x[1] = 0
    return x


def gelu(x):
    return 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3)))


ones, wave = torch.ones(4, 16), torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
CULPRITS = {  # fault: model, data, code, operation, data or model of the healthy twin
    "squares": (layer_norm, wave * 400, "QS010", "pow", wave),
    "exponentials": (lambda x: x.exp() / (x.exp() + 1).sum(-1, keepdim=True), wave * 8, "QS010", "exp", wave),
    "scores": (lambda x: (x @ x.T).softmax(-1), wave * 200, "QS010", "matmul", wave * 20),
    "fused scores": (lambda x: F.scaled_dot_product_attention(x, x, x), wave * 400, "QS011", "scaled_dot_product_attention", wave * 20),
    "reciprocal": (lambda x: 1 / (x + 1e-6), wave.relu(), "QS010", "rdiv", wave.abs() + 1),
    "integral": (lambda x: x.cumsum(-1)[..., 8:] - x.cumsum(-1)[..., :-8], ones * 6000, "QS010", "cumsum", ones),
    "large data": (lambda x: x * 1e-3, wave * 1e6, "QS010", "mul", wave),
    "count": (lambda x: x.sum() / 147456, ones * 9, "QS012", "div", lambda x: x.sum() / 64),
    "norm": (lambda x: x / (x.norm(dim=-1, keepdim=True) + 1e-8), zero_row(), "QS013", "add", wave),
    "clamped norm": (lambda x: x / x.norm(dim=-1, keepdim=True).clamp(min=1e-12), zero_row(), "QS013", "clamp", wave),
    "normalize": (lambda x: F.normalize(x, dim=-1), zero_row(), "QS013", "normalize", wave),
    "logarithm": (lambda x: (x.relu() + 1e-10).log(), wave, "QS013", "add", lambda x: (x.relu() + 1e-4).log()),
    "deviation": (lambda x: x / (x.var(-1, keepdim=True) + 1e-12).sqrt(), zero_row(), "QS013", "add", wave),
    "vanishing": (lambda x: x.sigmoid().log(), wave * 15, "QS014", "sigmoid", wave),
    "cancellation": (
        lambda x: (x + 3000) - (x + 3000).mean(-1, keepdim=True),
        wave,
        "QS016",
        "sub",
        lambda x: x - x.mean(-1, keepdim=True),
    ),
    "time": (lambda t: (t * torch.linspace(1, 0.1, 16)).sin(), ones * 9000, "QS016", "sin", ones * 3),
}


@pytest.mark.parametrize("fault", CULPRITS)
def test_names_the_culprit_alone(fault):
    model, data, code, op, healthy = CULPRITS[fault]
    found = examine(model, data)
    assert (code, op) in codes(found)
    worst = found.findings[0]
    assert worst.severity == "error"
    assert "test_doctor_half.py" in worst.source
    assert all(finding.op == op or finding.op.startswith("exp") or finding.op.startswith("cumsum") for finding in found.findings)
    twin = examine(model, healthy) if isinstance(healthy, Tensor) else examine(healthy, data)
    assert not twin.findings


@pytest.mark.parametrize("fault", CULPRITS)
def test_keeping_the_chain_cures(fault):
    from qsim.clinic.examined_model import ExaminedModel
    from qsim.clinic.shadow import Shadow
    from qsim.clinic.targets import TARGETS

    model, data, *_ = CULPRITS[fault]
    keep = {name for f in examine(model, data).findings for name in (f.op, *f.evidence.get("chain", ()))}
    shadow = Shadow(ExaminedModel(Calls(model), data), TARGETS["tensorrt-fp16"], [data])
    assert not shadow.probe().ok
    assert shadow.probe(frozenset(keep)).ok


class Attention(nn.Module):
    """As in BERT, with one of the ways to mask what is padding."""

    def __init__(self, mask) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(32, 32) for _ in range(3))
        self.mask = mask

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(-1, -2) / 32**0.5
        return self.mask(scores, attention_mask[:, None, :]).softmax(-1) @ self.value(x)


MASKS = {
    "extended": (lambda scores, mask: scores + (1.0 - mask) * LOWEST, "mul"),
    "filled": (lambda scores, mask: scores.masked_fill(mask == 0, LOWEST), "masked_fill"),
    "chosen": (lambda scores, mask: torch.where(mask == 0, LOWEST, scores), "where"),
    "made beforehand": (lambda scores, mask: scores + torch.zeros_like(mask).masked_fill(mask == 0, LOWEST), "add"),
}
HEALTHY_MASKS = {
    "-1e4": lambda scores, mask: scores + (1.0 - mask) * -1e4,
    "-inf": lambda scores, mask: scores.masked_fill(mask == 0, -torch.inf),
    "float16": lambda scores, mask: scores.masked_fill(mask == 0, torch.finfo(torch.float16).min) - 20,
}


def padded(whole=False):
    mask = torch.ones(2, 8)
    mask[1, 0 if whole else 5 :] = 0
    return torch.randn(2, 8, 32), mask


@pytest.mark.parametrize("target", ["coreml-fp16", "tensorrt-fp16"])
@pytest.mark.parametrize("way", MASKS)
def test_names_the_mask(way, target):
    mask, op = MASKS[way]
    model = nn.ModuleDict({"layer": Attention(mask)})["layer"]
    found = examine(model, padded(), target=target)
    assert codes(found) == [("QS012", op)]
    assert found.findings[0].evidence["constant"] == LOWEST
    assert found.findings[0].severity == ("error" if way == "extended" else "warning")  # 0 * -Inf, and an -Inf that softmax takes
    if way != "extended":
        assert examine(model, padded(whole=True), target=target).findings[0].severity == "error"


@pytest.mark.parametrize("way", HEALTHY_MASKS)
def test_is_silent_about_masks_that_fit(way):
    assert not examine(Attention(HEALTHY_MASKS[way]), padded(), target="coreml-fp16").findings


def test_a_decomposed_layer_norm_in_a_network_is_found_though_nothing_is_nan():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.linear(layer_norm(x)).relu()

    model = nn.Sequential(Block(), Block(), Block())
    found = examine(model, torch.randn(2, 16, 64) * 400)
    assert codes(found) == [(("QS010"), f"{i}.pow") for i in range(3)]
    assert found.findings[0].evidence["chain"][0] == "0.mean_2"
    assert not examine(model, torch.randn(2, 16, 64)).findings


def test_nafnet_names_the_running_sums_and_their_chain():
    sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
    from nafnet_denoise import NAFNet

    model = NAFNet(4)
    for block in (model.encoder, model.middle, model.decoder):
        block.beta.data.fill_(1e-3)
        block.norm1.weight.data.fill_(20.0)  # the pool adds up products of two channels
    x = torch.rand(1, 3, 160, 192)
    found = examine(model, x)
    pools = {f.op.rpartition(".")[0] for f in found.findings}
    assert pools == {"encoder.pool", "middle.pool", "decoder.pool"}
    assert {f.code for f in found.findings} == {"QS010"}
    assert all("cumsum" in f.op for f in found.findings)
    assert all("cumsum(-1).cumsum(-2)" in f.source for f in found.findings)
    assert all({link.rpartition(".")[2].rpartition("_")[0] or link for link in f.evidence["chain"]} for f in found.findings)
    assert not examine(NAFNet(4), x).findings


def test_sums_of_narrow_accumulators_are_reported_for_these_alone():
    mean, image = Calls(lambda x: F.adaptive_avg_pool2d(x, 1)), torch.rand(1, 2, 256, 320) * 2 - 0.5
    assert not examine(mean, image, target="tensorrt-fp16").findings
    (finding,) = examine(mean, image * 4, target="coreml-fp16").findings
    assert (finding.code, finding.severity, finding.evidence["accumulator"]) == ("QS011", "error", "float16")
    (finding,) = examine(mean, image, target="coreml-fp16").findings
    assert (finding.code, finding.op) == ("QS017", "adaptive_avg_pool2d")
    assert not examine(mean, image[..., :40, :40], target="coreml-fp16").findings


def test_a_fused_norm_overflows_inside_where_accumulators_are_narrow():
    norm, x = nn.Sequential(nn.LayerNorm(64)), torch.randn(4, 64) * 400
    assert not examine(norm, x, target="tensorrt-fp16").findings
    assert codes(examine(norm, x, target="coreml-fp16")) == [("QS011", "0")]
    assert not examine(norm, x / 100, target="coreml-fp16").findings


def test_a_sum_that_is_large_on_the_way():
    weight = torch.ones(1, 64)
    weight[:, 32:] = -1
    (finding,) = examine(lambda x: F.linear(x, weight), torch.ones(2, 64) * 4000, target="coreml-fp16").findings
    assert (finding.code, finding.severity) == ("QS011", "warning")
    assert finding.evidence["largest sum"] == 128000


def test_tiny_weights():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    x = torch.randn(16, 64)
    assert not examine(model, x).findings
    model[0].weight.data[:16] *= 1e-6  # beside large ones they do no harm
    assert not examine(model, x).findings
    model[0].weight.data[16:] *= 1e-6
    found = [f for f in examine(model, x).findings if f.code == "QS015"]
    assert [(f.op, f.evidence["weight"]) for f in found] == [("0", "0.weight")]
    assert found[0].evidence["subnormal"] + found[0].evidence["zero"] == 64 * 64


def test_near_the_limit_is_a_warning():
    (finding,) = examine(layer_norm, torch.linspace(-300, 300, 64).reshape(2, 32)).findings
    assert (finding.code, finding.severity, finding.op) == ("QS018", "warning", "pow")


def test_an_overflow_that_the_output_does_not_show_is_a_warning():
    (finding,) = examine(gelu, wave * 60).findings
    assert (finding.code, finding.severity, finding.op) == ("QS010", "warning", "pow")
    assert not examine(gelu, wave * 5).findings


def test_bfloat16_has_range_and_lacks_bits():
    assert not examine(layer_norm, wave * 400, target="bf16").findings
    assert codes(examine(lambda x: (x + 100) - 100, wave, target="bf16")) == [("QS016", "sub")]


def test_a_mask_that_is_assigned():
    class Assigned(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            scores = x * 2
            scores[mask] = LOWEST
            return scores.softmax(-1)

    mask = torch.zeros(2, 4, dtype=torch.bool)
    mask[1] = True
    (finding,) = examine(Assigned(), (torch.randn(2, 4), mask)).findings
    assert (finding.code, finding.severity, finding.op) == ("QS012", "error", "__setitem__")


def test_an_overflow_is_no_excuse_for_what_follows():
    """The next layers read NaN by way of a ReLU, which rounds nothing."""

    class Block(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.wide, self.narrow = nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)
            self.narrow.weight.data *= scale

        def forward(self, x: Tensor) -> Tensor:
            return x + self.narrow(self.wide(F.layer_norm(x, (32,))).relu())

    found = examine(nn.Sequential(Block(1.0), Block(3e5), Block(1.0), nn.LayerNorm(32)), torch.randn(2, 4, 32))
    assert codes(found) == [("QS010", "1.narrow")]
    assert found.findings[0].evidence["chain"][0] == "1.add"


def test_nan_that_comes_by_way_of_what_is_not_recorded():
    """Nothing tells where an array came from: what reads it seems to read a constant."""
    model = nn.Sequential(Calls(lambda x: torch.from_numpy((x * x / (x * x).mean()).numpy())), nn.Linear(16, 4), nn.Linear(4, 4))
    assert {op for _, op in codes(examine(model, wave * 400))} == {"0.mul", "0.mul_2"}


def test_the_data_is_left_alone():
    x = wave.clone()
    found = examine(lambda x: x.mul_(500).pow_(2).mean(-1).sqrt_(), x)
    assert codes(found) == [("QS010", "pow")]
    assert torch.equal(x, wave)


def test_a_weight_that_folding_makes_too_large():
    model = trained(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, eps=1e-12)))
    assert not examine(model, torch.randn(1, 3, 8, 8)).findings
    model[1].running_var.fill_(1e-12)
    model[1].weight.data.fill_(1.0)
    found = [f for f in examine(model, torch.randn(1, 3, 8, 8)).findings if f.code == "QS012"]
    assert [(f.severity, f.op, f.evidence["parameter"]) for f in found] == [("error", "0", "0.weight")]


def test_what_is_computed_from_constants_alone_is_folded():
    class Positions(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            angles = torch.arange(x.shape[1])[:, None] * torch.linspace(1.0, 0.01, x.shape[2])
            return x + angles.sin()

    class Times(nn.Module):
        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            return x + (t[:, None] * torch.linspace(1.0, 0.01, x.shape[2])).sin()

    x = torch.randn(1, 5000, 16)
    assert not examine(Positions(), x).findings
    assert codes(examine(Times(), (x, torch.arange(5000.0)))) == [("QS016", "sin")]


def test_one_row_of_many_that_overflows():
    x = torch.randn(512, 64)
    x[100] *= 400
    found = examine(layer_norm, x)
    assert codes(found) == [("QS010", "pow")]


def test_a_late_batch_that_overflows_is_examined():
    batches = [wave for _ in range(20)] + [wave * 400] + [wave] * 3
    found = qsim.doctor(Calls(layer_norm), iter(batches), "tensorrt-fp16", progress=False)
    assert codes(found) == [("QS010", "pow")]
    assert found.findings[0].severity == "error"
    assert found.batches == 24


def test_budget():
    blocks = nn.Sequential(*[Calls(lambda x: layer_norm(x) * 400) for _ in range(3)])
    found = examine(blocks, wave * 400, probes=1)
    assert found.probes == 1
    assert any("budget" in note for note in found.notes)
    assert found.findings


@pytest.mark.parametrize("target", ["tensorrt-fp16", "coreml-fp16", "onnxruntime-fp16", "bf16", "tensorrt-int8", "openvino-int8"])
def test_healthy_networks(target):
    convolutional = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    )
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2, enable_nested_tensor=False)
    assert examine(convolutional.eval(), torch.randn(2, 3, 24, 24), target=target).healthy
    assert examine(encoder.eval(), torch.randn(2, 10, 32), target=target).healthy
    assert examine(nn.LSTM(8, 16, batch_first=True).eval(), torch.randn(2, 5, 8), target=target).healthy
