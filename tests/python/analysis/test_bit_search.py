"""Bits under a budget: beside brute force, and that the config that is found gives what was found."""

import itertools
import json
import math
from random import Random

import pytest
import torch
import torch.nn.functional as F
from html_reader import Reader
from models import Branches, ConvNet, Forward, Perceptron, ResidualBlock, seeded
from torch import nn

import qsim
from qsim.analysis.bit_choices import choices_of, config_with, trial
from qsim.analysis.bit_search_report import bit_search_page, dominates
from qsim.config.profile import PROFILES

ROWS = [torch.linspace(-2, 2, 32 * 6).reshape(32, 6).mul(17 + i).sin() for i in range(2)]
IMAGES = [torch.randn(8, 1, 12, 12, generator=torch.Generator().manual_seed(i)) for i in range(2)]


def calibrated(model, batches, config=None):
    sim = qsim.QuantSim(model, batches[0], qsim.int4() if config is None else config)
    sim.calibrate(batches, progress=False)
    return sim


def distance(sim, batches):
    """Mean squared error over mean square, of a simulation beside its float model."""
    found = [(sim(x), x) for x in batches]
    with sim.in_float():
        pairs = [(y, sim(x)) for y, x in found]
    return sum((y - e).double().square().sum().item() for y, e in pairs) / sum(e.double().square().sum().item() for _, e in pairs)


def tied():
    table = nn.Embedding(7, 6)
    return Forward(lambda s, x: F.linear(F.relu(s.mix(s.table(x))), s.table.weight), table=table, mix=nn.Linear(6, 6))


def two_inputs():
    return Forward(lambda s, x, y: s.head(torch.cat([s.left(x), y], 1)), left=nn.Linear(6, 6), head=nn.Linear(12, 3))


def attention():
    return nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)


MODELS = {
    "convolutions": (ConvNet, IMAGES),
    "perceptron": (Perceptron, ROWS),
    "branches": (Branches, [torch.randn(2, 2, 6, 6)]),
    "residual": (lambda: nn.Sequential(ResidualBlock(4), ResidualBlock(4)), [torch.randn(2, 4, 6, 6)]),
    "tied": (tied, [torch.randint(7, (3, 5))]),
    "two inputs": (two_inputs, [(torch.randn(4, 6), torch.randn(4, 6))]),
    "attention": (attention, [torch.randn(2, 5, 8)]),
}


@pytest.mark.parametrize("target", PROFILES)
@pytest.mark.parametrize("name", MODELS)
def test_configs_give_each_quantizer_the_bits_that_were_chosen(name, target):
    make, data = MODELS[name]
    model, random = seeded(make), Random(name + target)
    sim = calibrated(model, data, qsim.int8(target=target).override(position="first", bits=5))
    choices = choices_of(sim, (3, 8, "float"))
    assert sorted(key for choice in choices for key in choice.keys) == sorted(sim.quantizers())
    for _ in range(2):
        bits = [random.choice(choice.candidates) for choice in choices]
        config = config_with(sim, choices, bits)
        assigned = {key: chosen for choice, chosen in zip(choices, bits, strict=True) for key in choice.keys}
        tried, made = trial(sim, config, assigned), calibrated(model, data, config)
        expected = {key: chosen for key, chosen in assigned.items() if chosen != "float"}
        found = {key: quantizer.spec.bits for key, quantizer in made.quantizers().items()}
        assert expected.items() >= found.items()
        # readers of one tensor with the same bits now share a quantizer, and what only readers in float are left of needs none
        assert PROFILES[target].kernels or all(".input[" in key for key in expected.keys() - found.keys())
        assert not [note for note in made.notes if "matches no operation" in note]
        for key, encoding in made.encodings().items():
            assert torch.equal(tried.encodings()[key].scale, encoding.scale)
            assert torch.equal(tried.encodings()[key].zero_point, encoding.zero_point)


@pytest.mark.parametrize(("make", "data", "target"), [(ConvNet, IMAGES, "tensorrt"), (Perceptron, ROWS, "default")])
def test_what_was_measured_is_what_a_new_simulation_gives(make, data, target):
    sim = calibrated(seeded(make), data, qsim.int8(target=target))
    search = sim.search_bits(data, budget=qsim.Budget(tensors=0.4), candidates=(3, 8, "float"), probes=30, progress=False)
    assert search.best.bits.keys() == sim.quantizers().keys()
    assert len({*search.best.bits.values()}) > 1
    for point in search.front:
        assert point.measured == pytest.approx(distance(calibrated(seeded(make), data, point.config), data), rel=1e-6, abs=1e-12)


