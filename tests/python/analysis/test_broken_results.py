"""Results that are NaN or Inf where the float model's are not: every figure says so, and no figure leaves them out."""

import json
import math

import pytest
import torch
from torch import nn

import qsim
from qsim.analysis.deviation import Deviation
from qsim.analysis.metric import Ratio, broken_in

X = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
X[0::2] *= 1000  # with the weights below, half of the samples overflow float16 inside the model; in float32 all is finite


def overflowing():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    model[0].weight.data *= 2000
    return model


def simulated(config=None):
    sim = qsim.QuantSim(overflowing(), X, config or qsim.fp16())
    sim.calibrate([X], progress=False)
    return sim


@pytest.fixture(scope="module")
def sim():
    return simulated()


@pytest.fixture(scope="module")
def broken(sim):
    with torch.no_grad():
        assert overflowing()(X).isfinite().all()
        return int((~sim(X).isfinite()).sum())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_deviation_is_infinite(value):
    found = Deviation()
    found.add(torch.tensor([3.0, 4.0, math.inf, math.nan]), torch.tensor([3.0, value, 1.0, math.inf]))
    assert (found.elements, found.nonfinite, found.broken, found.compared) == (4, 3, 1, 2)
    assert (found.sqnr, found.noise, found.max_error) == (-math.inf, math.inf, math.inf)


def test_sensitivity_and_what_breaks_most_is_first(sim, broken):
    found = sim.sensitivity([X], progress=False)
    assert broken > 0
    assert (found.quantized, broken_in(found.quantized)) == (-math.inf, broken)
    ranked = found.ranked()
    counts = [score.broken for score in ranked]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == broken
    assert [score.value == -math.inf for score in ranked] == [count > 0 for count in counts]
    for score in ranked:
        lost, share = (30.0, 1.0) if score.broken else (0.0, 0.0)
        assert (found.lost(score.value), found.share(score.value)) == (pytest.approx(lost), share)
    for text in (str(found), found.page().html()):
        assert f"{broken} results are NaN or Inf and finite in float" in text
        assert "NaN, Inf" in text
        assert "nan" not in text
    healthy = simulated(qsim.int8()).sensitivity([X], progress=False)
    assert "NaN" not in str(healthy)


def test_progressive_breaks_where_the_first_result_does(sim, broken):
    found = sim.progressive([X], order="forward", progress=False)
    assert [step.value == -math.inf for step in found.steps] == [False, True, True, True]
    assert found.breaks is found.steps[1]
    assert [step.drop for step in found.steps[1:]] == [math.inf, 0.0, 0.0]
    assert f"with '0' {found.steps[1].broken} results are NaN or Inf" in str(found)
    assert "nan" not in found.page().html()
    assert found.steps[-1].broken == broken


def test_a_plan_leaves_none_of_them(sim):
    plan = sim.float_plan([X], target=60.0, progress=False)
    assert plan.keep
    assert plan.sqnr >= 60
    cured = simulated(qsim.fp16().with_plan(plan))
    assert cured(X).isfinite().all()
    short = sim.float_plan([X], target=60.0, probes=1, progress=False)
    assert not short.irreducible
    assert "results that are NaN or Inf" in str(short)
    assert json.loads(short.to_json(), parse_constant=pytest.fail)["sqnr"] == "-inf"
    assert qsim.Plan.from_json(short.to_json()) == short


def test_compare_and_the_doctor_say_the_same(sim, broken):
    found = sim.compare(X)
    assert (found.output.sqnr, found.output.broken) == (-math.inf, broken)
    assert found.notes == [f"{broken} results are NaN or Inf and finite in float (-inf dB)"]
    assert found["0.output"].local.sqnr == -math.inf
    assert "nan" not in found.page().html()
    diagnosis = qsim.doctor(overflowing(), [X], target="tensorrt-fp16", progress=False)
    assert (diagnosis.sqnr, diagnosis.nonfinite) == (-math.inf, broken)


def test_a_file_of_scores_keeps_how_many(sim, tmp_path):
    path = tmp_path / "scores.json"
    first = sim.sensitivity([X], path=path, progress=False)
    json.loads(path.read_text(), parse_constant=pytest.fail)
    again = sim.sensitivity([X], path=path, progress=False)
    assert [score.broken for score in again.scores] == [score.broken for score in first.scores]
    assert str(again) == str(first)


def test_what_is_infinite_in_float_is_left_out():
    class Masked(nn.Linear):
        def forward(self, x):
            return super().forward(x).masked_fill(x > 1, -math.inf)

    torch.manual_seed(0)
    x = torch.randn(32, 4)
    sim = qsim.QuantSim(Masked(4, 4).eval(), x, qsim.fp16())
    sim.calibrate([x], progress=False)
    assert 40 < sim.sensitivity([x], progress=False).quantized < 120
    assert sim.compare(x).output.broken == 0


def test_a_distillation_begins_below_all_that_is_finite():
    sim = simulated()
    found = sim.distill(X.split(16), steps=1, progress=False)
    assert found.levels[0] == -math.inf


def test_a_ratio_can_be_copied():
    import copy
    import pickle

    ratio = Ratio(-math.inf, 3)
    assert [copy.deepcopy(ratio).broken, pickle.loads(pickle.dumps(ratio)).broken] == [3, 3]
