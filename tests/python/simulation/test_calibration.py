"""Calibration: what it reads, what it must not touch, and data that are not finite."""

import copy
import dataclasses
import random
import sys
import time

import pytest
import torch
from models import ConvNet, Perceptron, seeded
from same_ranges import ROWS, assert_same_ranges, ranges, simulated
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import qsim
from qsim.quantizers.observer import Counts


class Passing(nn.Module):
    """Rows do not mix, so that the clean elements of spoiled data are known at every quantizer."""

    def forward(self, x: Tensor) -> Tensor:
        return (x + 1.0) * 2.0


def test_calls_add_up_and_max_batches_stops():
    sim, expected = simulated(), simulated()
    for part in ROWS.split(8):
        assert sim.calibrate([part, ROWS * 100], max_batches=1, progress=False).batches == 1
    expected.calibrate(ROWS.split(8), progress=False)  # products of another number of rows may differ in a bit
    assert_same_ranges(sim, expected)
    assert sim.quantizers()["input"].counts == expected.quantizers()["input"].counts
    with pytest.raises(ValueError, match="max_batches=0"):
        sim.calibrate([ROWS], max_batches=0)


def test_ranges_do_not_depend_on_the_batches():
    sim, expected = simulated(), simulated()
    sim.calibrate([ROWS[i : i + 1] for i in torch.randperm(32)], progress=False)
    expected.calibrate([ROWS], progress=False)
    assert ranges(sim)["input"] == ranges(expected)["input"]
    assert sim.encodings()["input"] == expected.encodings()["input"]


def test_nothing_else_changes():
    class Counting(ConvNet):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm2d(1)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.last = x
            return super().forward(self.norm(x)) + torch.rand(1) * 0

    x = torch.randn(4, 1, 12, 12)
    sim = simulated(seeded(Counting), x)
    sim.train()
    sim.model.pool.eval()
    sim.disable("fc.output")
    state = {name: t.clone() for name, t in (*sim.model.named_parameters(), *sim.model.named_buffers())}
    flags = [module.training for module in sim.modules()]
    attributes = {name: set(vars(module)) for name, module in sim.model.named_modules()}
    torch.manual_seed(7)
    random.seed(7)
    expected = torch.rand(3), random.random()
    torch.manual_seed(7)
    random.seed(7)
    sim.calibrate(DataLoader(TensorDataset(x, torch.zeros(4)), batch_size=2, shuffle=True), progress=False)
    assert torch.equal(torch.rand(3), expected[0])
    assert random.random() == expected[1]
    assert [module.training for module in sim.modules()] == flags
    assert all(torch.equal(t, state[name]) for name, t in (*sim.model.named_parameters(), *sim.model.named_buffers()))
    assert {name: set(vars(module)) for name, module in sim.model.named_modules()} == attributes
    assert all(p.grad is None for p in sim.parameters())
    assert [key for key, quantizer in sim.quantizers().items() if not quantizer.enabled] == ["fc.output"]
    assert not any(quantizer.observing for quantizer in sim.quantizers().values())


def test_activations_flow_unquantized():
    sim = simulated(config=qsim.int4())
    seen = []
    sim.calibrate([ROWS], forward=lambda model, batch: seen.append(model(batch)), progress=False)
    sim.calibrate([ROWS], forward=lambda model, batch: seen.append(model(batch)), progress=False)
    with sim.in_float(), torch.no_grad():
        assert torch.equal(seen[0], sim(ROWS))
    assert torch.equal(seen[0], seen[1])


def test_calibration_inside_float_still_observes():
    sim = simulated()
    with sim.in_float():
        sim.calibrate([ROWS], progress=False)
    assert sim.quantizers()["input"].counts.elements == ROWS.numel()


SPOILS = {
    "one NaN": ([torch.nan], (1, 0, 0)),
    "one Inf": ([torch.inf], (0, 1, 0)),
    "both Inf": ([torch.inf, -torch.inf], (0, 1, 1)),
    "all": ([torch.nan, torch.nan, torch.inf, -torch.inf, -torch.inf], (2, 1, 2)),
}


