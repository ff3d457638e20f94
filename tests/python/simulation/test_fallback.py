"""Selective fallback: what computes in floats, what stays on grids, what is kept. Oracle: the model written out by hand."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from models import Branches, Calls, ConvNet, seeded
from saved import through_a_file
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import qsim

HALF = {"float16": torch.float16, "bfloat16": torch.bfloat16}


X = torch.randn(5, 2, 6, 6, generator=torch.Generator().manual_seed(1))


def calibrated(model: nn.Module | None = None, config: qsim.Config | None = None, x: Tensor = X) -> qsim.QuantSim:
    sim = qsim.QuantSim(model or seeded(Branches), x, config or qsim.int8())
    sim.calibrate([x], progress=False)
    return sim


class ByHand:
    """The pieces of `Branches` as they compute: with a scale on a grid, or with everything rounded to a 16-bit format."""

    def __init__(self, sim: qsim.QuantSim, format: str = "float16") -> None:
        self.sim, self.encodings, self.dtype = sim, sim.encodings(), HALF.get(format)

    def grid(self, x: Tensor, key: str) -> Tensor:
        e = self.encodings[key]
        return qsim.reference.fake_quantize(x, e.scale, e.zero_point, e.quant_min, e.quant_max, axis=e.axis)

    def half(self, x: Tensor) -> Tensor:
        return x if self.dtype is None else x.to(self.dtype).float()

    def conv(self, x: Tensor, name: str, falls: bool, input: str) -> Tensor:
        module = self.sim.model.get_submodule(name)
        if falls:
            weight, bias = self.half(module.weight), self.half(module.bias)
            return self.half(F.conv2d(self.half(x), weight, bias, padding=module.padding))
        return F.conv2d(x, self.grid(module.weight, f"{name}.weight"), _bias(self, name, input), padding=module.padding)


@pytest.mark.parametrize("format", ["float16", "bfloat16", "float32"])
def test_an_operation_in_the_middle(format):
    sim = calibrated()
    sim.fallback("left", format)
    by = ByHand(sim, format)
    x = by.grid(F.relu(by.conv(by.grid(X, "input"), "stem", False, "input")), "stem.output")
    left = by.grid(F.relu(by.conv(x, "left", True, "")), "left.output")  # read by the addition, in integers
    right = by.grid(by.conv(x, "right", False, "stem.output"), "right.output")
    y = by.grid(torch.cat([by.grid(left + right, "add.output"), x], 1), "cat.output")
    torch.testing.assert_close(sim(X), by.grid(by.conv(y, "head", False, "cat.output"), "head.output"), rtol=0, atol=0)


def test_a_region_and_the_input_of_the_model():
    sim = calibrated()
    report = sim.fallback(["stem", "left", "add"])
    by = ByHand(sim)
    stem = F.relu(by.conv(X, "stem", True, ""))  # the input is not quantized: it is rounded by who reads it
    x = by.grid(stem, "stem.output")  # read by `right` and `cat`, in integers, so for all
    left = F.relu(by.conv(x, "left", True, ""))  # read by the addition alone
    right = by.grid(by.conv(x, "right", False, "stem.output"), "right.output")
    total = by.grid(by.half(left + by.half(right)), "add.output")
    y = by.grid(torch.cat([total, x], 1), "cat.output")
    torch.testing.assert_close(sim(X), by.grid(by.conv(y, "head", False, "cat.output"), "head.output"), rtol=0, atol=0)
    assert report.released == ["input", "stem.weight", "left.weight", "left.output"]
    assert report.borders == ["stem.output", "right.output", "add.output"]


def test_the_last_operation_and_a_weight_that_two_operations_share():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(F.linear(x, self.table).sigmoid(), self.table)

    x = torch.randn(8, 4)
    sim = calibrated(Tied(), qsim.int8(), x)
    assert list(sim.decisions.operations) == ["linear", "linear_2"]
    report = sim.fallback("linear_2")
    by = ByHand(sim)
    hidden = by.grid(F.linear(by.grid(x, "input"), by.grid(sim.model.table, "table")).sigmoid(), "linear.output")
    expected = by.half(F.linear(by.half(hidden), by.half(sim.model.table)))
    torch.testing.assert_close(sim(x), expected, rtol=0, atol=0)
    assert report.released == ["linear_2.output"]  # the table's grid is that of the first layer


def test_a_concatenation_with_one_scale_on_a_target_that_quantizes_operands():
    sim = calibrated(config=qsim.int8(target="tensorrt"))
    report = sim.fallback("cat")
    by = ByHand(sim)
    pieces = {name: sim.model.get_submodule(name) for name in ("stem", "left", "right", "head")}

    def conv(x: Tensor, name: str) -> Tensor:  # biases in float, results too
        return F.conv2d(x, by.grid(pieces[name].weight, f"{name}.weight"), pieces[name].bias, padding=pieces[name].padding)

    x = F.relu(conv(by.grid(X, "input"), "stem"))
    read = by.grid(x, "cat.input")
    y = by.grid(F.relu(conv(read, "left")), "add.input[0]") + conv(read, "right")
    joined = by.half(torch.cat([by.half(y), by.half(x)], 1))  # no longer quantized before, but after it
    torch.testing.assert_close(sim(X), conv(by.grid(joined, "cat.input"), "head"), rtol=0, atol=0)
    assert (report.released, report.borders) == ([], ["cat.input"])
    assert sim.fallback(["cat", "left", "right", "head"]).released == ["cat.input", "left.weight", "right.weight", "head.weight"]


def test_everything_in_float32_is_the_float_model():
    sim = calibrated(seeded(ConvNet), x=torch.randn(4, 1, 12, 12))
    x = torch.randn(4, 1, 12, 12)
    assert sim.fallback("*", "float32").borders == []
    with sim.in_float():
        expected = sim(x)
    assert torch.equal(sim(x), expected)


class Written(nn.Module):
    """Results that are read by other names: of a function that no mode sees under Dynamo, and of one that works in place."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = F.hardswish(self.a(x))
        z = self.b(y)
        z.mul_(y)
        return self.c(z)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 6, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


