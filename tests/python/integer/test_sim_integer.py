"""`sim.integer()` and `sim.evaluate`: what they take, what they keep, what they refuse. (What they compute: test_integer_networks.py.)"""

import copy
import dataclasses
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from by_hand import decibels
from models import Forward, Perceptron, seeded
from torch import nn

import qsim
from qsim.integer.programs import PROGRAMS
from qsim.onnx.sessions import session

CONFIG = qsim.int8(target="onnxruntime")


class Two(nn.Module):
    """Two inputs by keyword, results in a dict; what is asked for depends on an argument that is no tensor."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 8), nn.Linear(4, 8)

    def forward(self, a, b, *, scaled=False):
        y = self.fc1(a) + self.fc2(b)
        return {"sum": y * 2 if scaled else y, "both": (F.relu(y), a)}


def calibrated(model, example, config=CONFIG):
    sim = qsim.QuantSim(seeded(model), example, config)
    sim.calibrate([example], progress=False)
    return sim


@pytest.fixture
def sim():
    torch.manual_seed(3)
    return calibrated(Perceptron, torch.randn(64, 6))


def steps(sim, y, key="fc2.output"):
    """The integers of an output, and that it lies on its grid."""
    encoding = sim.encodings()[key]
    q = y / encoding.scale
    assert (q - q.round()).abs().max() < 1e-3
    return q.round()


def test_within_a_step_of_the_simulation(sim):
    x = torch.randn(500, 6)
    with sim.integer():
        y = sim(x)
    assert (steps(sim, y) - steps(sim, sim(x))).abs().max() <= 1
    assert torch.equal(y, sim.evaluate(x, integer=True))
    assert torch.equal(sim(x), sim.evaluate(x))


@pytest.mark.parametrize("size", [0, 1, 2, 7, 300])
def test_any_batch_size_with_one_trace(sim, size):
    with sim.integer():
        whole = sim(torch.arange(1800.0).reshape(300, 6) / 900 - 1)
        part = sim((torch.arange(1800.0).reshape(300, 6) / 900 - 1)[:size])
    assert torch.equal(part, whole[:size])
    assert len(sim.derived[PROGRAMS]) == 1


def test_a_model_that_wants_one_batch_size_is_traced_for_each():
    fixed = calibrated(lambda: Forward(lambda m, x: m.fc(x.reshape(len(x) * 1, 6)), fc=nn.Linear(6, 3)), torch.randn(4, 6))
    for size in (4, 5, 4):
        assert fixed.evaluate(torch.randn(size, 6), integer=True).shape == (size, 3)


def test_keywords_nests_and_arguments_that_are_no_tensors():
    example = {"a": torch.randn(8, 6), "b": torch.randn(8, 4)}
    sim = calibrated(Two, example)
    other = {"a": torch.randn(3, 6), "b": torch.randn(3, 4)}
    with sim.integer():
        found, swapped = sim(**other), sim(b=other["b"], a=other["a"])
        positional, scaled = sim(other["a"], other["b"]), sim(**other, scaled=True)
    assert list(found) == ["sum", "both"]
    for same in (swapped, positional, sim.evaluate(other, integer=True)):
        assert torch.equal(found["sum"], same["sum"])
    assert torch.equal(scaled["sum"], 2 * found["sum"])
    assert isinstance(found["both"], tuple)


def test_encodings_parameters_and_switches_that_change_are_noticed(sim):
    x = torch.randn(50, 6)

    def computed():
        return sim.evaluate(x, integer=True)

    first = computed()
    assert torch.equal(computed(), first)
    with torch.no_grad():
        sim.model.fc1.weight.mul_(0.5)
    halved = computed()
    assert not torch.equal(halved, first)
    sim.disable("fc1")
    assert not torch.equal(computed(), halved)
    sim.enable("fc1")
    assert torch.equal(computed(), halved)
    sim.set_method("minmax")
    assert not torch.equal(computed(), halved)
    sim.fallback("fc2")
    released = computed()
    assert torch.equal(released, released.half().float())
    sim.fallback(None)
    assert steps(sim, computed()).shape == (50, 3)


def test_copies_and_pickles_trace_for_themselves(sim):
    x = torch.randn(20, 6)
    expected = sim.evaluate(x, integer=True)
    for other in (copy.deepcopy(sim), pickle.loads(pickle.dumps(sim))):
        assert PROGRAMS not in other.derived
        assert torch.equal(other.evaluate(x, integer=True), expected)
        with torch.no_grad():
            other.model.fc2.weight.zero_()
        assert not torch.equal(other.evaluate(x, integer=True), expected)
    assert torch.equal(sim.evaluate(x, integer=True), expected)


def test_float_inside_is_float(sim):
    x = torch.randn(20, 6)
    with sim.integer(), sim.in_float():
        assert torch.equal(sim(x), sim.model(x))


def test_evaluate_leaves_training_flags_and_takes_what_a_loader_gives(sim):
    x = torch.randn(20, 6)
    expected = sim.evaluate(x, integer=True)
    sim.train()
    sim.model.fc2.eval()
    assert torch.equal(sim.evaluate((x, torch.zeros(20)), integer=True), expected)
    assert sim.training
    assert not sim.model.fc2.training
    y = sim.evaluate([x])
    assert not y.requires_grad


def test_dropout_is_off():
    torch.manual_seed(1)
    sim = calibrated(lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.9), nn.Linear(6, 2)), torch.randn(16, 6))
    x = torch.randn(30, 6)
    sim.train()
    assert torch.equal(sim.evaluate(x, integer=True), sim.evaluate(x, integer=True))


def test_training_and_gradients_are_refused(sim):
    x = torch.randn(4, 6)
    sim.train()
    with sim.integer(), pytest.raises(RuntimeError, match=r"training mode.*sim.eval\(\)"):
        sim(x)
    sim.eval()
    with sim.integer(), pytest.raises(RuntimeError, match=r"requires a gradient.*no_grad"):
        sim(x.requires_grad_())
    with sim.integer(), torch.no_grad():
        assert not sim(x).requires_grad


def test_before_calibration_is_an_error():
    sim = qsim.QuantSim(Perceptron().eval(), torch.randn(1, 6), CONFIG)
    with pytest.raises(qsim.NoEncodingError, match="calibrate"), sim.integer():
        pass
    with pytest.raises(qsim.NoEncodingError, match="calibrate"):
        sim.evaluate(torch.randn(2, 6), integer=True)


def test_control_flow_that_depends_on_values_is_an_error():
    def forward(m, x):
        return m.fc(x) if x.sum() > 0 else -m.fc(x)

    sim = calibrated(lambda: Forward(forward, fc=nn.Linear(6, 3)), torch.randn(4, 6))
    assert sim.evaluate(torch.randn(4, 6)).shape == (4, 3)
    with pytest.raises(qsim.CaptureError, match=r"torch.export cannot trace Forward"):
        sim.evaluate(torch.randn(4, 6), integer=True)


def test_float64_is_an_error():
    sim = calibrated(lambda: Perceptron().double(), torch.randn(8, 6, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"'input' is torch.float64.*model.float\(\)"):
        sim.evaluate(torch.randn(8, 6, dtype=torch.float64), integer=True)


LARGE_BIASES = {
    "linear": lambda: nn.Linear(64, 5),
    "grouped convolution": lambda: nn.Sequential(nn.Unflatten(1, (4, 4, 4)), nn.Conv2d(4, 6, 3, groups=2)),
    "transposed convolution": lambda: nn.Sequential(nn.Unflatten(1, (4, 4, 4)), nn.ConvTranspose2d(4, 6, 3, groups=2)),
}


@pytest.mark.parametrize("axis", [0, None])
@pytest.mark.parametrize("name", LARGE_BIASES)
def test_a_bias_that_fills_the_accumulator_leaves_room_for_the_products(name, axis, tmp_path):
    """Weights whose steps are so small that the bias takes all of int32, and data at the ends of their range."""
    torch.manual_seed(0)
    model = LARGE_BIASES[name]()
    layer = model if isinstance(model, nn.Linear) else model[1]
    with torch.no_grad():
        layer.weight.uniform_(4e-6, 7e-6)
        layer.bias.copy_(torch.linspace(1, 2, layer.bias.numel()))
    x = torch.cat([torch.ones(1, 64), -torch.ones(1, 64), torch.randn(6, 64).clamp(-1, 1)])
    sim = calibrated(lambda: model, x, qsim.int8(target="onnxruntime").override("*", weight={"axis": axis}))
    with sim.integer(), torch.no_grad():
        found = sim(x)
    path = tmp_path / "model.onnx"
    sim.export(path)
    assert np.array_equal(session(path).run(None, {"input": x.numpy()})[0], found.numpy())
    assert decibels(found, sim(x)) > 40


def test_an_accumulator_that_overflows_is_named():
    sim = calibrated(Perceptron, torch.randn(8, 6))
    sim.quantizers()["input"].set_encoding(qsim.Encoding(torch.tensor(1e-7), torch.tensor(0, dtype=torch.int32), 0, 255, dtype="uint8"))
    with torch.no_grad():
        sim.model.fc1.bias.fill_(1e5)
    with pytest.raises(qsim.AccumulatorError, match=r"an accumulator of 'fc1' \(QGemm\) holds 2147\d+"):
        sim.evaluate(torch.full((4, 6), 1.0), integer=True)


class Turned(nn.Module):
    """Linear layers that read what was transposed, as those of attention with ``batch_first`` do: the size that varies comes second."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 96), nn.Linear(96, 64)

    def forward(self, x):
        return self.second(F.relu(self.first(x.transpose(0, 1))).transpose(0, 1))


