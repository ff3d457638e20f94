"""Sums that stop growing (QS017): beside NumPy, which adds one float16 after the other, and in the plan."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from models import Calls
from torch import nn

import qsim
from qsim.analysis.deviation import Deviation
from qsim.operations.half import stops_at

X = torch.full((1, 2, 80, 80), 1.5)


def one_by_one(values):
    total = np.float16(0)
    for value in values.numpy().astype(np.float16).ravel():
        total = np.float16(total + value)
    return float(total)


class Head(nn.Module):
    def __init__(self, pool):
        super().__init__()
        self.pool, self.fc = pool, nn.Linear(2, 3)

    def forward(self, x):
        return self.fc(self.pool(x).flatten(1))


POOLS = {
    "mean": lambda x: x.mean((2, 3)),
    "sum": lambda x: x.sum((2, 3)) / 6400,
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, 1),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 80),
    "nanmean": lambda x: x.nanmean((2, 3)),
    "nansum": lambda x: x.nansum((2, 3)) / 6400,
    "interpolate": lambda x: F.interpolate(x, 1, mode="area"),
    "trapezoid": lambda x: torch.trapezoid(x.flatten(2)) / 6400,
    "trapz": lambda x: torch.trapz(x.flatten(2), torch.arange(6400.0)) / 6400,
    "cumsum": lambda x: x.flatten(2).cumsum(-1)[..., -1] / 6400,
}


@pytest.mark.parametrize("name", POOLS)
def test_it_is_an_error_with_a_plan_that_cures(name):
    torch.manual_seed(0)
    diagnosis = qsim.doctor(Head(POOLS[name]).eval(), [X], target="coreml-fp16", progress=False)
    (finding,) = diagnosis.findings
    assert (finding.code, finding.severity, finding.op) == ("QS017", "error", name)
    assert diagnosis.plan.keep[0] == name
    assert diagnosis.plan.irreducible
    assert diagnosis.sqnr < 10
    wide = qsim.doctor(Head(POOLS[name]).eval(), [X], target="onnxruntime-fp16", progress=False)  # which adds up in float32
    assert all(finding.code != "QS017" for finding in wide.findings)
    assert wide.plan.keep == ()


def test_the_sum_stops_where_numpy_stops():
    class Sum(nn.Module):
        def forward(self, x):
            return x.sum()

    x = torch.full((6000,), 2.0)
    stopped = one_by_one(x)
    assert stopped == stops_at("float16") * 2
    diagnosis = qsim.doctor(Sum(), [x], target="coreml-fp16", progress=False)
    assert stops_at("float16") * 1.5 < one_by_one(x * 0.75) < 2 * stops_at("float16") * 1.5  # later, where additions are rounded up
    assert diagnosis.sqnr == pytest.approx(-20 * np.log10(1 - stopped / 12000), abs=0.01)


def test_one_loud_channel_is_no_long_sum():
    """The numbers that a sum adds are its own, not those of the tensor."""
    x = torch.full((1, 256, 8, 8), 1e-3)
    x[:, 0] = 1.0
    assert one_by_one(x[0, 0]) == 64
    assert qsim.doctor(Head(lambda x: x.mean((2, 3))[:, :2]).eval(), [x], target="coreml-fp16", progress=False).healthy


def test_where_the_output_does_not_show_it_it_is_a_warning():
    class Beside(nn.Module):
        def forward(self, x):
            return x[..., 0] + 0 * x.mean((2, 3))[..., None]

    diagnosis = qsim.doctor(Beside(), [X], target="coreml-fp16", progress=False)
    assert [(finding.code, finding.severity) for finding in diagnosis.findings] == [("QS017", "warning")]
    assert diagnosis.plan.keep == ()


@pytest.mark.parametrize("name", POOLS)
def test_the_simulation_adds_up_as_the_doctor_does(name):
    torch.manual_seed(0)
    model, deviation = Head(POOLS[name]).eval(), Deviation()
    with torch.no_grad():
        sim = qsim.QuantSim(model, X, qsim.fp16(target="coreml"))
        deviation.add(model(X), sim(X))
    assert deviation.sqnr == pytest.approx(qsim.doctor(model, [X], target="coreml-fp16", progress=False).sqnr, abs=1e-3)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(sim, backend="eager", fullgraph=True)(X), sim(X))


@pytest.mark.parametrize("softmax", [torch.softmax, lambda x, dim: F.log_softmax(x, dim).exp()])
def test_a_softmax_over_equal_scores_stops_and_one_of_a_few_large_does_not(softmax):
    model = Calls(lambda x: softmax(x, -1))
    for scores, times in ((torch.zeros(1, 6400), 6400 / stops_at("float16")), (torch.linspace(-20, 0, 6400)[None], 1.0)):
        found = qsim.QuantSim(model, scores, qsim.fp16(target="coreml"))(scores)
        torch.testing.assert_close(found, model(scores) * times, rtol=2e-2, atol=1e-6)
        codes = {finding.code for finding in qsim.doctor(model, [scores], target="coreml-fp16", progress=False).findings}
        assert ("QS017" in codes) == (times > 1)
