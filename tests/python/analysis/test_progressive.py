"""Progressive quantization and plans for integers: beside the metric with quantizers switched by hand, and brute force."""

import itertools
import math

import pytest
import torch
from html_reader import Reader
from models import ConvNet, Perceptron, seeded

import qsim
from qsim.analysis.deviation import Deviation
from qsim.analysis.progressive import progressive_page

X = torch.randn(8, 1, 12, 12, generator=torch.Generator().manual_seed(1))
ROWS = torch.linspace(-2, 2, 32 * 6).reshape(32, 6).sin()


@pytest.fixture(scope="module")
def sim():
    made = qsim.QuantSim(seeded(ConvNet), X, qsim.int8().override("layer1.0.conv2", bits=2).override("fc", bits=3))
    made.calibrate([X], progress=False)
    return made


def loss(sim, data):
    """Mean squared distance from the float model: lower is better."""
    expected = seeded(ConvNet)
    return sum((sim(x) - expected(x)).square().mean().item() for x in data)


def operations(sim):
    return {score.name: score.keys for score in sim.sensitivity([X], lambda *_: 0.0, groups="operation", progress=False).scores}


def with_on(sim, names, metric=loss):
    """The metric with the quantizers of these operations alone."""
    quantizers = sim.quantizers()
    on = {key for name, keys in operations(sim).items() if name in names for key in keys}
    try:
        for key, quantizer in quantizers.items():
            quantizer.enabled = key in on
        with torch.no_grad():
            return metric(sim, [X])
    finally:
        sim.enable("*")


def test_each_step_is_the_metric_with_what_joined(sim):
    found = sim.progressive([X], loss, "forward", higher_is_better=False, progress=False)
    names = list(operations(sim))
    assert [step.operation for step in found.steps] == names
    assert found.baseline == with_on(sim, [])
    for i, step in enumerate(found.steps):
        before = found.steps[i - 1].value if i else found.baseline
        assert step.value == with_on(sim, names[: i + 1])
        assert step.keys == operations(sim)[step.operation]
        assert (step.drop, step.lost) == (step.value - before, step.value - found.baseline)
    assert found.steps[-1].value == loss(sim, [X])
    assert (found.left, found.note) == ([], "")


def test_the_largest_drop_is_named(sim):
    found = sim.progressive([X], loss, "forward", higher_is_better=False, progress=False)
    assert found.breaks is max(found.steps, key=lambda step: step.drop)
    assert found.breaks.operation in ("layer1.0.conv2", "fc")
    (line,) = [line for line in str(found).splitlines() if "largest drop" in line]
    assert found.breaks.operation in line


def test_orders(sim):
    names = list(operations(sim))
    backward = sim.progressive([X], order="backward", progress=False)
    assert [step.operation for step in backward.steps] == names[::-1]
    alone = sim.sensitivity([X], groups="operation", progress=False)
    by_sensitivity = sim.progressive([X], progress=False)
    assert [step.operation for step in by_sensitivity.steps] == [score.name for score in alone.ranked()][::-1]
    assert by_sensitivity.steps[0].drop == math.inf  # from +Inf dB
    assert by_sensitivity.breaks is not by_sensitivity.steps[0]
    chosen = sim.progressive([X], order=["fc", names[0]], progress=False)
    assert [step.operation for step in chosen.steps] == ["fc", names[0]]
    assert chosen.left == [name for name in names[1:] if name != "fc"]
    with pytest.raises(ValueError, match="expected one of 'sensitivity'"):
        sim.progressive([X], order="random", progress=False)
    with pytest.raises(ValueError, match=r"no operation 'layer1.0.conv3' .* 'layer1.0.conv2'"):
        sim.progressive([X], order=["layer1.0.conv3"], progress=False)


def test_it_stops_at_what_may_be_lost(sim):
    whole = sim.progressive([X], loss, "forward", higher_is_better=False, progress=False)
    allowed = whole.steps[-1].lost / 2
    found = sim.progressive([X], loss, "forward", higher_is_better=False, max_drop=allowed, progress=False)
    assert found.steps == whole.steps[: len(found.steps)]
    assert found.steps[-1].lost > allowed
    assert all(step.lost <= allowed for step in found.steps[:-1])
    assert found.left == [step.operation for step in whole.steps[len(found.steps) - 1 :]]
    assert found.steps[-1].operation in found.note
    better = qsim.QuantSim(seeded(ConvNet), X, sim.config.with_plan(qsim.Plan(tuple(found.left), "int8")))
    better.calibrate([X], progress=False)
    assert loss(better, [X]) <= allowed
    with pytest.raises(ValueError, match="finite in float"):
        sim.progressive([X], max_drop=3.0, progress=False)


def test_a_metric_that_becomes_nan_is_where_it_breaks(sim):
    def broken(model, data):
        enabled = sum(quantizer.enabled for quantizer in sim.quantizers().values())
        return math.nan if enabled > 5 else 1.0 - 0.01 * enabled

    found = sim.progressive([X], broken, "forward", max_drop=0.5, progress=False)
    assert math.isnan(found.steps[-1].value)
    assert found.breaks is found.steps[-1]
    assert found.left[0] == found.steps[-1].operation


