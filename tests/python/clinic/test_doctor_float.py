"""The doctor in float32: each check with a model that has the fault and a twin that has not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from models import Calls
from torch import Tensor, nn

import qsim


def examine(model, *batches, target="float32", **options):
    return qsim.doctor(model, batches, target, progress=False, **options)


def codes(diagnosis):
    return [(finding.code, finding.op) for finding in diagnosis.findings]


class Ratio(nn.Module):
    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.first, self.last, self.epsilon = nn.Linear(8, 8), nn.Linear(8, 2), epsilon

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y = y / (x.norm(dim=-1, keepdim=True) + self.epsilon)  # the line that is to blame
        return self.last(y.relu()).sigmoid()


def with_zero_sample(index: int = 2) -> Tensor:
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    x[index] = 0
    return x


def test_names_the_first_operation_its_line_and_what_follows():
    (finding,) = examine(nn.Sequential(Ratio(0.0)), torch.randn(5, 8), with_zero_sample()).findings
    assert (finding.code, finding.severity, finding.module, finding.op) == ("QS001", "error", "0", "0.div")
    assert "the line that is to blame" in finding.source
    assert finding.source.startswith("tests/python/clinic/test_doctor_float.py:") or "/test_doctor_float.py:" in finding.source
    assert finding.evidence["batch"] == 1
    assert finding.evidence["infs"] + finding.evidence["nans"] == 8
    assert finding.evidence["chain"] == ["0.relu", "0.last", "0.sigmoid"][: len(finding.evidence["chain"])]
    assert not examine(nn.Sequential(Ratio(1e-3)), torch.randn(5, 8), with_zero_sample()).findings


def test_two_causes_are_two_findings():
    both = Calls(lambda x: (x.log().exp(), (x - 1).sqrt() * 2))
    found = examine(both, torch.tensor([0.5, -0.5, 2.0]))
    assert codes(found) == [("QS001", "log"), ("QS001", "sqrt")]


def test_a_logarithm_of_zero_that_a_softmax_absorbs_is_no_fault():
    assert not examine(Calls(lambda x: x.log().softmax(-1)), torch.tensor([[0.0, 1.0, 2.0]])).findings


def test_a_row_that_is_masked_throughout():
    attention = Calls(lambda x, mask: x.masked_fill(mask, -torch.inf).softmax(-1))
    mask = torch.zeros(2, 4, dtype=torch.bool)
    mask[:, 2:] = True
    assert not examine(attention, (torch.randn(2, 4), mask)).findings
    mask[1] = True
    assert codes(examine(attention, (torch.randn(2, 4), mask))) == [("QS001", "softmax")]


def test_the_smallest_input_is_saved(tmp_path):
    path = tmp_path / "input.pt"
    model = Ratio(0.0)
    examine(model, torch.randn(5, 8), (with_zero_sample(),), save_input=path)
    (x,) = torch.load(path, weights_only=True)
    assert x.shape == (1, 8)
    assert not model(x).isfinite().all()
    assert [p.name for p in tmp_path.iterdir()] == ["input.pt"]


def test_what_is_not_needed_of_the_input_is_zero(tmp_path):
    path = tmp_path / "input.pt"
    x = torch.rand(3, 64) + 1
    x[1, 17] = -1.0
    examine(Calls(lambda x: (x + 0.5).log()), x, save_input=path)
    saved = torch.load(path, weights_only=True)
    assert saved.count_nonzero() == 1
    assert saved[0, 17] == -1.0


def test_nothing_is_saved_of_a_healthy_model(tmp_path):
    examine(Ratio(1e-3), torch.randn(5, 8), save_input=tmp_path / "input.pt")
    assert not list(tmp_path.iterdir())


def test_data_that_is_not_finite_is_blamed_on_the_data():
    x = torch.randn(4, 8)
    x[2, 3] = torch.inf
    (finding,) = examine(Ratio(1e-3), torch.randn(4, 8), x).findings
    assert (finding.code, finding.evidence["elements"], finding.evidence["first batch"]) == ("QS002", 1, 1)


def test_a_mask_of_minus_infinity_is_good_data():
    attention = Calls(lambda scores, mask: (scores + mask).softmax(-1))
    mask = torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1) > 0, -torch.inf)
    assert not examine(attention, (torch.randn(2, 4, 4), mask)).findings
    assert codes(examine(attention, (torch.randn(2, 4, 4).log(), mask)))[0][0] == "QS002"


def test_nan_that_no_operation_is_seen_to_make():
    scripted = nn.Sequential(nn.ReLU(), torch.jit.trace(Calls(lambda x: (x - 1).sqrt()), torch.ones(2)))
    (finding,) = examine(scripted.eval(), torch.zeros(2)).findings
    assert (finding.code, finding.op, finding.evidence["where"]) == ("QS001", "", "the output")


def test_parameters_and_buffers():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).eval()
    model[1].num_batches_tracked += 1
    model[1].running_var.fill_(0.5)
    assert not examine(model, torch.randn(4, 8)).findings
    model[0].weight.data[0, 0] = torch.nan
    model[1].running_var[3] = torch.inf
    found = examine(model, torch.randn(4, 8)).findings
    assert [(f.code, f.module, f.evidence["tensor"]) for f in found] == [("QS003", "0", "0.weight"), ("QS003", "1", "1.running_var")]


def test_a_buffer_of_minus_infinity_is_a_mask():
    class Causal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ x.transpose(-1, -2) + self.mask).softmax(-1)

    assert not examine(Causal(), torch.randn(2, 4, 8)).findings


def test_a_range_wider_than_float32():
    wide = Calls(lambda x: torch.cat([x * 3e38, x * -3e38]).tanh())
    assert codes(examine(wide, torch.ones(4))) == [("QS005", "cat")]
    assert not examine(Calls(lambda x: torch.cat([x * 1e38, x * -1e38]).tanh()), torch.ones(4)).findings


def test_no_batch_at_all():
    (finding,) = examine(nn.Linear(2, 2)).findings
    assert finding.code == "QS006"


def test_gradients():
    def loss(output: Tensor, batch: Tensor) -> Tensor:
        return output.sum()

    root = Calls(lambda x: x)
    model = nn.Sequential(nn.Linear(8, 8), Calls(lambda y: y.relu().sqrt()), root)
    (finding,) = examine(model, torch.randn(4, 8), loss=loss).findings
    assert (finding.code, finding.module) == ("QS004", "1")
    assert "Sqrt" in finding.evidence["operation"]
    assert not examine(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(4, 8), loss=loss).findings


def test_a_loss_that_breaks():
    model = nn.Sequential(nn.Linear(8, 1), nn.Sigmoid())
    model[0].bias.data.fill_(200.0)
    (finding,) = examine(model, torch.randn(4, 8), loss=lambda out, batch: (1 - out).log().mean()).findings
    assert (finding.code, finding.evidence["where"]) == ("QS001", "the loss")
    logits = examine(model[:1], torch.randn(4, 8), loss=lambda out, batch: F.logsigmoid(-out).mean())
    assert not logits.findings


def test_training_mode_is_a_finding_and_left_as_it_was():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    before = {name: t.clone() for name, t in model.state_dict().items()}
    finding = examine(model, torch.randn(2, 3, 8, 8)).findings[0]
    assert (finding.code, finding.module) == ("QS020", "1")
    assert model.training
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert examine(model.eval(), torch.randn(2, 3, 8, 8)).healthy


@pytest.mark.parametrize("form", ["tensor", "with target", "nested", "dict", "loader", "forward"])
def test_forms_of_data(form):
    class Two(nn.Module):
        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            return x.log() if scale is None else (x * scale).log()

    x, label = -torch.ones(4, 3), torch.zeros(4, 5, dtype=torch.long)
    data = {
        "tensor": [x],
        "with target": [(x, label)],  # does not broadcast: no argument of the model
        "nested": [((x, torch.ones(4, 1)), label)],
        "dict": [{"x": x, "label": label}],
        "loader": torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, label), batch_size=2),
        "forward": [{"image": x}],
    }[form]
    forward = (lambda model, batch: model(batch["image"])) if form == "forward" else None
    found = qsim.doctor(Two(), data, forward=forward, progress=False)
    assert codes(found) == [("QS001", "log")]
    assert found.batches == (2 if form == "loader" else 1)


def test_limits():
    found = qsim.doctor(nn.Linear(2, 2), (torch.randn(1, 2) for _ in range(1000)), max_batches=3, progress=False)
    assert found.batches == 3
    endless = iter(lambda: torch.randn(1, 2), None)
    assert qsim.doctor(nn.Linear(2, 2), endless, seconds=0.05, progress=False).batches >= 1


def test_errors():
    with pytest.raises(ValueError, match="target='tensort'; expected one of 'float32'"):
        examine(nn.Linear(2, 2), torch.randn(1, 2), target="tensort")
    with pytest.raises(TypeError, match=r"qsim\.doctor: got data of type Tensor"):
        qsim.doctor(nn.Linear(2, 2), torch.randn(1, 2))
    with pytest.raises(ValueError, match="does not run on the first batch"):
        examine(nn.Linear(2, 2), torch.randn(1, 3))
