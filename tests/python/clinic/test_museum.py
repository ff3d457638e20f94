"""Reported failures: the doctor names the first culprit, its plan cures and no part of it does, and healthy twins are left in peace."""

from __future__ import annotations

import itertools
import re
from functools import cache

import pytest
import torch
from museum import EXHIBITS
from museum.exhibit import noise
from museum.norms import LayerNorm
from torch import Tensor, nn

import qsim
from qsim.analysis.deviation import Deviation
from qsim.clinic.examined_model import ExaminedModel
from qsim.clinic.shadow import Shadow
from qsim.clinic.targets import TARGETS

HALF = [name for name, exhibit in EXHIBITS.items() if TARGETS[exhibit.target].format is not None]


@cache
def examined(name):
    exhibit = EXHIBITS[name]
    case = exhibit.make()
    return case, qsim.doctor(case.model, case.data, progress=False, **{"target": exhibit.target, **case.options})


def is_close(exact: Tensor, found: Tensor, sqnr: float) -> bool:
    deviation = Deviation()
    deviation.add(exact, found)
    return deviation.nonfinite == 0 and deviation.sqnr >= sqnr


@pytest.mark.parametrize("name", EXHIBITS)
def test_names_the_first_culprit(name):
    exhibit = EXHIBITS[name]
    _, diagnosis = examined(name)
    first = diagnosis.findings[0]
    assert (first.code, first.op or first.module) == (exhibit.code, exhibit.op), str(diagnosis)
    assert first.severity in ("error", "warning")


@pytest.mark.parametrize("name", HALF)
def test_the_plan_cures_and_no_part_of_it_does(name):
    exhibit = EXHIBITS[name]
    case, diagnosis = examined(name)
    plan = diagnosis.plan
    assert plan.irreducible
    assert plan.keep
    target = TARGETS[exhibit.target]
    shadow = Shadow(ExaminedModel(case.model, case.data[0]), target, case.data)
    assert shadow.probe(frozenset(plan.keep)).ok
    parts = itertools.chain.from_iterable(itertools.combinations(plan.keep, n) for n in range(len(plan.keep)))
    assert not any(shadow.probe(frozenset(part)).ok for part in parts)
    inputs = case.data[0] if isinstance(case.data[0], tuple) else (case.data[0],)
    with torch.no_grad():
        exact = case.model(*inputs)
        config = qsim.fp16(target=exhibit.target)
        ill, cured = (qsim.QuantSim(case.model, case.data[0], each)(*inputs) for each in (config, config.with_plan(plan)))
    assert not is_close(exact, ill, target.sqnr)
    assert is_close(exact, cured, target.sqnr)


@pytest.mark.parametrize("name", EXHIBITS)
def test_is_silent_about_the_healthy_twin(name):
    exhibit = EXHIBITS[name]
    case = exhibit.make()
    model, data = case.healthy_model or case.model, case.healthy_data or case.data
    diagnosis = qsim.doctor(model, data, progress=False, **{"target": exhibit.target, **case.options})
    assert diagnosis.healthy, str(diagnosis)
    assert diagnosis.plan is None or not diagnosis.plan.keep


def test_every_exhibit_cites_a_report():
    assert len(EXHIBITS) >= 20
    reports = [re.findall(r"https://github.com/[\w.-]+/[\w.-]+/(?:issues|pull)/\d+", e.make.__doc__) for e in EXHIBITS.values()]
    assert all(reports)
    assert len({report[0] for report in reports}) == len(EXHIBITS)


class Layers(nn.Module):
    """Rotations and limits that keep the scale; the blocks in `faults` are norms that are written out, on values of 700."""

    def __init__(self, faults: tuple[int, ...], blocks: int) -> None:
        super().__init__()
        self.blocks, self.faults = nn.ModuleList(), faults
        for i in range(blocks):
            self.blocks.append(LayerNorm(16) if i in faults else nn.Linear(16, 16) if i % 2 else nn.Hardtanh(-8, 8))
            if isinstance(self.blocks[i], nn.Linear):
                nn.init.orthogonal_(self.blocks[i].weight)

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x * 700.0 if i in self.faults else x)
        return x


@pytest.mark.parametrize("faults", [(20, 150, 300), (5, 10, 370), (100, 101, 102)])
def test_three_culprits_among_412_operations(faults):
    torch.manual_seed(0)
    model, data = Layers(faults, 412 - 27).eval(), [noise(4, 16)]  # a norm is nine operations, one of them a multiplication by 700
    assert len(ExaminedModel(model, data[0]).sites) == 412
    diagnosis = qsim.doctor(model, data, "tensorrt-fp16", progress=False)
    culprits = [finding.op for finding in diagnosis.findings if finding.severity == "error"]
    assert culprits == [f"blocks.{i}.pow" for i in faults]
    assert diagnosis.plan.irreducible
    assert diagnosis.probes <= 40
