"""Healthy models of many kinds: the doctor sees all of them, finds nothing, and leaves them as they were."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import qsim


@dataclass
class Output:
    logits: Tensor
    hidden: tuple[Tensor, ...]


class Encoder(nn.Module):
    """Token ids, a padding mask, a dataclass as output."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions, self.head = nn.Embedding(50, 32), nn.Embedding(20, 32), nn.Linear(32, 50)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Output:
        x = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1]))
        x = self.encoder(x, src_key_padding_mask=attention_mask == 0)
        return Output(self.head(x), (x,))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.SiLU(inplace=True))
        self.down, self.norm, self.up, self.last = (
            nn.Conv2d(8, 16, 3, 2, 1),
            nn.GroupNorm(4, 16),
            nn.ConvTranspose2d(16, 8, 2, 2),
            nn.Conv2d(16, 1, 1),
        )

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        skip = self.first(x)
        below = F.interpolate(F.gelu(self.norm(self.down(skip))), scale_factor=1.5, mode="bilinear")
        up = self.up(F.adaptive_avg_pool2d(below, (8, 8)))
        return {"mask": self.last(torch.cat([skip, up], 1)).sigmoid()}


class Rotary(nn.Module):
    """Tables that the first call makes and keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.tables = nn.Linear(32, 96), None

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        if self.tables is None:
            angles = torch.outer(torch.arange(length).float(), 100.0 ** (-torch.arange(4) / 4))
            self.tables = angles.cos(), angles.sin()
        cos, sin = self.tables
        query, key, value = self.project(x).view(batch, length, 3, 4, 8).permute(2, 0, 3, 1, 4)

        def rotated(t: Tensor) -> Tensor:
            left, right = t.chunk(2, -1)
            return torch.cat([left * cos - right * sin, left * sin + right * cos], -1)

        return F.scaled_dot_product_attention(rotated(query), rotated(key), value, is_causal=True).transpose(1, 2).flatten(2)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru, self.last = (
            nn.LSTM(8, 16, 2, batch_first=True, bidirectional=True),
            nn.GRU(32, 8, batch_first=True),
            nn.Linear(8, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.gru(self.lstm(x)[0])[0][:, -1])


class Spectrum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.fft.rfft(x)
        return (y.real.square() + y.imag.square()).clamp(min=1e-3).log()


class Mapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda row: self.layer(row).relu() * 1.7)(x)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False)


def weight_norm() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Dropout(0.5))


def padding() -> Tensor:
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[1, 6:] = 0
    return mask


MODELS = {
    "encoder": (Encoder, lambda: {"input_ids": torch.randint(0, 50, (2, 10)), "attention_mask": padding()}),
    "unet": (UNet, lambda: torch.randn(2, 3, 16, 16)),
    "rotary": (Rotary, lambda: torch.randn(2, 6, 32)),
    "recurrent": (Recurrent, lambda: torch.randn(2, 5, 8)),
    "spectrum": (Spectrum, lambda: torch.randn(2, 32)),
    "mapped": (Mapped, lambda: torch.randn(3, 4)),
    "checkpointed": (Checkpointed, lambda: torch.randn(3, 4)),
    "weight norm": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Dropout(0.5)),
        lambda: torch.randn(3, 8),
    ),
    "attention": (lambda: nn.Transformer(16, 2, 1, 1, 32, batch_first=True), lambda: (torch.randn(2, 5, 16), torch.randn(2, 3, 16))),
    "float64": (lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).double(), lambda: torch.randn(2, 4).double()),
    "bfloat16": (lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).bfloat16(), lambda: torch.randn(2, 4).bfloat16()),
    "empty": (lambda: nn.Linear(4, 4), lambda: torch.randn(0, 4)),
}


@pytest.mark.parametrize("target", ["float32", "coreml-fp16", "bf16"])
@pytest.mark.parametrize("kind", MODELS)
def test_is_silent(kind, target):
    make, batch_of = MODELS[kind]
    model = make().eval()
    attributes, state = dict(vars(model)), {name: t.clone() for name, t in model.state_dict().items()}
    found = qsim.doctor(model, [batch_of(), batch_of()], target=target, progress=False)
    assert found.healthy
    assert not found.notes
    assert target == "float32" or found.sqnr > 20
    assert vars(model).keys() == attributes.keys()
    assert all(value is attributes[name] for name, value in vars(model).items())
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())


def test_with_everything_kept_it_is_the_model():
    from qsim.clinic.examined_model import ExaminedModel
    from qsim.clinic.shadow import Shadow
    from qsim.clinic.targets import TARGETS

    for make, batch_of in (models for kind, models in MODELS.items() if kind != "spectrum"):  # complex results are no operations
        batch = batch_of()
        subject = ExaminedModel(make().eval(), batch)
        shadow = Shadow(subject, TARGETS["onnxruntime-fp16"], [batch])
        assert shadow.probe(frozenset(subject.sites)).sqnr > 140  # fused kernels and their parts differ in the last place


def test_a_compiled_model_is_examined_as_what_it_was_made_from():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid())
    nn.init.constant_(model[0].weight, 1000.0)
    found = qsim.doctor(torch.compile(model, backend="eager"), [torch.full((2, 4), 100.0)], target="tensorrt-fp16", progress=False)
    assert [(finding.code, finding.op) for finding in found.findings] == [("QS010", "_orig_mod.0")]


def test_what_cannot_be_seen_is_a_note():
    model = nn.Sequential(torch.jit.script(nn.Linear(4, 4)), nn.ReLU()).eval()
    found = qsim.doctor(model, [torch.randn(2, 4)], target="tensorrt-fp16", progress=False)
    assert any("scripted" in note for note in found.notes)
