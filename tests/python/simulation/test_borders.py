"""The check before an export: every tensor at the border of a region in integers has a scale, or the report says why not."""

import pytest
import torch
import torch.nn.functional as F
from models import Forward
from torch import Tensor, nn

import qsim


class Museum(nn.Module):
    """A picture, and a second view of it that most visitors do not have."""

    def __init__(self) -> None:
        super().__init__()
        self.picture = nn.Conv2d(2, 4, 3, padding=1)
        self.view = nn.Conv2d(2, 4, 1)
        self.head = nn.Conv2d(8, 3, 1)

    def forward(self, picture: Tensor, second: Tensor) -> Tensor:
        x, y = F.relu(self.picture(picture)), self.view(second)
        return self.head(torch.cat([x, y], 1))


PICTURE = torch.randn(4, 2, 6, 6, generator=torch.Generator().manual_seed(1))
NOTHING = torch.full_like(PICTURE, torch.nan)


def museum(target: str = "onnxruntime", second: Tensor = NOTHING) -> qsim.QuantSim:
    """Calibrated, in vain for what the second view reaches."""
    torch.manual_seed(0)
    sim = qsim.QuantSim(Museum(), (PICTURE, PICTURE), qsim.int8(target=target))
    with pytest.raises(qsim.CalibrationError, match=r"input\[1\]"):  # which tells of tensors, not of what needs them
        sim.calibrate([(PICTURE, second)], progress=False)
    return sim


def test_a_branch_without_data_is_one_error_that_names_branch_and_concatenation():
    sim = museum()
    borders = sim.borders()
    assert [found.tensor for found in borders.missing] == ["input[1]", "view.output", "head.output"]
    with pytest.raises(qsim.NoEncodingError) as raised:
        borders.check()
    text = str(raised.value)
    assert "'input[1]': all 288 values that reached it are NaN or Inf" in text
    assert "'view.output'" in text
    assert "'view' (Conv) and 'cat' (Concat) need its scale" in text
    assert "sim.fallback(['view', 'cat'])" in text


def test_the_concatenation_falls_back_and_that_is_the_cure():
    torch.manual_seed(0)
    model = Forward(lambda m, a, b: torch.cat([m.a(a), b], 1), a=nn.Conv2d(2, 4, 1)).eval()
    sim = qsim.QuantSim(model, (PICTURE, PICTURE), qsim.int8())
    with pytest.raises(qsim.CalibrationError):
        sim.calibrate([(PICTURE, NOTHING)], progress=False)
    with pytest.raises(qsim.NoEncodingError, match=r"'input\[1\]': all 288 values that reached it are NaN or Inf; 'cat' \(Concat\) needs"):
        sim.borders().check()
    with pytest.raises(qsim.NoEncodingError):
        sim(PICTURE, PICTURE)
    sim.fallback("cat")
    sim.borders().check()
    assert "input[1]" not in sim.encodings()
    grid = sim.encodings()["a.output"]
    first = sim(PICTURE, PICTURE)[:, :4] / grid.scale
    assert (first - first.round()).abs().max() < 0.1  # the convolution before it runs in integers: its result is on the grid, in float16
    assert torch.equal(sim(PICTURE, PICTURE)[:, 4:], PICTURE.half().float())


@pytest.mark.parametrize("target", ["default", "onnxruntime", "tensorrt", "openvino", "coreml"])
def test_the_cure_cures_on_every_target(target):
    sim = museum(target)
    calibrated = set(sim.encodings())
    assert sim.borders().missing
    sim.fallback(sim.borders().cure)
    assert sim.borders().missing == []
    sim(PICTURE, PICTURE)
    assert set(sim.encodings()) == calibrated
    report = sim.calibrate([(PICTURE, PICTURE)], progress=False)  # the second view is there at last
    assert any("NaN" in problem for problem in report.problems)  # of the first time
    sim.fallback(None)
    assert sim.borders().missing == []
    assert set(sim.encodings()) == set(sim.quantizers())


