"""What cannot be traced is told in words: the line, the module, the cure, and nothing on the terminal besides."""

from collections import OrderedDict

import pytest
import torch
from models import Forward
from torch import nn

import qsim
from qsim.trace.capture import capture

REFUSED = {
    "a branch": (lambda m, x: m.fc(x) if x.mean() > 0 else x, r"in 'part' \(`.*`\): Could not guard on data-dependent.*torch\.where"),
    "a size": (lambda m, x: m.fc(x)[: int(x.sum().item())], r"in 'part' \(`.*`\): Could not extract.*depends on the values of tensors"),
    "NumPy": (
        lambda m, x: m.fc(torch.from_numpy(x.numpy())),
        r"in 'part' \(`.*`\): \.numpy\(\) is not supported.*NumPy computes what no graph has",
    ),
    "an operation": (lambda m, x: m.fc(x).to_sparse(), r"in 'part' \(`.*`\): aten\._to_sparse\.default\. torch\.export knows no graph"),
    "another way": (
        lambda m, x: m.fc(x) + torch.ones(3 if torch.compiler.is_exporting() else 4),
        r"in 'part' \(`.*`\): The size of tensor a.*takes another way when it is traced.*attention_mask=None",
    ),
    "a type": (lambda m, x: Exception(m.fc(x)), r"forward returns a Exception, which torch knows no tensors in: register the type"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_traced_is_told_with_its_line_and_the_cure(name, capfd):
    forward, expected = REFUSED[name]
    model = nn.Sequential(OrderedDict(part=Forward(forward, fc=nn.Linear(4, 4)))).eval()
    sim = qsim.QuantSim(model, torch.ones(2, 4))
    with pytest.raises(qsim.CaptureError, match=expected):
        capture(sim, *sim.calls[0])
    assert capfd.readouterr().err == ""


class Labelled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        y = self.fc(x)
        return y if labels is None or not (labels >= 0).any() else nn.functional.cross_entropy(y, labels)


def test_a_loss_that_branches_on_labels_has_its_own_cure():
    call, labelled = {"x": torch.ones(2, 4)}, {"x": torch.ones(2, 4), "labels": torch.tensor([0, 1])}
    sim = qsim.QuantSim(Labelled().eval(), [labelled, call])
    with pytest.raises(qsim.CaptureError, match="No runtime computes a loss: give a call without labels first"):
        capture(sim, *sim.calls[0])
    cured = qsim.QuantSim(Labelled().eval(), [call, labelled])
    assert capture(cured, *cured.calls[0]).dynamic_batch