class OfVectors(Turned):
    def forward(self, x):
        return self.second(F.relu(self.first(x)))


@pytest.mark.parametrize(("model", "shape", "batches"), [(Turned, (200, 8, 32), 12), (OfVectors, (32,), 300)])
def test_linear_layers_on_any_number_of_axes_run_in_onnxruntimes_kernel(model, shape, batches, tmp_path):
    torch.manual_seed(0)
    sim = calibrated(model, torch.randn(shape))
    sim.export(tmp_path / "model.onnx")
    assert [kernel.kernel for kernel in sim.kernels()] == ["QGemm", "QGemm"]
    run = session(tmp_path / "model.onnx")
    for _ in range(batches):
        x = torch.randn(shape)
        expected = run.run(None, {run.get_inputs()[0].name: x.numpy()})[0]
        np.testing.assert_array_equal(sim.evaluate(x, integer=True).numpy(), expected)


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.up = nn.Conv2d(3, 8, 3, padding=1), nn.ConvTranspose2d(8, 8, 2, 2)
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        y = F.hardtanh(F.avg_pool2d(self.up(F.relu(self.conv(x))), 2))
        z = self.norm(self.fc1(y.flatten(2).mT))
        return self.fc2(F.gelu(z) * torch.sigmoid(z))


@pytest.mark.parametrize("target", ["default", "onnxruntime", "tensorrt"])
@pytest.mark.parametrize("preset", [qsim.fp16, qsim.bf16, qsim.fp8, qsim.fp8_static], ids=lambda preset: preset.__name__)
def test_what_float_formats_round_is_computed_in_float(preset, target):
    """Biases stay as they are there: the runtime's optimiser makes integers of those beside integers alone."""
    x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    sim = calibrated(Mixed, x, preset(target=target))
    with sim.integer():
        found = sim(x)
    assert decibels(found, sim(x)) > 50