def test_nothing_within_the_budget_is_better_on_a_small_network():
    model = seeded(Perceptron)
    sim = calibrated(model, ROWS)
    keys = list(sim.quantizers())
    budget = qsim.Budget(tensors=0.6, bit_operations=0.03)
    search = sim.search_bits(ROWS, budget=budget, candidates=(4, 8), progress=False)
    losses = {}
    for bits in itertools.product((4, 8), repeat=len(keys)):
        of = dict(zip(keys, bits, strict=True))
        operations = 96 * of["input"] * of["fc1.weight"] + 48 * of["fc1.output"] * of["fc2.weight"]
        if operations <= 0.03 * 1024 * 144 and bits.count(8) <= 3:
            config = qsim.int4()
            for name in ("input", "fc1", "fc2"):
                roles = {"weight": f"{name}.weight", "activation": name if name == "input" else f"{name}.output"}
                config = config.override(name, **{role: {"bits": of[key]} for role, key in roles.items() if key in of})
            losses[bits] = distance(calibrated(model, ROWS, config), ROWS)
    assert len(losses) > 8
    assert search.best.loss == pytest.approx(min(losses.values()), rel=1e-6)


def test_budgets_are_kept_and_the_front_is_one():
    sim = calibrated(seeded(ConvNet), IMAGES)
    budget = qsim.Budget(size=0.4, bit_operations=0.05)
    search = sim.search_bits(IMAGES, budget=budget, probes=100, progress=False)
    assert search.best.costs.size <= 0.4
    assert search.best.costs.bit_operations <= 0.05
    assert search.best in search.front
    assert [point.costs.size for point in search.front] == sorted(point.costs.size for point in search.front)
    others = [point for point in search.front if point is not search.best]
    assert not any(dominates(one, other, budget) for one in search.front for other in others)
    assert search.front[-1].loss == 0.0  # everything in float
    assert search.config is search.best.config


def test_with_a_metric_and_without_probes():
    sim = calibrated(seeded(ConvNet), IMAGES)
    calls = []

    def loss(network, data):
        calls.append(1)
        return 3.0 + distance(network, data)

    options = {"budget": qsim.Budget(tensors=0.2), "candidates": (4, 8), "higher_is_better": False, "progress": False}
    search = sim.search_bits(IMAGES, loss, probes=60, **options)
    assert search.baseline == 3.0
    assert search.best.measured == pytest.approx(3.0 + distance(calibrated(seeded(ConvNet), IMAGES, search.config), IMAGES))
    assert search.best.loss == search.best.measured - 3.0
    assert len(calls) <= 60 + 12
    calls.clear()
    sim.search_bits(IMAGES, loss, probes=0, **options)
    assert 0 < len(calls) <= 10  # float, and the points


def test_classes_are_compared_by_their_divergence():
    sim = calibrated(seeded(ConvNet), IMAGES)
    search = sim.search_bits(IMAGES, budget=qsim.Budget(tensors=0.2), candidates=(4, 8), classes=1, probes=40, progress=False)
    made = calibrated(seeded(ConvNet), IMAGES, search.config)
    x = torch.cat(IMAGES)
    with torch.no_grad():
        divergence = F.kl_div(made(x).log_softmax(1), seeded(ConvNet)(x).log_softmax(1), reduction="batchmean", log_target=True)
    assert search.best.measured == pytest.approx(divergence.item(), rel=1e-3)


def test_tensors_that_share_a_scale_stay_in_integers():
    sim = calibrated(seeded(Branches), [torch.randn(2, 2, 6, 6)], qsim.int8(target="coreml"))
    (shared,) = [choice for choice in choices_of(sim, (4, "float")) if choice.name == "cat.input"]
    assert shared.candidates == (4,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"candidates": (4, 4)}, "expected two or more different"),
        ({"candidates": (4, 8, 8)}, "some of them twice"),
        ({"candidates": (1, 8)}, "of 2 to 16"),
        ({"candidates": (4, "fp8")}, "of 2 to 16 and 'float'"),
        ({"candidates": ("float", 4), "budget": qsim.Budget(size=0.01)}, r"size=0\.01.*with 4 bits everywhere the model costs size=0\.\d+"),
        ({"metric": lambda *_: math.nan}, "the metric is nan in float"),
        ({"metric": lambda *_: 0.0, "classes": 1}, "got a metric and classes"),
        ({"probes": -1}, "got probes=-1"),
    ],
)
def test_errors_say_what_is_wrong(options, message):
    sim = calibrated(seeded(Perceptron), ROWS)
    with pytest.raises(ValueError, match=message):
        sim.search_bits(ROWS, **{"budget": qsim.Budget(tensors=0.5), "progress": False, **options})


def test_a_batch_that_is_not_finite_in_float_is_an_error_that_tells_which():
    sim = calibrated(seeded(Perceptron), ROWS)
    with pytest.raises(ValueError, match="batch 1 gives NaN or Inf in float"):
        sim.search_bits([ROWS[0], ROWS[1] / 0], budget=qsim.Budget(tensors=0.5), progress=False)


