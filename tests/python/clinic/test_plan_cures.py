"""The plan of every faulty model of the doctor's tests: it cures, and brute force finds no part of it that does."""

import itertools

import pytest
import torch
from test_doctor_half import CULPRITS, MASKS, Attention, Calls, examine, padded

import qsim
from qsim.analysis.deviation import Deviation
from qsim.clinic.examined_model import ExaminedModel
from qsim.clinic.shadow import Shadow
from qsim.clinic.targets import TARGETS


def checked(model, data, target):
    plan = examine(model, data, target=target).plan
    shadow = Shadow(ExaminedModel(model, data), TARGETS[target], [data])
    assert plan.irreducible
    assert shadow.probe(frozenset(plan.keep)).ok
    parts = itertools.chain.from_iterable(itertools.combinations(plan.keep, n) for n in range(len(plan.keep)))
    assert not any(shadow.probe(frozenset(part)).ok for part in parts)
    inputs = data if isinstance(data, tuple) else (data,)
    deviation = Deviation()
    config = qsim.bf16() if target == "bf16" else qsim.fp16()
    deviation.add(model(*inputs), qsim.QuantSim(model, data, config.with_plan(plan))(*inputs))
    assert deviation.nonfinite == 0
    assert deviation.sqnr >= TARGETS[target].sqnr
    return plan


@pytest.mark.parametrize("fault", CULPRITS)
def test_the_culprit_is_kept_with_what_it_takes(fault):
    model, data, *_, healthy = CULPRITS[fault]
    plan = checked(Calls(model), data, "tensorrt-fp16")
    assert 1 <= len(plan.keep) <= 5
    twin = examine(model, healthy) if isinstance(healthy, torch.Tensor) else examine(healthy, data)
    assert (twin.plan.keep, twin.plan.irreducible) == ((), True)


@pytest.mark.parametrize("target", ["coreml-fp16", "tensorrt-fp16"])
@pytest.mark.parametrize("way", MASKS)
def test_a_mask_is_kept_only_where_its_overflow_matters(way, target):
    mask, op = MASKS[way]
    torch.manual_seed(0)
    plan = checked(Attention(mask).eval(), padded(), target)
    assert plan.keep == ((op,) if way == "extended" else ())  # 0 * -Inf is NaN; -Inf alone is what a mask is


def test_bfloat16_has_the_range_and_not_the_digits():
    model, data, *_ = CULPRITS["cancellation"]
    assert checked(Calls(model), data, "bf16").keep
    model, data, *_ = CULPRITS["squares"]
    assert checked(Calls(model), data, "bf16").keep == ()


def changed(x, change):
    x = x.clone()
    change(x)
    return x


def placed(x):
    y = torch.zeros_like(x)
    y[:, 1:], y[:, 0] = x[:, 1:], 1e6
    return y


WAVE = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1)).half().float()
MOVED = {  # numbers beyond the format, put into what no operation has computed
    "slice": lambda x: changed(x, lambda y: y.__setitem__((slice(None), 0), 1e6)) / 1e3,
    "flags": lambda x: changed(x, lambda y: y.__setitem__(y > 0, 1e6)) / 1e3,
    "view": lambda x: changed(x, lambda y: y[:, 0].fill_(1e6)) / 1e3,
    "two views": lambda x: changed(x, lambda y: (y[:, 0].fill_(1e6), y[:, 1].fill_(-1e6))) / 1e3,
    "nothing added": lambda x: changed(x + 0, lambda y: y.__setitem__((slice(None), 0), 1e6)) / 1e3,
    "zeros": lambda x: placed(x) / 1e3,
    "turned": lambda x: torch.where(x > 0, 1e6, x).transpose(1, 2).reshape(4, -1) / 1e3,
    "twice": lambda x: x.masked_fill(x > 0, 1e6).masked_fill(x < 0, -1e6) / 1e3,
    "repeated": lambda x: x.repeat(1, 2, 1).masked_fill((x > 0).repeat(1, 2, 1), 1e6).max(1).values / 1e3,
    "flags alone": lambda x: torch.where(x > 0, 1e6, 0.0).flatten() / 1e3 + x.flatten(),
}


@pytest.mark.parametrize("way", MOVED)
def test_what_is_moved_in_front_of_what_is_kept(way):
    assert checked(Calls(MOVED[way]), WAVE, "tensorrt-fp16").keep == ("div",)
