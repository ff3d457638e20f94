"""Comparison with float: beside errors computed by hand, in whatever memory, and of models that do not make it easy."""

import copy
import dataclasses
import math
import types
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from models import ConvNet, Forward, Perceptron, seeded
from torch import nn

import qsim
from qsim.analysis.deviation import Deviation, float_tensors

X = torch.randn(8, 1, 12, 12, generator=torch.Generator().manual_seed(1))
ROWS = torch.linspace(-2, 2, 32 * 6).reshape(32, 6).sin()


def calibrated(model: nn.Module, x: torch.Tensor, config: qsim.Config | None = None) -> qsim.QuantSim:
    sim = qsim.QuantSim(model, x, config)
    sim.calibrate([x], progress=False)
    return sim


def ratio(reference: torch.Tensor, approximation: torch.Tensor) -> float:
    reference, approximation = reference.double(), approximation.double()
    return (10 * (reference.square().sum() / (reference - approximation).square().sum()).log10()).item()


def test_local_and_accumulated_errors_are_those_computed_by_hand():
    model = seeded(Perceptron)
    sim = calibrated(model, ROWS, qsim.Config(bias=False))
    q = sim.quantizers()
    comparison = sim.compare(ROWS)
    float_hidden = F.relu(F.linear(ROWS, model.fc1.weight, model.fc1.bias))
    float_output = F.linear(float_hidden, model.fc2.weight, model.fc2.bias)
    hidden = q["fc1.output"](F.relu(F.linear(q["input"](ROWS), q["fc1.weight"](model.fc1.weight), model.fc1.bias)))
    output = q["fc2.output"](F.linear(hidden, q["fc2.weight"](model.fc2.weight), model.fc2.bias))
    expected = {
        "input": (ROWS, q["input"](ROWS), q["input"](ROWS)),
        "fc1.weight": (model.fc1.weight, q["fc1.weight"](model.fc1.weight), q["fc1.weight"](model.fc1.weight)),
        "fc1.output": (float_hidden, q["fc1.output"](float_hidden), hidden),
        "fc2.weight": (model.fc2.weight, q["fc2.weight"](model.fc2.weight), q["fc2.weight"](model.fc2.weight)),
        "fc2.output": (float_output, q["fc2.output"](float_output), output),
    }
    assert [row.key for row in comparison.rows] == list(expected)
    for key, (reference, local, accumulated) in expected.items():
        row = comparison[key]
        assert row.local.sqnr == pytest.approx(ratio(reference, local), abs=1e-6), key
        assert row.accumulated.sqnr == pytest.approx(ratio(reference, accumulated), abs=1e-6), key
        assert row.local.max_error == pytest.approx((reference - local).abs().max().item(), rel=1e-5), key
        assert row.accumulated.max_error == pytest.approx((reference - accumulated).abs().max().item(), rel=1e-5), key
    assert comparison.output == comparison["fc2.output"].accumulated
    assert comparison["fc2.output"].accumulated.sqnr < comparison["fc2.output"].local.sqnr


@pytest.mark.parametrize("memory", [1, 20_000, 1 << 30])
def test_memory_decides_how_often_the_model_runs_and_nothing_else(memory, monkeypatch):
    sim = calibrated(seeded(ConvNet), X, qsim.int4())
    forwards, clones = [], []
    sim.model.fc.register_forward_hook(lambda *_: forwards.append(1))
    clone = torch.Tensor.clone
    monkeypatch.setattr("torch.Tensor.clone", lambda x, **options: clones.append((len(forwards), x.nbytes)) or clone(x, **options))
    comparison = sim.compare(X, memory=memory)
    monkeypatch.undo()
    passes = len(forwards)
    assert comparison == sim.compare(X)
    assert comparison.notes == []
    assert passes == {1: 2 * 12, 1 << 30: 2}.get(memory, passes)  # 12 tensors are no weights
    assert 2 <= passes <= 24
    largest = X.new_empty(8, 12, 10, 10).nbytes
    state = sum(t.nbytes for t in (*sim.state_dict().values(), sim(X)))  # copies of it are kept, and of what the model returns
    for n in range(0, passes, 2):
        assert sum(size for at, size in clones if at == n) <= state + max(memory, largest)


def test_nothing_changes():
    sim = calibrated(seeded(ConvNet), X)
    sim.train()
    sim.disable("branch.weight")
    before = copy.deepcopy(sim.state_dict())
    modes = [module.training for module in sim.modules()]
    drawn = torch.get_rng_state()
    sim.compare(X)
    assert all(torch.equal(value, before[name]) for name, value in sim.state_dict().items())
    assert [module.training for module in sim.modules()] == modes
    assert torch.equal(torch.get_rng_state(), drawn)
    assert [key for key, quantizer in sim.quantizers().items() if not quantizer.enabled] == ["branch.weight"]
    assert not any(q._forward_hooks or q._forward_pre_hooks for q in sim.quantizers().values())


