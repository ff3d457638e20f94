"""What no batch reached is named: by the doctor (QS006), by calibration and by the borders; beside data that reach it."""

import pytest
import torch
from torch import nn

import qsim

SMALL, LARGE = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)), torch.full((4, 4), 1e4)


class Branch(nn.Module):
    """A layer that runs for large inputs alone."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.a(x)
        if x.abs().max() > 100:
            x = self.b(x).relu()
        return self.c(x)


def model():
    torch.manual_seed(0)
    return Branch().eval()


@pytest.mark.parametrize("target", ["float32", "tensorrt-fp16", "coreml-fp16", "onnxruntime-int8", "tensorrt-int8"])
def test_the_doctor_names_it(target):
    diagnosis = qsim.doctor(model(), [SMALL, SMALL], target=target, progress=False)
    (finding,) = [finding for finding in diagnosis.findings if finding.code == "QS006"]
    assert (finding.severity, finding.place) == ("warning", "b")
    assert finding.evidence["first of these"] == "b.weight, b.bias"
    assert not diagnosis.healthy
    both = qsim.doctor(model(), [SMALL, LARGE], target="float32", progress=False)
    assert [finding.code for finding in both.findings] == []


def test_what_only_training_reads_and_what_is_read_without_a_call_is_no_finding():
    class Auxiliary(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.aux, self.bare = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 4)
            self.norm = nn.Sequential(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4))

        def forward(self, x):
            x = self.norm(self.fc(x)[..., None])[..., 0] @ self.bare.weight.t() + self.bare.bias
            return (x, self.aux(x)) if self.training else x

    torch.manual_seed(0)
    for target in ("float32", "tensorrt-fp16"):
        diagnosis = qsim.doctor(Auxiliary().eval(), [SMALL], target=target, progress=False)
        assert [finding for finding in diagnosis.findings if finding.code == "QS006"] == []


@pytest.mark.parametrize("target", ["default", "tensorrt", "onnxruntime"])
@pytest.mark.parametrize("config", ["weights and activations", "weights alone"])
def test_calibration_and_borders_name_it(target, config):
    config = qsim.int8(target=target) if config == "weights and activations" else qsim.int8(target=target).override("*", activation=None)
    sim = qsim.QuantSim(model(), SMALL, config)
    assert sim.borders().unread == []  # nothing has run yet
    report = sim.calibrate([SMALL], progress=False)
    assert [problem for problem in report.problems if "'b.weight' was read by no batch" in problem]
    (found,) = sim.borders().unread
    assert (found.tensor, found.cure) == ("b.weight", "Calibrate with data that reach it")
    assert "1 weight that no batch reached\n  'b.weight': read by no batch" in str(sim.borders())
    sim.borders().check()  # it is told, and stops nothing: what an example does not show is not exported
    with pytest.warns(UserWarning, match="did not show"):
        report = sim.calibrate([LARGE], progress=False)
    assert not [problem for problem in report.problems if "was read by no batch" in problem]
    assert sim.borders().unread == []


def test_a_layer_that_is_switched_off_is_not_named():
    sim = qsim.QuantSim(model(), SMALL, qsim.int8())
    sim.disable("b.weight")
    assert sim.calibrate([SMALL], progress=False).problems == []
    assert sim.borders().unread == []


def test_a_table_that_is_read_without_a_call_of_its_layer_is_not_named():
    """As the relative positions of DeBERTa are: a slice of the weight of an embedding, which linear layers read."""

    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.a = nn.Embedding(8, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.a(x) @ self.a(self.table.weight[:4]).T

    sim = qsim.QuantSim(Table().eval(), SMALL, qsim.int8())
    assert sim.calibrate([SMALL], progress=False).problems == []
    assert sim.borders().unread == []
