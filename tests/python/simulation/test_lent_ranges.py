"""Experts that few tokens reach: their activations have the range of all experts, and a report that says so."""

import pytest
import torch
from by_hand import decibels
from torch import nn

import qsim
from qsim.errors import CalibrationError, NoEncodingError

WIDTH, EXPERTS = 16, 4


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(nn.functional.silu(self.up(x)))


class Mixture(nn.Module):
    """Calls every expert, most of them with no tokens; the first feature says which expert a token goes to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            (chosen,) = torch.where(x[:, 0].round() == number)
            y.index_add_(0, chosen, expert(x[chosen]))
        return y


def tokens(*chosen):
    x = torch.randn(len(chosen), WIDTH, generator=torch.Generator().manual_seed(len(chosen)))
    x[:, 0] = torch.tensor(chosen, dtype=torch.float32)
    return x


def simulated():
    model = Mixture()
    for layer in model.layers:
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
    config = qsim.int8().override("*", activation={"method": "minmax"})
    return qsim.QuantSim(model.eval(), tokens(0, 1, 2, 3), config)


def test_those_that_nothing_reached_have_the_range_of_all():
    sim = simulated()
    report = sim.calibrate([tokens(0, 0, 1, 2)], progress=False)
    found, quantizers = sim.encodings(), sim.quantizers()
    for part in ("up.output", "down.output"):
        seen = [quantizers[f"experts.{i}.{part}"] for i in range(3)]
        low, high = min(float(q.min) for q in seen), max(float(q.max) for q in seen)
        lent = found[f"experts.3.{part}"]
        assert float(lent.max - lent.min) == pytest.approx(max(high, 0) - min(low, 0), rel=1e-3)
        assert quantizers[f"experts.3.{part}"].counts.elements == 0  # what it observed is its own
        own = found[f"experts.1.{part}"]
        assert float(own.max - own.min) == pytest.approx(float(seen[1].max - seen[1].min.clamp(max=0)), rel=0.3)
    (told,) = [problem for problem in report.problems if "'experts.3.up.output'" in problem]
    assert "met no value" in told
    assert "range is of all that do the same" in told
    sim(tokens(3, 3, 0))
    sim.set_method("mse")
    assert sim.encodings()["experts.3.up.output"].scale.isfinite()


def test_few_values_beside_many_are_too_few():
    sim = simulated()
    report = sim.calibrate([tokens(*[0] * 40, *[1] * 40, *[2] * 40, 3)], progress=False)
    assert any("'experts.3.up.output' met few values" in problem for problem in report.problems)
    assert not any("'experts.1.up.output' met" in problem for problem in report.problems)


def test_layers_that_see_equally_many_values_have_ranges_of_their_own():
    sim = simulated()
    report = sim.calibrate([tokens(0, 1, 2, 3)], progress=False)
    assert not any("met few" in problem or "met no" in problem for problem in report.problems)


def test_layers_of_several_widths_lend_no_ranges_of_channels():
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 12)])

        def forward(self, x):
            return [layer(x[:n]) for layer, n in zip(self.layers, (len(x), 2), strict=True)]

    per_channel = qsim.TensorSpec(axis=-1, method="minmax")
    sim = qsim.QuantSim(Branches().eval(), torch.randn(64, WIDTH), qsim.Config(activation=per_channel))
    report = sim.calibrate([torch.randn(64, WIDTH)], progress=False)
    assert not any("met" in problem for problem in report.problems)
    assert [sim.encodings()[f"layers.{i}.output"].scale.shape for i in (0, 1)] == [(8,), (12,)]


class Shrinking(nn.Module):
    """A convolutional network whose layers lie in a list: each sees fewer values than the one before, and smaller ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Conv2d(4, 4, 3, stride=2, padding=1, bias=False) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x)) * 0.1
        return x


def test_layers_that_see_fewer_values_by_their_shape_have_ranges_of_their_own():
    x = torch.randn(4, 4, 32, 32, generator=torch.Generator().manual_seed(0))
    sim = qsim.QuantSim(Shrinking().eval(), x, qsim.int8())
    report = sim.calibrate([x], progress=False)
    assert not any("met few" in problem for problem in report.problems)
    with sim.in_float():
        expected = sim(x)
    assert decibels(sim(x), expected) > 25
    for quantizer in sim.quantizers().values():
        if "output" in quantizer.name:
            assert float(quantizer.encoding.max) <= 1.01 * float(quantizer.max)


def test_an_expert_that_the_example_sent_no_token_to_is_planned_as_the_others_are():
    class Chained(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, WIDTH)) for _ in range(3))

        def forward(self, x):
            y = torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                (chosen,) = torch.where(x[:, 0].round() == number)
                y.index_add_(0, chosen, expert(x[chosen]))
            return y

    sim = qsim.QuantSim(Chained().eval(), tokens(0, 0, 1), qsim.int8())
    report = sim.calibrate([tokens(0, 0, 1, 1)], progress=False)
    assert any("'experts.2.0.output' met no value" in problem for problem in report.problems)
    of = {i: sorted(key.removeprefix(f"experts.{i}.") for key in sim.quantizers() if key.startswith(f"experts.{i}.")) for i in range(3)}
    assert of[0] == of[1] == of[2]
    sim(tokens(2, 2, 0))


def test_where_nothing_reached_any_of_them_there_is_no_range():
    sim = simulated()
    with pytest.raises(CalibrationError, match=r"'experts\.0\.up\.output' has no range"):
        sim.calibrate([tokens(9, 9)], progress=False)


class Towers(nn.Module):
    """Images may be none."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(WIDTH, 32), nn.LayerNorm(32), nn.Linear(32, WIDTH)
        self.text, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, text, image):
        image = self.b(nn.functional.gelu(self.norm(self.a(image))) * 2)
        return self.head(torch.cat([image, self.text(text)]))


@pytest.mark.parametrize("target", ["default", "onnxruntime", "tensorrt"])
def test_where_only_empty_tensors_came_there_is_no_range_until_values_come(target, tmp_path):
    torch.manual_seed(0)
    model, text, none = Towers().eval(), torch.randn(8, WIDTH), torch.zeros(0, WIDTH)
    sim = qsim.QuantSim(model, (text, none), qsim.int8(target=target))
    report = sim.calibrate([(text, none)], progress=False)
    assert any("'input[1]' met empty tensors alone" in problem for problem in report.problems)
    with torch.no_grad():
        assert decibels(sim(text, none), model(text, none)) > 25
    assert sim.compare([(text, none)]).output.sqnr > 25
    with pytest.raises(NoEncodingError, match=r"'input\[1\]'"):
        sim(text, text)
    with pytest.raises(NoEncodingError, match=r"'input\[1\]': no value reached it"):
        sim.export(tmp_path / "model.onnx")
    sim.calibrate([(text, text)], progress=False)
    with torch.no_grad():
        assert decibels(sim(text, text), model(text, text)) > 25
