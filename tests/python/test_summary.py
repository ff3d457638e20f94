"""The summary tells what is quantized, what is not, and why."""

import dataclasses
import sys

import pytest
import torch
from models import ConvNet, Perceptron, seeded

import qsim

X = torch.randn(2, 1, 12, 12)


@pytest.mark.parametrize("rich", [True, False])
def test_shows_every_quantizer_and_every_reason(rich, monkeypatch):
    if not rich:
        monkeypatch.setitem(sys.modules, "rich", None)
    sim = qsim.QuantSim(seeded(ConvNet), X, dataclasses.replace(qsim.int8(), bias=False).override("branch", off=True))
    text = str(sim.summary())
    for key in sim.quantizers():
        assert key in text
    assert "not calibrated" in text
    assert "left in float by the config" in text
    assert "branch.weight" in text
    assert "bias in float: Config.bias is off" in text
    sim.calibrate([X], progress=False)
    sim.disable("fc.output")
    text = str(sim.summary())
    assert "not calibrated" not in text
    assert "int8 symmetric per channel (axis 0)" in text
    assert next(line for line in text.splitlines() if "fc.output" in line).rstrip().endswith("off")


def test_rows_hold_what_is_shown():
    x = torch.linspace(-1, 1, 60).reshape(10, 6)
    sim = qsim.QuantSim(seeded(Perceptron), x, qsim.Config(bias=True))
    spoiled = x.clone()
    spoiled[0, 0] = torch.nan
    sim.calibrate([spoiled], progress=False)
    rows = {row.key: row for row in sim.summary().rows}
    assert list(rows) == [*sim.quantizers(), "fc1.bias", "fc2.bias"]
    assert (rows["input"].nonfinite, rows["fc1.output"].op, rows["fc1.bias"].grid) == (
        1,
        "linear + relu",
        "int32, scale of input x fc1.weight",
    )
    assert sim.summary().left == []


def test_batch_norms_that_are_kept_are_named():
    model = torch.nn.Sequential(torch.nn.BatchNorm2d(1), torch.nn.Conv2d(1, 2, 3, padding=1)).eval()
    model[0].num_batches_tracked.fill_(1)
    notes = qsim.QuantSim(model, X).summary().notes
    assert any("BatchNorm '0' is not folded" in note for note in notes)
