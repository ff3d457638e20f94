"""The summary tells what is quantized, what is not, and why."""

import dataclasses
import sys

import pytest
import torch
from models import ConvNet, Perceptron, seeded
from torch import nn

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


def calibrated(config: qsim.Config, x: torch.Tensor) -> qsim.QuantSim:
    sim = qsim.QuantSim(seeded(ConvNet), x, config)
    sim.calibrate([x], progress=False)
    return sim


def rounded_beyond(x: torch.Tensor, encoding: qsim.Encoding) -> float:
    """Share of values whose integer is outside of the grid."""
    shape = [1] * x.dim()
    if encoding.axis is not None:
        shape[encoding.axis] = -1
    integers = (x / encoding.scale.reshape(shape)).round() + encoding.zero_point.reshape(shape)
    return ((integers < encoding.quant_min) | (integers > encoding.quant_max)).double().mean().item()


def test_clipped_share_of_weights_is_exact():
    sim = calibrated(qsim.int4(), X)
    sim.set_method("mse")
    rows = {row.key: row for row in sim.summary().rows if row.role == "weight"}
    for key, row in rows.items():
        weight = sim.model.get_parameter(key).detach()
        assert row.clipped == rounded_beyond(weight, sim.encodings()[key]), key
    assert max(row.clipped for row in rows.values()) > 0
    assert all(quantizer.enabled for quantizer in sim.quantizers().values())
    assert all(parameter.grad is None for parameter in sim.parameters())


def test_clipped_share_of_weights_in_blocks_and_float8():
    x = torch.randn(16, 32)
    specs = [
        qsim.TensorSpec(bits=3, axis=1, block_size=8, method="mse"),
        qsim.TensorSpec(dtype="float8_e4m3fn", axis=0, method="percentile", percentile=90),
    ]
    for spec in specs:
        sim = qsim.QuantSim(torch.nn.Linear(32, 8).eval(), x, qsim.Config(weight=spec))
        sim.calibrate([x], progress=False)
        row = next(row for row in sim.summary().rows if row.role == "weight")
        encoding = sim.encodings()["weight"]
        weight = sim.model.weight.detach()
        scale, zero = encoding.scale, encoding.zero_point
        if spec.is_float:
            beyond = (weight / scale[:, None]).abs() > 464  # what is nearer to 480 than to the largest number, 448
            assert row.clipped == beyond.double().mean().item() > 0
        else:
            integers = (weight / scale.repeat_interleave(8, 1)).round() + zero.repeat_interleave(8, 1)
            assert row.clipped == ((integers < -4) | (integers > 3)).double().mean().item() > 0


@pytest.mark.parametrize("method", ["minmax", "tf_enhanced", "percentile"])
def test_clipped_share_of_activations_is_that_of_the_data(method):
    x = torch.randn(64, 1, 12, 12)
    sim = calibrated(dataclasses.replace(qsim.int8(), activation=qsim.TensorSpec(bits=4, method=method, percentile=97)), x)
    row = sim.summary().rows[0]
    assert row.clipped == pytest.approx(rounded_beyond(x, sim.encodings()["input"]), abs=0.002)
    assert (row.clipped == 0) == (method == "minmax")
    assert row.observed == (x.min().item(), x.max().item())


def test_clipped_share_of_activations_in_float8():
    x = torch.randn(64, 1, 12, 12)
    spec = qsim.TensorSpec(dtype="float8_e4m3fn", method="percentile", percentile=95)
    sim = calibrated(dataclasses.replace(qsim.int8(), activation=spec), x)
    beyond = (x / sim.encodings()["input"].scale).abs() > 464
    assert sim.summary().rows[0].clipped == pytest.approx(beyond.double().mean().item(), abs=0.005)
    assert sim.summary().rows[0].clipped > 0.02


def test_clipped_share_that_is_not_known_is_none():
    sim = qsim.QuantSim(seeded(ConvNet), X)
    assert {row.clipped for row in sim.summary().rows} == {None}
    assert {row.scale for row in sim.summary().rows} == {None}


def test_running_ranges_and_unscaled_formats():
    config = dataclasses.replace(qsim.int8(), activation=qsim.TensorSpec(method="ema"))
    rows = calibrated(config, X).summary().rows
    assert rows[0].clipped == 0
    assert rows[0].distribution is None
    sim = calibrated(qsim.fp16(), X * 1e5)
    row = sim.summary().rows[0]
    assert row.clipped == row.format_counts.overflows / X.numel() > 0
    assert (row.dtype, row.bits, row.scale, row.granularity) == ("float16", 16, None, "")