@pytest.mark.parametrize("kind", SPOILS)
@pytest.mark.parametrize("position", [0, 1, 2])
def test_nonfinite_values_never_reach_a_range(kind, position):
    values, counts = SPOILS[kind]
    batches = [ROWS[:8], ROWS[8:16], ROWS[16:]]
    clean, spoiled = simulated(Passing()), simulated(Passing())
    rest = [batch.flatten() for batch in batches]
    rest[position] = rest[position][len(values) :]
    clean.calibrate([batch.reshape(-1, 1) for batch in rest], progress=False)
    broken = [batch.flatten().clone() for batch in batches]
    broken[position][: len(values)] = torch.tensor(values)
    report = spoiled.calibrate([batch.reshape(-1, 1) for batch in broken], progress=False)
    assert_same_ranges(clean, spoiled)
    assert report.counts == dict.fromkeys(["input", "add.output", "mul.output"], Counts(ROWS.numel(), *counts))
    assert len(report.problems) == 3
    for key in report.counts:
        assert f"'{key}'" in str(report)
    assert f"first in batch {position}" in str(report)


def test_huge_finite_values_are_ordinary():
    data = torch.tensor([[-3e38], [3e38], [1.0], [torch.nan]])

    class Identity(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 1.0

    sim = simulated(Identity(), ROWS)
    report = sim.calibrate([data, ROWS.reshape(-1, 1)], progress=False)
    assert ranges(sim)["input"] == (torch.tensor(-3e38), torch.tensor(3e38))
    assert report.counts["input"].nans == 1
    sim.set_method("minmax")
    assert sim.encodings()["input"].scale.isfinite()
    assert sim(data[:3]).isfinite().all()


def test_a_batch_of_nan_and_an_empty_one_change_counts_alone():
    clean, spoiled = simulated(), simulated()
    clean.calibrate([ROWS], progress=False)
    report = spoiled.calibrate([torch.full((4, 6), torch.nan), torch.empty(0, 6), ROWS], progress=False)
    assert_same_ranges(clean, spoiled)
    assert report.counts["input"] == Counts(24 + ROWS.numel(), 24)
    assert report.batches == 3
    assert "first in batch 0" in report.problems[0]
    assert "fc1.weight" not in " ".join(report.problems)


def test_only_nan_is_an_error_that_names_everything_and_loses_nothing():
    class Half(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x.exp(), (x * 0.5).log()  # one chain: a logarithm reads what is not rounded

    sim = simulated(Half(), ROWS.abs() + 1)
    negative = -ROWS.abs() - 1
    with pytest.raises(qsim.CalibrationError, match=r"(?s)'mul\.output' has no range.*192 NaN") as failure:
        sim.calibrate([negative], progress=False)
    assert "'exp.output'" not in str(failure.value)
    assert sim.quantizers()["exp.output"].encoding is not None
    assert sim.quantizers()["mul.output"].counts.nans == 192
    sim.calibrate([-negative], progress=False)  # goes on from there
    assert sim.quantizers()["mul.output"].counts == Counts(384, 192)
    sim(-negative)


def test_no_batch_is_an_error():
    with pytest.raises(qsim.CalibrationError, match="no batch"):
        simulated().calibrate([], progress=False)


def test_a_quantizer_that_no_batch_reaches_is_an_error_unless_it_is_off():
    class Sometimes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.exp() if len(x) == 32 else x.sin()

    sim = simulated(Sometimes(), ROWS)
    with pytest.raises(qsim.CalibrationError, match=r"'exp\.output' has no range: no batch reached it"):
        sim.calibrate([ROWS[:4]], progress=False)
    sim.disable("exp.output")
    sim.calibrate([ROWS[:4]], progress=False)


@pytest.mark.parametrize("config", [qsim.int8(), qsim.int4(), qsim.fp16()], ids=["int8", "int4", "fp16"])
def test_a_weight_that_is_not_finite_is_named(config):
    model = seeded(Perceptron)
    with torch.no_grad():
        model.fc2.weight[1, 3] = torch.nan
        model.fc2.weight[0, 0] = torch.inf
    sim = simulated(model, config=config.override("fc2", activation=None))  # its results are NaN
    report = sim.calibrate([ROWS], progress=False)
    assert report.counts["fc2.weight"] == Counts(48, 1, 1)
    assert any("'fc2.weight'" in problem for problem in report.problems)


def test_a_weight_channel_without_a_finite_value_is_an_error():
    model = seeded(Perceptron)
    with torch.no_grad():
        model.fc1.weight[2] = torch.nan
    with pytest.raises(qsim.CalibrationError, match=r"'fc1\.weight' has no range for 1 of 16 channels"):
        simulated(model).calibrate([ROWS], progress=False)


def test_nonfinite_policies():
    spoiled = ROWS.clone()
    spoiled[0, 0] = torch.inf
    config = qsim.int8()
    raising = simulated(Passing(), config=config.override("*", nonfinite="raise").override("input", nonfinite="raise"))
    with pytest.raises(qsim.CalibrationError, match=r"(?s)'input'.*'add\.output'"):
        raising.calibrate([spoiled], progress=False)
    assert raising.quantizers()["input"].counts.positive_infs == 1
    saturating = simulated(Passing(), config=config.override("*", nonfinite="saturate").override("input", nonfinite="saturate"))
    saturating.calibrate([spoiled], progress=False)
    assert ranges(saturating)["input"][1] == spoiled[spoiled.isfinite()].max()


def test_a_batch_that_raises_leaves_the_model_and_what_was_observed():
    sim = simulated()
    sim.train()
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        sim.calibrate([ROWS, torch.randn(3, 5)], progress=False)
    assert sim.training
    assert all(module.training for module in sim.model.modules())
    assert sim.quantizers()["fc2.output"].counts.elements == 32 * 3
    sim.set_method("minmax")
    sim(ROWS)


def test_a_first_batch_that_raises_leaves_no_shape_behind():
    config = dataclasses.replace(qsim.int8(), activation=qsim.TensorSpec(axis=-1, method="minmax"))
    sim = simulated(config=config)
    with pytest.raises(ValueError, match="batch 0"):
        sim.calibrate([torch.randn(3, 5)], progress=False)
    sim.calibrate([ROWS], progress=False)
    assert sim.quantizers()["input"].encoding.scale.shape == ROWS.shape[-1:]


def test_weights_that_are_computed_are_calibrated_from_what_was_seen():
    model = seeded(Perceptron)
    nn.utils.parametrizations.weight_norm(model.fc1)
    sim = simulated(model)
    sim.calibrate([ROWS[:16], ROWS[16:]], progress=False)
    key = next(key for key in sim.quantizers() if key.startswith("fc1") and key.endswith("weight"))
    assert torch.equal(sim.quantizers()[key].max, model.fc1.weight.amax(1).detach())
    sim.set_method("mse")


@pytest.mark.parametrize("installed", [True, False])
def test_progress_bar(installed, monkeypatch, capsys):
    if not installed:
        monkeypatch.setitem(sys.modules, "tqdm", None)
        monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    simulated().calibrate([ROWS] * 3)
    assert ("calibrate" in capsys.readouterr().err) == installed


class Slow(nn.Module):
    """Sleeps before an operation."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.2)
        return x + 1.0


def test_seconds_are_those_of_their_stage(monkeypatch):
    def slowly():
        time.sleep(0.1)
        yield ROWS

    sim = simulated(Slow())
    seconds = sim.calibrate(slowly(), progress=False).seconds
    assert seconds["data"] >= 0.1
    assert seconds["forward"] >= 0.2
    observe = qsim.Observer.forward
    monkeypatch.setattr(qsim.Observer, "forward", lambda observer, x: time.sleep(0.3) or observe(observer, x))
    seconds = simulated(nn.Sequential(nn.Sigmoid())).calibrate([ROWS], progress=False).seconds
    assert seconds["observing"] >= 0.6  # the input, the output


def test_memory_is_what_the_forward_raised_the_peak_to():
    taken = 256 << 20

    def forward(model, batch):
        torch.ones(taken, dtype=torch.uint8)
        model(batch)

    before = simulated().calibrate([ROWS], progress=False).memory["process"].peak
    memory = simulated().calibrate([ROWS], forward, progress=False).memory["process"]
    assert memory.peak >= before
    assert memory.raised <= memory.peak - before + (64 << 20)
    if before < 2 * taken:  # nothing else that ran in this process needed as much
        assert memory.peak >= taken


def test_report():
    sim = simulated()
    report = sim.calibrate([ROWS], progress=False)
    assert report.problems == []
    assert report.counts.keys() == sim.quantizers().keys()
    assert report.seconds.keys() == {"data", "forward", "observing", "search"}
    assert all(seconds >= 0 for seconds in report.seconds.values())
    assert report.seconds["observing"] > 0
    assert report.memory["process"].peak > 1 << 20
    assert report.memory["process"].raised >= 0
    assert f"peak memory of process {report.memory['process'].peak / 2**20:.0f} MiB" in str(report)
    assert "1 batches" in str(report)
    assert copy.deepcopy(report) == report