def test_a_quantizer_that_is_off_has_no_error_of_its_own():
    sim = calibrated(seeded(Perceptron), ROWS)
    sim.disable("fc1.output")
    row = sim.compare(ROWS)["fc1.output"]
    assert row.local.sqnr == math.inf
    assert math.isfinite(row.accumulated.sqnr)


def test_in_float_everything_is_equal():
    sim = calibrated(seeded(ConvNet), X)
    sim.disable("*")
    comparison = sim.compare(X)
    assert {row.accumulated.sqnr for row in comparison.rows} == {math.inf}
    assert comparison.output.max_error == 0


def test_modules_that_run_repeatedly_count_each_call():
    model = Forward(lambda m, x: m.fc(m.fc(x).sin()), fc=nn.Linear(6, 6))
    sim = calibrated(seeded(lambda: model), ROWS)
    assert sim.compare(ROWS)["fc.weight"].local.elements == 36
    assert sum(row.accumulated.elements for row in sim.compare(ROWS).rows if row.role != "weight") == ROWS.numel() * 4


def test_statements_in_place_do_not_reach_what_is_stored():
    def forward(m, x):
        y = m.fc(x)
        z = y.sigmoid()
        y.mul_(3)
        return m.out(y) + z

    sim = calibrated(seeded(lambda: Forward(forward, fc=nn.Linear(6, 6), out=nn.Linear(6, 6))), ROWS)
    comparison = sim.compare(ROWS)
    assert all(row.accumulated.sqnr > 20 for row in comparison.rows), comparison


def test_another_path_is_told_and_not_compared():
    def forward(m, x):
        y = m.first(x)
        return m.high(y) if y.double().sum() == m.expected else y.tanh()

    layers = {name: nn.Linear(6, 6) for name in ("first", "high")}
    model = seeded(lambda: Forward(forward, **layers))
    model.expected = model.first(ROWS).double().sum().item()  # of the float model alone
    sim = calibrated(model, ROWS)
    comparison = sim.compare(ROWS)
    assert any("'high.output'" in note for note in comparison.notes)
    assert comparison["high.output"].accumulated.elements == 0
    assert math.isnan(comparison["high.output"].accumulated.sqnr)
    assert comparison.worst("accumulated")[0].key == "high.output"
    assert "high.output" in str(comparison)


def test_nan_and_inf_are_left_out_and_counted():
    sim = calibrated(seeded(Perceptron), ROWS)
    spoiled = ROWS.clone()
    spoiled[0, 0], spoiled[1, 1] = torch.nan, torch.inf
    comparison = sim.compare(spoiled)
    assert comparison["input"].local.nonfinite == 2
    assert comparison["fc1.output"].accumulated.nonfinite >= 16
    assert math.isfinite(comparison["fc2.output"].accumulated.sqnr)


def test_before_calibration_it_says_what_to_do():
    with pytest.raises(qsim.NoEncodingError, match=r"sim\.calibrate"):
        qsim.QuantSim(seeded(Perceptron), ROWS).compare(ROWS)


def test_errors_of_arguments():
    comparison = calibrated(seeded(Perceptron), ROWS).compare((ROWS, "target"))
    with pytest.raises(KeyError, match="no quantizer 'fc'"):
        comparison["fc"]
    with pytest.raises(ValueError, match="by='max'"):
        comparison.worst("max")


def test_printing_begins_with_the_worst():
    comparison = calibrated(seeded(ConvNet), X, qsim.int8().override("branch", bits=2)).compare(X)
    lines = str(comparison).splitlines()
    assert "SQNR of the output" in lines[0]
    assert "branch" in lines[3]
    assert [row.local.sqnr for row in comparison.worst()] == sorted(row.local.sqnr for row in comparison.rows)