@pytest.mark.parametrize(
    ("model", "shape"),
    [(Written, (64, 4)), (Recurrent, (16, 5, 4)), (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (16, 5, 8))],
)
def test_models_of_other_kinds(model, shape):
    x = torch.randn(shape)
    sim = calibrated(model().eval(), x=x)
    quantized = sim(x)
    with sim.in_float():
        expected = sim(x)
    sim.fallback("*", "float32")
    torch.testing.assert_close(sim(x), expected, rtol=1e-5, atol=1e-6)  # a transformer runs as one function in float
    sim.fallback("*")
    half = sim(x)
    assert 0 < (half - expected).square().mean() < (quantized - expected).square().mean() / 16
    sim.train()
    sim(x).square().sum().backward()
    assert all(p.grad.isfinite().all() for p in sim.model.parameters())


def test_what_is_quantized_where_it_is_read_is_rounded_before():
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    sim = calibrated(Written().eval(), x=x)
    report = sim.fallback("a")
    by, model = ByHand(sim), sim.model
    y = by.half(F.hardswish(by.half(F.linear(by.half(x), by.half(model.a.weight), by.half(model.a.bias)))))
    y = by.grid(y, "a.output")
    z = by.grid(F.linear(y, by.grid(model.b.weight, "b.weight"), _bias(by, "b", "a.output")), "b.output")
    z = by.grid(z * y, "mul.output")
    torch.testing.assert_close(sim(x), by.grid(F.linear(z, by.grid(model.c.weight, "c.weight"), _bias(by, "c", "mul.output")), "c.output"))
    assert "hardswish" in report.notes[0]


def _bias(by: ByHand, name: str, input: str) -> Tensor:
    scale = (by.encodings[input].scale * by.encodings[f"{name}.weight"].scale).double()
    return ((by.sim.model.get_submodule(name).bias.double() / scale).round() * scale).float()


def test_everything_in_float16_rounds_each_operation():
    sim = calibrated()
    sim.fallback("*")
    by = ByHand(sim)
    x = F.relu(by.conv(X, "stem", True, ""))
    y = by.half(F.relu(by.conv(x, "left", True, "")) + by.conv(x, "right", True, ""))
    torch.testing.assert_close(sim(X), by.conv(torch.cat([y, x], 1), "head", True, ""), rtol=0, atol=0)


def test_encodings_are_kept_and_calibration_goes_on():
    sim, plain = calibrated(), calibrated()
    sim.fallback(["left", "cat"])
    assert sim.encodings() == plain.encodings()
    other = 3 * torch.randn(5, 2, 6, 6)
    assert sim.calibrate([other], progress=False).problems == plain.calibrate([other], progress=False).problems
    assert sim.encodings() == plain.encodings()
    sim.set_method("minmax")
    plain.set_method("minmax")
    assert sim.encodings() == plain.encodings()


def test_calls_add_up_the_last_wins_and_all_can_be_undone():
    sim = calibrated()
    quantized = sim(X)
    sim.fallback("left")
    assert {o.name: o.format for o in sim.fallback(["head", "left"], "bf16").operations} == {"left": "bfloat16", "head": "bfloat16"}
    assert {o.name: o.format for o in sim.fallback("head", "fp16").operations} == {"left": "bfloat16", "head": "float16"}
    assert [o.name for o in sim.fallback("left", "int").operations] == ["head"]
    assert [o.name for o in sim.fallback([]).operations] == ["head"]  # nothing named, nothing changed
    assert not torch.equal(sim(X), quantized)
    assert str(sim.fallback(None)) == "no operation falls back"
    assert torch.equal(sim(X), quantized)


def test_a_chain_falls_back_whichever_part_is_named():
    sim = calibrated()
    for part in ("relu_2", "left"):
        (fallen,) = sim.fallback(None).operations + sim.fallback(part).operations
        assert (fallen.name, fallen.op, fallen.members) == ("left", "conv2d + relu", ("left", "relu_2"))


