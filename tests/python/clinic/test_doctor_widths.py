"""Ranges wider than float32 (QS005), wherever they come from: the call that makes them so is named, once."""

import pytest
import torch
import torch.nn.functional as F
from models import Calls

import qsim

BIG = 3e38
X = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))


def set_items(x):
    y = x.clone()
    y[..., 0] = -BIG
    y[..., 1] = BIG
    return y


WIDE = {
    "where": lambda x: torch.where(x > 0, BIG, -BIG),
    "where, read": lambda x: torch.where(x > 0, BIG, -BIG) * 1.0,
    "where, moved and read": lambda x: torch.where(x > 0, BIG, -BIG).reshape(-1) + 1.0,
    "masked_fill": lambda x: (x + BIG).masked_fill(x < 0, -BIG).softmax(-1),
    "masked_fill_": lambda x: (x + BIG).masked_fill_(x < 0, -BIG).softmax(-1),
    "masked_fill_2": lambda x: x.masked_fill(x < 0, -BIG).masked_fill(x > 1, BIG),
    "pad": lambda x: F.pad(x.masked_fill(x < 0, -BIG), (1, 1), value=BIG),
    "setitem_2": set_items,
    "clamp": lambda x: (x / 0).clamp(-BIG, BIG),
    "hardtanh": lambda x: F.hardtanh(x / 0, -BIG, BIG),
    "cat": lambda x: torch.cat([x.masked_fill(x < 0, -BIG), x.masked_fill(x > 0, BIG)], -1),
}


@pytest.mark.parametrize("target", ["float32", "onnxruntime-int8"])
@pytest.mark.parametrize("name", WIDE)
def test_the_call_that_makes_it_is_named(name, target):
    diagnosis = qsim.doctor(Calls(WIDE[name]), [X], target=target, progress=False)
    (finding,) = [finding for finding in diagnosis.findings if finding.code == "QS005"]
    assert finding.op == name.partition(",")[0].removesuffix("_")
    assert finding.evidence["highest"] - finding.evidence["lowest"] > torch.finfo(torch.float32).max
    assert name.partition(",")[0].strip("_").partition("_2")[0] in finding.source or name == "setitem_2"


NARROW = {
    "a mask": lambda x: (x @ x.T).masked_fill(torch.ones(4, 4).tril() == 0, torch.finfo(torch.float32).min).softmax(-1),
    "a mask of -Inf": lambda x: torch.where(x > 0, x, -torch.inf).softmax(-1),
    "a clamp": lambda x: (x * 1e38).clamp(-1e4, 1e4),
    "one side": lambda x: torch.where(x > 0, BIG, 0.0),
}


@pytest.mark.parametrize("name", NARROW)
def test_masks_and_bounds_are_no_finding(name):
    diagnosis = qsim.doctor(Calls(NARROW[name]), [X], target="float32", progress=False)
    assert [finding for finding in diagnosis.findings if finding.code == "QS005" and finding.op not in ("mul",)] == []


def test_over_batches():
    diagnosis = qsim.doctor(Calls(lambda x: torch.where(x.mean() > 0, BIG, -BIG) + 0 * x), [X.abs(), -X.abs()], progress=False)
    (finding,) = diagnosis.findings
    assert (finding.code, finding.op) == ("QS005", "where")