class Seldom(nn.Module):
    """Looks at a part of the batch, which may be empty."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Conv2d(2, 4, 1), nn.Conv2d(2, 2, 1), nn.Conv2d(6, 3, 1)
        self.part = 4

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([self.a(x), self.b(x[: self.part]).sum((0, 2, 3), keepdim=True) + x], 1))


def test_a_branch_that_no_value_reached():
    torch.manual_seed(0)
    sim = qsim.QuantSim(Seldom().eval(), PICTURE, qsim.int8())
    sim.model.part = 0
    with pytest.raises(qsim.CalibrationError, match=r"b\.output"):
        sim.calibrate([PICTURE], progress=False)
    (missing,) = sim.borders().missing
    assert (missing.tensor, missing.operations) == ("b.output", ("b", "sum"))
    assert missing.reason == "no value reached it in calibration; 'b' (Conv) and 'sum' (ReduceSum) need its scale"
    assert missing.cure == "Calibrate with data that reach it, or let what needs it fall back: sim.fallback(['b', 'sum'])"


def test_nothing_calibrated_is_one_sentence():
    sim = qsim.QuantSim(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(1, 4), qsim.int8())
    with pytest.raises(qsim.CalibrationError, match="no batch"):
        sim.calibrate([], progress=False)
    expected = "QuantSim: no batch was calibrated, and 5 of 5 tensors need it for a scale. Call sim.calibrate(data)."
    with pytest.raises(qsim.NoEncodingError) as raised:
        sim.borders().check()
    assert str(raised.value) == expected
    sim.calibrate([torch.randn(8, 4)], progress=False)
    assert str(sim.borders()) == "all 5 tensors that need a scale have one"


def test_weights_without_a_finite_value():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    model[2].weight.data[1] = torch.inf
    sim = qsim.QuantSim(model, torch.randn(1, 4), qsim.int8())
    with pytest.raises(qsim.CalibrationError, match=r"2\.weight"):
        sim.calibrate([torch.randn(8, 4)], progress=False)
    reasons = {found.tensor: found.reason for found in sim.borders().missing}
    assert reasons["2.weight"] == "a channel or block of this weight has no finite value; '2' (Gemm) needs its scale"
    sim.fallback("2")
    sim.borders().check()


def test_what_stays_in_float_on_purpose_is_told_and_stops_nothing():
    torch.manual_seed(0)
    config = qsim.int8(target="onnxruntime").override("view", activation=None)
    sim = qsim.QuantSim(Museum(), (PICTURE, PICTURE), config)
    sim.calibrate([(PICTURE, PICTURE)], progress=False)
    sim.disable("picture.output")
    borders = sim.borders()
    borders.check()
    found = {each.tensor: each for each in borders.floats}
    assert set(found) == {"picture.output", "view"}
    assert found["picture.output"].reason.startswith("its quantizer is disabled, and 'picture' (Conv + Relu) and 'cat' (Concat)")
    assert found["view"].reason == "never planned: left in float by the config; 'cat' (Concat) reads it"
    sim.enable("picture.output")
    sim.fallback("cat")
    assert sim.borders().floats == []


def test_a_way_that_the_example_inputs_did_not_show():
    torch.manual_seed(0)
    m = Forward(lambda m, x: m.b(m.a(x).tanh() if len(x) > 1 else m.a(x)), a=nn.Linear(4, 4), b=nn.Linear(4, 2)).eval()
    sim = qsim.QuantSim(m, torch.randn(1, 4), qsim.int8())
    sim.calibrate([torch.randn(1, 4)], progress=False)
    assert sim.borders().floats == []
    sim(torch.randn(2, 4))
    (unseen,) = sim.borders().floats
    assert (unseen.tensor, unseen.reason.split(" ", 1)[0]) == ("the model", "tanh")
    assert "example inputs" in unseen.cure
