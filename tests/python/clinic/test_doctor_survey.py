"""The survey's numbers beside those of the tensors themselves, and the dataflow that the checks walk along."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from qsim.clinic.examined_model import ExaminedModel
from qsim.clinic.flow import Flow
from qsim.clinic.survey import survey
from qsim.clinic.targets import TARGETS


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.linear(x).chunk(2, -1)
        large = left * 2e5
        return (large.flatten(1) + right * 1e-7).mean(1) + torch.ones(3).sum()


@pytest.fixture
def batches():
    return [torch.randn(4, 8), torch.randn(2, 8)]


def looked_at(batches, target="coreml-fp16", **options):
    subject = ExaminedModel(Model(), batches[0])
    return subject, survey(subject, TARGETS[target], batches, **options)


def test_numbers_of_all_batches(batches):
    subject, found = looked_at(batches)
    with torch.no_grad():
        scaled = torch.cat([subject.model.linear(x)[:, :4] * 2e5 for x in batches])
    seen, rounded = found.operations["mul"], scaled.half().float()
    assert (seen.lowest, seen.highest) == (scaled.min().item(), scaled.max().item())
    assert seen.largest == scaled.abs().max().item()
    assert seen.counts.elements == scaled.numel()
    assert seen.counts.overflows == int((~rounded.isfinite()).sum()) > 0
    kept = rounded.isfinite()
    ratio = scaled[kept].double().square().sum() / (scaled - rounded)[kept].double().square().sum()
    assert seen.sqnr == pytest.approx(10 * math.log10(ratio), abs=1e-6)
    assert found.batches == 2
    assert found.largest_input == max(x.abs().max().item() for x in batches)
    small = found.operations["mul_2"].counts
    assert small.underflows + small.subnormals > 0


def test_sums_inside(batches):
    subject, found = looked_at(batches)
    with torch.no_grad():
        added = [(y[:, :4] * 2e5 + y[:, 4:] * 1e-7) for y in (subject.model.linear(x) for x in batches)]
    seen = found.operations["mean"]
    assert seen.largest_sum == pytest.approx(max(t.sum(1).abs().max().item() for t in added))
    assert seen.largest_terms == pytest.approx(max((t.sum(1).abs() / t.abs().mean(1)).max().item() for t in added))
    assert looked_at(batches, "tensorrt-fp16")[1].operations["mean"].largest_sum == 0


def test_lines(batches):
    _, found = looked_at(batches)
    assert "left * 2e5" in str(found.operations["mul"].source)
    assert "self.linear(x)" in str(found.operations["linear"].source)


def test_what_is_computed_from_constants_has_no_rounding_of_its_own(batches):
    subject, found = looked_at(batches)
    assert subject.folded == {"sum"}
    assert found.operations["sum"].counts.overflows == 0


def test_batches_that_are_kept():
    data = [torch.randn(4, 8) * (1e-6 if i != 9 else 1.0) for i in range(12)]
    data[0] = data[0] * 1e-3
    _, found = looked_at(data, keep=4)
    assert {0, 1, 9} <= found.kept.keys()
    assert len(found.kept) <= 4
    assert found.kept[9] is data[9]


def test_flow(batches):
    subject, _ = looked_at(batches)
    flow = Flow(subject)
    assert list(flow.order) == ["linear", "mul", "mul_2", "add", "mean", "sum", "add_2"]
    assert flow.producers["add"] == ("mul", "mul_2")
    assert flow.readers["linear"] == ("mul", "mul_2")
    assert flow.downstream("mul", lambda name: True) == ["add", "mean", "add_2"]
    assert flow.downstream("mul", lambda name: False) == ["add"]