def test_it_stops_when_the_time_is_over(sim, monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr("qsim.analysis.progressive.time.monotonic", lambda: next(clock))
    found = sim.progressive([X], loss, "forward", higher_is_better=False, seconds=4, progress=False)
    assert len(found.steps) == 3
    assert found.left == list(operations(sim))[3:]
    assert "4 seconds is spent after 3 of" in found.note


def test_an_interrupted_measurement_goes_on(sim, tmp_path):
    expected = sim.progressive([X], loss, higher_is_better=False, progress=False)
    calls = []

    def interrupted(model, data):
        calls.append(1)
        if len(calls) in (3, 12):
            raise KeyboardInterrupt
        return loss(model, data)

    enabled = {key: quantizer.enabled for key, quantizer in sim.quantizers().items()}
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            sim.progressive([X], interrupted, higher_is_better=False, path=tmp_path / "scores", progress=False)
        assert {key: quantizer.enabled for key, quantizer in sim.quantizers().items()} == enabled
    found = sim.progressive([X], interrupted, higher_is_better=False, path=tmp_path / "scores", progress=False)
    assert found == expected
    everything = 2 + 2 * len(expected.steps)  # float, all, each alone, each joined
    assert len(calls) == everything + 2
    sim.progressive([X], interrupted, higher_is_better=False, path=tmp_path / "scores", progress=False)
    assert len(calls) == everything + 2


def test_what_it_is_called_with():
    sim = qsim.QuantSim(seeded(Perceptron), ROWS)
    with pytest.raises(qsim.NoEncodingError):
        sim.progressive([ROWS])
    sim.calibrate([ROWS], progress=False)
    for call in (sim.progressive, lambda data, **options: sim.float_plan(data, target=3.0, **options)):
        with pytest.raises(TypeError, match="used up after one pass"):
            call(iter([ROWS]), progress=False)
    sim.disable("fc1.weight")
    found = sim.progressive([ROWS], order="forward", progress=False)
    assert found.steps[1].keys == ("fc1.output",)


def test_the_page(sim, tmp_path):
    found = sim.progressive([X], order="forward", progress=False)
    found.save(tmp_path / "page.html")
    rows = [row for row in Reader((tmp_path / "page.html").read_text()).rows if row]
    assert len(rows) == len(found.steps) + 1
    for i, (row, step) in enumerate(zip(rows[1:], found.steps, strict=True), 1):
        assert row[0] == str(i)
        assert step.operation.replace(".", "") in row[1].replace(".", "")
        assert row[2] == f"{step.value:.6g}"
    empty = qsim.Progressive([], math.inf, True, ["a"], "no <time>")
    assert "no &lt;time&gt;" in progressive_page(empty).html()
    assert empty.breaks is None


# Plans.


def sqnr(sim, data):
    deviation = Deviation()
    for x in data:
        deviation.add(seeded(ConvNet)(x), sim(x))
    return deviation.sqnr


@pytest.mark.parametrize("target", [5.0, 14.0, 22.0, 30.0])
def test_a_plan_reaches_its_target_and_no_part_of_it_does(sim, target):
    plan = sim.float_plan([X], target=target, progress=False)
    names = list(operations(sim))
    assert plan.sqnr >= target
    assert plan.sqnr == pytest.approx(with_on(sim, set(names) - set(plan.keep), sqnr), rel=1e-5)  # BatchNorm is folded, and not
    assert plan.irreducible
    for size in range(len(plan.keep)):
        for part in itertools.combinations(plan.keep, size):
            assert with_on(sim, set(names) - set(part), sqnr) < target
    assert (plan.format, plan.target) == ("int8", "default")
    assert all(quantizer.enabled for quantizer in sim.quantizers().values())
    cured = qsim.QuantSim(seeded(ConvNet), X, sim.config.with_plan(plan))
    cured.calibrate([X], progress=False)
    assert sqnr(cured, [X]) == pytest.approx(plan.sqnr, rel=1e-5)


def test_a_plan_for_a_loss_with_a_sensitivity_of_before(sim):
    alone = sim.sensitivity([X], loss, higher_is_better=False, groups="operation", progress=False)
    worst = alone.ranked()[0]
    target = alone.quantized / 3
    plan = sim.float_plan([X], loss, target=target, higher_is_better=False, sensitivity=alone)
    assert plan.sqnr <= target < alone.quantized
    assert worst.name in plan.keep
    short = sim.float_plan([X], loss, target=target, higher_is_better=False, sensitivity=alone, probes=2)
    assert not short.irreducible
    assert short.probes == 2
    impossible = sim.float_plan([X], loss, target=-1.0, higher_is_better=False, sensitivity=alone)
    assert (impossible.keep, impossible.irreducible) == ((), False)
    assert "even with every operation" in impossible.note
    sim.disable("fc")
    try:
        with pytest.raises(ValueError, match="measure it anew"):
            sim.float_plan([X], loss, target=target, higher_is_better=False, sensitivity=alone)
    finally:
        sim.enable("fc")


def test_a_sensitivity_of_single_quantizers_is_refused(sim):
    alone = sim.sensitivity([X], progress=False)
    with pytest.raises(ValueError, match="groups='operation'"):
        sim.float_plan([X], target=3.0, sensitivity=alone)
    with pytest.raises(ValueError, match="and the opposite here"):
        sim.float_plan([X], target=3.0, higher_is_better=False, sensitivity=sim.sensitivity([X], groups="operation", progress=False))
