"""What models of the wild do, in the smallest form that showed it: each is wrapped, calibrated and trained at 4 bits."""

from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from models import Forward
from torch import Tensor, nn

import qsim

ROWS = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def simulated(model: nn.Module, inputs, config: qsim.Config | None = None) -> qsim.QuantSim:
    """At 4 bits, calibrated on its example inputs; checked to be the float model with simulation off."""
    sim = qsim.QuantSim(model.eval(), inputs, config or qsim.int4())
    args = inputs if isinstance(inputs, tuple) else (inputs,)
    sim.calibrate([args], lambda m, batch: m(*batch), progress=False)
    with sim.in_float(), torch.no_grad():
        torch.testing.assert_close(sim(*args), model(*args), rtol=0, atol=0)
    return sim


def levels(x: Tensor) -> int:
    return len(x.unique())


class Fed(nn.Module):
    """Keeps what its layer is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.given = x.detach()
        return self.layer(x)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
def test_integers_are_quantized_where_they_become_quantities(dtype):
    images = torch.randint(0, 255, (4, 8), dtype=dtype)
    sim = simulated(Forward(lambda m, x: m.fc(x.float()), fc=nn.Linear(8, 3)), images)
    assert list(sim.quantizers()) == ["fc.input[0]", "fc.weight", "fc.output"]
    assert sim.quantizers()["fc.input[0]"].observer.highest == images.max()


Pair = namedtuple("Pair", "left right")


def test_inputs_in_a_named_tuple():
    sim = simulated(Forward(lambda m, pair: m.fc(pair.left) + pair.right, fc=nn.Linear(8, 8)), (Pair(ROWS, ROWS + 1),))
    assert next(iter(sim.quantizers())) == "input[0, 'left']"
    assert levels(sim(Pair(ROWS, ROWS + 1))) <= 16


@dataclass
class Batch:
    x: Tensor
    more: dict


def test_tensors_in_an_object_are_quantized_where_they_are_read():
    batch = Batch(ROWS, {"scale": [ROWS + 2]})
    sim = simulated(Forward(lambda m, batch: m.fc(F.layer_norm(batch.x, (8,)) * batch.more["scale"][0]), fc=nn.Linear(8, 8)), (batch,))
    assert list(sim.quantizers()) == [
        "layer_norm.input[0]", "layer_norm.output", "mul.input[1]", "mul.output", "fc.weight", "fc.output",
    ]  # fmt: skip
    sim(batch)
    assert torch.equal(batch.x, ROWS)


def test_a_bias_that_is_computed_stays_float():
    def forward(module: nn.Module, x: Tensor) -> Tensor:
        return torch.func.functional_call(module.fc, {name: p * 0.9 for name, p in module.fc.named_parameters()}, (x,))

    sim = simulated(Forward(forward, fc=nn.Linear(8, 3)), ROWS)
    assert "bias in float: computed anew in each call" in {entry.reason for entry in sim.summary().left}


def test_what_only_unseen_code_reads_is_quantized():
    tail = torch.jit.script(nn.Sequential(nn.Linear(8, 3)))
    sim = simulated(Forward(lambda m, x: m.tail(m.fc(x)), fc=nn.Linear(8, 8), tail=tail), ROWS)
    assert "fc.output" in sim.quantizers()


class Rms(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Layer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = (x - mean).pow(2).mean(-1, keepdim=True)
        return (x - mean) / (variance + 1e-6).sqrt()


class Unit(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        weights = (-x.abs()).exp()
        return weights / weights.sum(-1, keepdim=True)


class Nearest(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        weights = 1 / (x.pow(2) + 1e-2).clamp_min(1e-2)
        weights = weights / weights.sum(-1, keepdim=True)
        return weights[:, :4] @ x.new_ones(4, 8)


class Logarithm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.log(x.abs() + 1e-9)


class Denormalized(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        deviation = torch.sqrt(x.var(-1, keepdim=True) + 1e-12)
        return (x / deviation).tanh() * deviation


@pytest.mark.parametrize("norm", [Rms, Layer, Unit, Nearest, Logarithm, Denormalized])
def test_no_divisor_is_rounded_to_zero(norm):
    x = torch.randn(6, 8) * torch.logspace(-4, 2, 6)[:, None]
    x[5] *= 10
    sim = simulated(nn.Sequential(nn.Linear(8, 8), norm(), nn.Linear(8, 8)), x)
    sim.train()(x).sum().backward()
    assert sim(x).isfinite().all()
    assert all(p.grad.isfinite().all() for p in sim.parameters())


def test_a_normalization_that_is_written_out_is_one_operation():
    sim = simulated(Layer(), ROWS)
    assert {row.key: row.op for row in sim.summary().rows} == {
        "input": "input", "mean.output": "mean", "sub.output": "sub", "pow.output": "pow + mean + add + sqrt + div",
        "sub_2.output": "sub",
    }  # fmt: skip


def test_a_sum_in_place_is_one_operation():
    def forward(module: nn.Module, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for expert in module.experts:
            total.index_add_(0, torch.arange(2), expert(x[:2]))
        return module.fc(total)

    experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    sim = simulated(Forward(forward, experts=experts, fc=nn.Linear(8, 3)), ROWS)
    assert "index_add + index_add + index_add" in {row.op for row in sim.summary().rows}


def test_masked_scores_are_part_of_the_softmax():
    mask = torch.full((4, 4), -torch.inf).triu(1)
    sim = simulated(Forward(lambda m, x: F.softmax(x @ x.t() + mask, -1) @ x), ROWS)
    assert {row.key: row.op for row in sim.summary().rows}["add.output"] == "add + softmax"


class Ensemble(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(3, 8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda weight: torch.tanh(x @ weight))(self.weights).mean(0)


def test_samples_in_a_vmap_are_observed_and_quantized():
    sim = simulated(Ensemble(), ROWS)
    found = sim.quantizers()
    weights = torch.stack([found["matmul.weight"].quantize(weight) for weight in sim.model.weights])
    made = torch.tanh(found["input"].quantize(ROWS) @ weights)
    assert torch.equal(sim(ROWS), found["mean.output"].quantize(found["matmul.output"].quantize(made).mean(0)))
    sim.train()(ROWS).sum().backward()
    assert sim.model.weights.grad.isfinite().all()


def test_counts_that_index_are_not_rounded():
    def forward(module: nn.Module, x: Tensor) -> Tensor:
        counts = torch.histc(module.fc(x).argmax(-1).float(), bins=3, min=0, max=2)
        return x[: counts.cumsum(0, dtype=torch.int32)[-1]]

    sim = simulated(Forward(forward, fc=nn.Linear(8, 3)), torch.randn(100, 8))
    assert len(sim(torch.randn(100, 8))) == 100


def test_a_padding_mask_can_be_compiled():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    model = Forward(lambda m, x, mask: m.layer(x, src_key_padding_mask=mask), layer=layer)
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    sim = qsim.QuantSim(model.eval(), (torch.randn(2, 5, 8), mask), qsim.int4())
    sim.calibrate([(torch.randn(2, 5, 8), mask)], progress=False)
    sim.train()
    compiled = torch.compile(sim, fullgraph=True, backend="eager")
    x = torch.randn(2, 5, 8)
    assert torch.equal(compiled(x, mask), sim(x, mask))
    with pytest.raises(AssertionError, match="expected a key_padding_mask of shape"):
        sim(x, mask[:, 1:])


def test_what_training_computes_in_place_of_something_has_its_quantizer():
    def local_mean(module: nn.Module, x: Tensor) -> Tensor:
        y = module.conv(x)
        pooled = F.adaptive_avg_pool2d(y, 1) if module.training else F.avg_pool2d(y, 3, 1, padding=1).clamp(-9, 9)
        return y * module.gate(pooled)

    model = Forward(local_mean, conv=nn.Conv2d(3, 4, 3, padding=1), gate=nn.Conv2d(4, 4, 1))
    sim = simulated(model, torch.randn(2, 3, 8, 8))
    seen = []
    sim.model.gate.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    sim.train()(torch.randn(2, 3, 8, 8)).sum().backward()
    quantizer = sim.quantizers()["clamp.output"]
    assert torch.equal(seen[0], quantizer.quantize(seen[0]))
    assert all(p.grad is not None for p in sim.model.parameters())