def test_what_no_config_says_is_refused():
    budget = qsim.Budget(tensors=0.5)
    sim = calibrated(seeded(Perceptron), ROWS)
    with pytest.raises(TypeError, match="used up after one pass"):
        sim.search_bits(iter(ROWS), budget=budget)
    with pytest.raises(TypeError, match=r"expected a qsim\.Budget"):
        sim.search_bits(ROWS, budget=0.5)
    sim.disable("fc2.weight")
    with pytest.raises(ValueError, match=r"'fc2\.weight' is switched off"):
        sim.search_bits(ROWS, budget=budget)
    sim.enable("*")
    sim.fallback("fc1", to="fp16")
    with pytest.raises(ValueError, match="fall back to float formats"):
        sim.search_bits(ROWS, budget=budget)
    with pytest.raises(ValueError, match="has float16"):
        calibrated(seeded(Perceptron), ROWS, qsim.fp16()).search_bits(ROWS, budget=budget)
    with pytest.raises(qsim.NoEncodingError):
        qsim.QuantSim(seeded(Perceptron), ROWS[0]).search_bits(ROWS, budget=budget)


def test_sizes_that_depend_on_values_leave_bit_operations_unknown():
    class Selecting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x):
            chosen = x[:, 0] > 0
            return self.last(self.first(x)[chosen])

    rows = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    rows[:, 0] = rows[:, 0].sign()  # no value that rounds to 0
    sim = qsim.QuantSim(Selecting(), rows)
    sim.calibrate([rows], progress=False)
    search = sim.search_bits([rows], budget=qsim.Budget(size=0.5), progress=False)
    assert search.best.costs.bit_operations is None
    assert "depends on values" in str(search)
    with pytest.raises(ValueError, match=r"bit operations of the model are not known: .*depends on values"):
        sim.search_bits([rows], budget=qsim.Budget(bit_operations=0.1), progress=False)


def test_a_model_that_cannot_be_traced_has_no_bit_operations():
    def forward(self, x):
        return self.fc2(self.fc1(x) if x.sum() > 1e9 else F.relu(self.fc1(x)))

    model = seeded(lambda: Forward(forward, fc1=nn.Linear(6, 8), fc2=nn.Linear(8, 2)))
    sim = calibrated(model, ROWS)
    search = sim.search_bits(ROWS, budget=qsim.Budget(tensors=0.5), candidates=(4, 8), progress=False)
    assert search.best.costs.bit_operations is None
    assert "bit operations are not known: QuantSim: torch.export cannot trace" in str(search)
    with pytest.raises(ValueError, match="bit operations of the model are not known"):
        sim.search_bits(ROWS, budget=qsim.Budget(bit_operations=0.1), progress=False)


def test_print_and_page_show_the_points_and_the_bits(tmp_path):
    sim = calibrated(seeded(ConvNet), IMAGES)
    search = sim.search_bits(IMAGES, budget=qsim.Budget(tensors=0.2), candidates=(4, 8), probes=0, progress=False)
    text = str(search)
    assert text.count("best within the budget") == 1
    for operation in {place for place, _ in search.best.places.values()}:
        assert operation in text
    search.save(tmp_path / "bits.html")
    document = (tmp_path / "bits.html").read_text()
    assert document == bit_search_page(search).html()
    (chart,) = (json.loads(a["data-chart"]) for tag, a in Reader(document).tags if "data-chart" in a)
    assert chart["along"] == pytest.approx([point.costs.tensors for point in search.front], rel=1e-4)
    assert chart["picked"] == search.front.index(search.best)
    rows = [row[0] for row in Reader(document).rows]
    for key in sim.quantizers():
        assert any(row.startswith(key) for row in rows), key


def test_gates_come_and_go_with_the_bits_of_their_activations():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.SiLU(), nn.Conv2d(8, 8, 3), nn.Hardswish(), nn.Flatten(), nn.Linear(128, 4)).eval()
    data = [torch.randn(8, 3, 8, 8) for _ in range(2)]
    for config in (qsim.int4(target="onnxruntime"), qsim.int8(target="onnxruntime")):
        sim = qsim.QuantSim(model, data[0], config)
        sim.calibrate(data, progress=False)
        search = sim.search_bits(data, budget=qsim.Budget(tensors=0.6), candidates=(4, 8), probes=64, progress=False)
        assert not any(key.endswith(".gate") for key in search.best.bits)
        chosen = qsim.QuantSim(model, data[0], search.config)
        assert {key: q.spec.bits for key, q in chosen.quantizers().items() if not key.endswith(".gate")} == search.best.bits


@pytest.mark.parametrize(("options", "unit"), [({}, "MSE over mean square"), ({"classes": 1}, "nats")])
def test_tables_have_no_empty_column_and_units(options, unit):
    sim = calibrated(seeded(Perceptron), ROWS)
    search = sim.search_bits(ROWS, budget=qsim.Budget(tensors=0.5), candidates=(4, 8), probes=0, progress=False, **options)
    assert "latency" not in str(search)
    assert f"distance from float ({unit})" in str(search)
    assert f"measured ({unit})" in search.page().html()