@pytest.mark.parametrize(
    ("patterns", "to", "message"),
    [
        ("lefty", "fp16", "no operation matches 'lefty'; close to it: 'left'"),
        (["head", "lft"], "fp16", "no operation matches 'lft'; close to it: 'left'"),
        ("head", "fp8", "got to='fp8'; expected 'fp16', 'bf16', 'float32', or 'int'"),
    ],
)
def test_errors_change_nothing(patterns, to, message):
    sim = calibrated()
    with pytest.raises(ValueError, match=message):
        sim.fallback(patterns, to)
    assert sim.fallback([]).operations == []


def test_a_container_is_named_by_a_glob():
    sim = calibrated(seeded(ConvNet), x=torch.randn(2, 1, 12, 12))
    with pytest.raises(ValueError, match=r"'layer1'; to name all inside that module: 'layer1\.\*'"):
        sim.fallback("layer1")
    assert {o.name.split(".")[0] for o in sim.fallback("layer1.*").operations} == {"layer1"}


def _through_state(sim: qsim.QuantSim) -> qsim.QuantSim:
    return through_a_file(sim, qsim.QuantSim(seeded(Branches), X, qsim.int8()))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda sim: pickle.loads(pickle.dumps(sim)), _through_state])
def test_copies_keep_the_fallback(copied):
    sim = calibrated()
    sim.fallback(["left", "cat"])
    other = copied(sim)
    assert torch.equal(other(X), sim(X))
    assert other.fallback([]) == sim.fallback([])
    other.fallback(None)
    assert not torch.equal(other(X), sim(X))


def test_states_from_before_there_were_fallbacks_and_of_float_models_load():
    sim = calibrated()
    sim.fallback("left")
    before = sim(X)
    sim.load_state_dict(seeded(Branches).state_dict())
    state = sim.state_dict()
    del state["quantization.operation_formats"]
    sim.load_state_dict(state)
    assert torch.equal(sim(X), before)
    sim.load_state_dict(calibrated().state_dict())  # this one says that nothing falls back
    assert sim.fallback([]).operations == []


def test_training_takes_a_step_and_learns_in_the_format():
    sim = calibrated()
    sim.fallback(["left", "head"])
    sim.train()
    optimizer = torch.optim.SGD(sim.parameters(), 0.1)
    before = sim.model.left.weight.detach().clone()
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = (sim(X) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert not torch.equal(sim.model.left.weight, before)
    sim.savings = False
    sim.eval()
    plain = sim(X)
    sim.savings = True
    assert torch.equal(sim(X), plain)


def test_savings_change_no_bit():
    sim = calibrated(seeded(ConvNet), x=torch.randn(4, 1, 12, 12))
    x = torch.randn(4, 1, 12, 12)
    for patterns in ("layer1.0.*", "*conv2", "*relu*", "cat", "fc"):
        sim.fallback(None)
        sim.fallback(patterns)
        found = {}
        for saves in (True, False, True):
            sim.savings = saves
            with torch.no_grad():
                found[saves] = sim(x)
            y = sim(x.clone().requires_grad_())
            torch.testing.assert_close(y, found[saves], rtol=0, atol=0)
        assert torch.equal(found[True], found[False])


def test_compiled_code_is_made_anew_for_another_fallback_only():
    sim = calibrated()
    counter = CompileCounter()
    compiled = torch.compile(sim, backend=counter, fullgraph=True)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(compiled(X), sim(X), rtol=0, atol=0)
        assert counter.frame_count == 1
        sim.fallback("left")
        for _ in range(3):
            torch.testing.assert_close(compiled(X), sim(X), rtol=0, atol=0)
        assert counter.frame_count == 2


def test_summary_and_comparison_tell_of_it():
    sim = calibrated()
    sim.fallback(["head"])
    rows = {row.key: row.fallback for row in sim.summary().rows}
    assert {key for key, format in rows.items() if format} == {"head.weight", "head.output", "head.bias"}
    assert set(rows.values()) == {"", "float16"}
    assert "computed in float16" in str(sim.summary())
    assert any("1 operations fall back to float16" in note for note in sim.summary().notes)
    comparison = sim.compare(X)
    integers = calibrated().compare(X)
    assert comparison["head.weight"].local.sqnr > 60 > integers["head.weight"].local.sqnr  # 11 bits beside 8
    assert comparison["head.output"].local.sqnr > 60 > integers["head.output"].local.sqnr
    assert comparison["cat.output"].local.sqnr == integers["cat.output"].local.sqnr
    assert comparison.notes == []


def test_falls_back_from_half_precision_to_float32():
    """Numbers and integers that operations read are as the model has them, too."""
    model, x, n = Calls(lambda x, n: (x * 70000 + 0.1) / n), torch.randn(3, 4), torch.tensor([70001, 3001, 5, 70000])
    sim = qsim.QuantSim(model, (x, n), qsim.fp16())
    sim.fallback("*", to="float32")
    torch.testing.assert_close(sim(x, n), model(x, n), rtol=0, atol=0)