@given(st.lists(st.tuples(st.floats(width=32), st.floats(width=32)), max_size=30), st.integers(0, 30))
def test_deviation_is_that_of_all_pairs(pairs, cut):
    x, y = torch.tensor(pairs, dtype=torch.float32).reshape(-1, 2).unbind(1)
    deviation = Deviation()
    deviation.add(x[:cut], y[:cut])
    deviation.add(x[cut:], y[cut:])
    compared = [(a, b) for a, b in zip(x.tolist(), y.tolist(), strict=True) if math.isfinite(a)]
    finite = [(a, b) for a, b in compared if math.isfinite(b)]
    signal, noise = math.fsum(a * a for a, _ in finite), math.fsum((a - b) ** 2 for a, b in finite)
    counts = (deviation.elements, deviation.nonfinite, deviation.broken)
    assert counts == (len(pairs), len(pairs) - len(finite), len(compared) - len(finite))
    if not compared:
        assert math.isnan(deviation.sqnr)
        assert math.isnan(deviation.max_error)
        return
    if len(compared) > len(finite):
        assert (deviation.sqnr, deviation.max_error) == (-math.inf, math.inf)
        return
    assert deviation.max_error == max(abs(a - b) for a, b in finite)
    if noise == 0:
        assert deviation.sqnr == math.inf
    elif signal == 0:
        assert deviation.sqnr == -math.inf
    else:
        assert deviation.sqnr == pytest.approx(10 * math.log10(signal / noise), abs=1e-9)


def test_tensors_larger_than_a_chunk_and_strided():
    x = torch.randn(1100, 1000).t()
    y = x + 0.01 * torch.randn(1000, 1100)
    deviation = Deviation()
    deviation.add(x, y)
    assert deviation.sqnr == pytest.approx(ratio(x, y), abs=1e-9)
    assert deviation.elements == x.numel()


def test_only_float_tensors_of_outputs_count():
    assert float_tensors({"a": (torch.ones(2), [torch.ones(2, dtype=torch.int64), None, 3.0])})[0].equal(torch.ones(2))
    assert len(float_tensors({"a": (torch.ones(2), [torch.ones(2, dtype=torch.int64), None, 3.0])})) == 1


@dataclasses.dataclass
class Result:
    logits: torch.Tensor


class Named(OrderedDict):
    """As Hugging Face's outputs: each entry is an attribute too."""

    def __init__(self, y) -> None:
        super().__init__(y=y)
        self.y = y


def test_a_cache_beside_results_is_none():
    cache = types.SimpleNamespace(keys=[torch.ones(2)])
    assert len(float_tensors((torch.zeros(3), {"cache": cache}))) == 1
    assert len(float_tensors({"cache": cache})) == 1


@pytest.mark.parametrize("wrap", [Result, Named, lambda y: types.SimpleNamespace(y=y), lambda y: {"all": (Result(y), None)}])
def test_results_are_found_in_whatever_holds_them(wrap):
    torch.manual_seed(0)
    layer = nn.Linear(6, 3)
    assert len(float_tensors(wrap(ROWS))) == 1
    sim, plain = (calibrated(Forward(forward, fc=layer).eval(), ROWS) for forward in (lambda m, x: wrap(m.fc(x)), lambda m, x: m.fc(x)))
    assert sim.compare(ROWS).output.sqnr == plain.compare(ROWS).output.sqnr > 30
    assert sim.sensitivity([ROWS], progress=False).quantized == plain.sensitivity([ROWS], progress=False).quantized


@pytest.mark.parametrize(
    ("forward", "factor", "says"),
    [
        (lambda m, x: m.fc(x) * 0.0, 1.0, "the float model returns zeros alone (a last layer that was never trained?) for this batch"),
        (lambda m, x: m.fc(x).argmax(-1), 1.0, "nothing of what the model returns (Tensor) was compared: it has no floating-point tensors"),
        (lambda m, x: m.fc(x).detach().numpy(), 1.0, "nothing of what the model returns (ndarray) was compared"),
        (lambda m, x: m.fc(x), math.nan, "nothing of what the model returns was compared: it is NaN or Inf throughout"),
    ],
    ids=["zeros", "integers", "array", "nan"],
)
def test_an_output_that_tells_nothing_is_told_of(forward, factor, says):
    sim = calibrated(Forward(forward, fc=nn.Linear(6, 3)).eval(), ROWS)
    comparison = sim.compare(ROWS * factor)
    assert any(note.startswith(says) for note in comparison.notes)
    assert f"note: {says}" in str(comparison)


@pytest.mark.parametrize("forward", [lambda m, x: m.fc(x) * 0.0, lambda m, x: m.fc(x).argmax(-1)], ids=["zeros", "integers"])
def test_no_sensitivity_of_an_output_that_tells_nothing(forward):
    sim = calibrated(Forward(forward, fc=nn.Linear(6, 3)).eval(), ROWS)
    with pytest.raises(ValueError, match=r"give weights that were trained, or a metric|cannot be compared"):
        sim.sensitivity([ROWS], progress=False)