def test_a_compiled_simulation_is_interpreted_as_the_plain_one():
    x = torch.randn(4, 3, 8, 8)
    sim = calibrated(lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)), x)
    expected, simulated = sim.evaluate(x, integer=True), sim.evaluate(x)
    torch._dynamo.reset()
    compiled = torch.compile(sim, backend="eager")
    with torch.no_grad(), sim.integer():
        assert torch.equal(compiled(x), expected)
    assert torch.equal(compiled(x), simulated)
    torch._dynamo.reset()
    whole = torch.compile(sim, backend="eager", fullgraph=True)
    with (
        sim.integer(),
        pytest.raises(torch._dynamo.exc.Unsupported, match=r"within sim\.integer\(\) a simulation is interpreted, not compiled"),
    ):
        whole(x)


def test_a_simulation_is_pickled_as_what_it_is_within_the_context(sim):
    x = torch.randn(16, 6)
    with sim.integer():
        other = pickle.loads(pickle.dumps(sim))
        assert torch.equal(other(x), sim(x))


@pytest.mark.parametrize("largest", [True, False])
def test_of_equal_elements_the_first_is_chosen_as_in_onnx_runtime(largest, tmp_path):
    """On a grid of 16 steps many are: routers of mixtures, scores of detectors."""

    def forward(m, x):
        values, chosen = m.a(x).topk(3, -1, largest=largest)
        return chosen, values, m.a(x).flatten(1).argsort(1, descending=largest), m.a(x).argmax(-1)

    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    config = qsim.int8()
    config = dataclasses.replace(config, activation=dataclasses.replace(config.activation, bits=4))
    torch.manual_seed(0)
    sim = qsim.QuantSim(Forward(forward, a=nn.Linear(8, 16)), x, config)
    sim.calibrate([x], progress=False)
    report = sim.export(tmp_path / "model.onnx", target="onnxruntime")
    assert not any("something else" in note for note in report.notes)
    got = session(tmp_path / "model.onnx").run(None, {"args_0": x.numpy()})
    with sim.integer():
        expected = sim(x)
    for mine, other in zip(expected, got, strict=True):
        assert torch.equal(mine, torch.from_numpy(other))
    assert not torch.equal(sim(x)[0], expected[0])  # torch takes any of them
