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