def test_numbers_for_programs():
    sim = calibrated(qsim.int8().override("fc", bits=4), X)
    rows = {row.key: row for row in sim.summary().rows}
    weight = sim.encodings()["fc.weight"]
    row = rows["fc.weight"]
    assert (row.role, row.dtype, row.bits, row.symmetric, row.granularity) == ("weight", "int4", 4, True, "per channel (axis 0)")
    assert row.scale == (weight.scale.min().item(), weight.scale.max().item())
    assert (row.low, row.high) == (weight.min.min().item(), weight.max.max().item())
    assert row.elements == 120


def test_problems_come_first_and_what_stays_in_float_is_grouped():
    x = X.clone()
    x[0, 0, 0, 0] = torch.inf
    sim = calibrated(qsim.int8().override("layer1.*", off=True).override("branch", bits=2, method="percentile", percentile=60), x)
    lines = str(sim.summary()).splitlines()
    assert lines[0].startswith(f"{len(sim.quantizers())} quantizers")
    assert any("'input': 1 NaN or Inf" in line for line in lines[:20])
    assert any("'branch.weight'" in line and "clipped" in line for line in lines[:20])
    grouped = [line for line in lines if "left in float by the config" in line]
    assert len(grouped) < len(sim.summary().left)
    assert all(entry.name in str(sim.summary()) for entry in sim.summary().left[:6])


def test_five_hundred_quantizers_that_are_not_calibrated_are_one_line():
    row = qsim.QuantSim(seeded(Perceptron), torch.randn(2, 6)).summary().rows[0]
    text = str(qsim.Summary([dataclasses.replace(row, key=f"layer.{i}.output") for i in range(500)], [], []))
    assert text.splitlines()[2] == "500 not calibrated"
    assert len(text.splitlines()) < 510
    assert max(map(len, text.splitlines())) < 160


def test_a_vector_that_is_multiplied_with():
    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vector = nn.Parameter(torch.tensor([1.0, -3.0, 0.5]))

        def forward(self, x):
            return torch.mv(x, self.vector)

    x = torch.randn(4, 3)
    sim = qsim.QuantSim(Scores().eval(), x)
    sim.calibrate([x], progress=False)
    (row,) = [row for row in sim.summary().rows if row.key == "vector"]
    assert row.channels.values["largest magnitude"].tolist() == [1.0, 3.0, 0.5]


@pytest.mark.parametrize(
    ("weight", "activation", "is_int32"), [(8, 8, True), (4, 8, True), (16, 8, False), (8, 16, False), (16, 16, False)]
)
def test_a_bias_beside_wide_operands_stays_in_float_and_leaves_the_weight_its_scale(weight, activation, is_int32):
    x = torch.randn(16, 512)
    config = qsim.Config(
        weight=qsim.TensorSpec(bits=weight, symmetric=True, axis=0, method="minmax"), activation=qsim.TensorSpec(bits=activation)
    )
    sim = qsim.QuantSim(nn.Linear(512, 8), x, config)
    report = sim.calibrate([x], progress=False)
    assert bool(sim.decisions.biases) == is_int32
    assert not report.problems
    assert is_int32 or "do not fit into int32" in sim.summary().left[0].reason
    widest = torch.maximum(
        sim.model.weight.detach().amax(1) / (2 ** (weight - 1) - 1), sim.model.weight.detach().amin(1) / -(2 ** (weight - 1))
    )
    torch.testing.assert_close(sim.encodings()["weight"].scale, widest)


def test_a_rule_of_the_target_is_not_told_as_the_configs():
    class Recurrent(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.layer, self.head = torch.nn.Embedding(9, 6), torch.nn.GRU(6, 4), torch.nn.Linear(4, 2)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.layer(self.table(ids))[0])

    ids, config = torch.arange(6)[:, None], qsim.int8(target="onnxruntime")
    summary = qsim.QuantSim(Recurrent(), ids, config).summary()
    assert {entry.reason for entry in summary.left if entry.name.startswith("layer") and "bias" not in entry.name} == {
        "target 'onnxruntime' computes GRU in float"
    }
    assert not [note for note in summary.notes if "by an override" in note]
    summary = qsim.QuantSim(Recurrent(), ids, config.override("head", off=True).override("table", weight={"signed": False})).summary()
    assert {entry.reason for entry in summary.left if entry.name == "head.weight"} == {"left in float by the config"}
    off = qsim.QuantSim(Recurrent(), ids, dataclasses.replace(config, weight=None, activation=None)).summary()
    assert {entry.reason for entry in off.left if entry.name == "layer.weight_ih_l0"} == {"left in float by the config"}
    changed = qsim.QuantSim(Recurrent(), ids, config.override("head", weight={"symmetric": False})).summary()
    assert [note for note in changed.notes if note.startswith("'head.weight' has symmetric=False by an override")]
