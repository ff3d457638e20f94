"""Recurrent layers, which the target leaves in float: one operation each, for sequences of any length, on ONNX Runtime as in torch."""

import onnx
import onnxruntime
import pytest
import torch
from torch import nn
from torch.export import Dim

import qsim

KINDS = {
    "LSTM": nn.LSTM,
    "GRU": nn.GRU,
    "RNN": nn.RNN,
    "RNN of ReLU": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
}


class Tagger(nn.Module):
    """Reads a sequence, and returns what every step says and what is left at the end."""

    def __init__(self, kind, **options):
        super().__init__()
        self.r = KINDS[kind](6, 8, **options)
        self.fc = nn.Linear(8 * (1 + options.get("bidirectional", False)), 5)

    def forward(self, x):
        y, state = self.r(x)
        return self.fc(y), *(state if isinstance(state, tuple) else (state,))


def simulated(model, x, config=None):
    config = qsim.int8(target="onnxruntime") if config is None else config
    sim = qsim.QuantSim(model.eval(), x, config)
    sim.calibrate([x], progress=False)
    return sim


def on_runtime(path, x):
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return [torch.from_numpy(y) for y in session.run(None, {session.get_inputs()[0].name: x.numpy()})]


def operations(path):
    return [node.op_type for node in onnx.load(path).graph.node]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [{"batch_first": True}, {"num_layers": 2}, {"bidirectional": True, "num_layers": 2, "batch_first": True}, {"bias": False}],
    ids=lambda options: " ".join(options),
)
def test_it_is_one_operation_a_layer_and_the_same(kind, options, tmp_path):
    torch.manual_seed(0)
    x = torch.randn(4, 7, 6)
    sim = simulated(Tagger(kind, **options), x)
    report = sim.export(tmp_path / "model.onnx", target="onnxruntime")
    found = operations(report.path)
    assert found.count(kind.partition(" ")[0]) == options.get("num_layers", 1)
    assert not {"Sigmoid", "Tanh", "Split"} & set(found)
    with torch.no_grad():
        expected = sim(x)
        with sim.integer():
            integers = sim(x)
    step = float(sim.quantizers()["fc.output"].encoding.scale)
    for mine, other, runtime in zip(expected, integers, on_runtime(report.path, x), strict=True):
        torch.testing.assert_close(other, mine, rtol=1e-5, atol=1.01 * step if mine is expected[0] else 1e-5)
        torch.testing.assert_close(runtime, other, rtol=1e-5, atol=1.01 * step if mine is expected[0] else 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_of_any_length_and_number(kind, tmp_path):
    torch.manual_seed(0)
    sim = simulated(Tagger(kind, batch_first=True, bidirectional=True), torch.randn(2, 5, 6))
    shapes = {"x": {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}}
    report = sim.export(tmp_path / "model.onnx", target="onnxruntime", dynamic_shapes=shapes)
    for size in ((1, 1, 6), (3, 20, 6)):
        x = torch.randn(size)
        with torch.no_grad():
            _, *states = sim(x)
        for state, other in zip(states, on_runtime(report.path, x)[1:], strict=True):
            torch.testing.assert_close(other, state, rtol=1e-5, atol=1e-5)


def test_with_weights_on_their_grid_it_is_one_operation_too(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(2, 5, 6)
    config = qsim.int8(target="onnxruntime")
    sim = simulated(Tagger("LSTM"), x, config.override("r*", weight=config.weight))
    report = sim.export(tmp_path / "model.onnx", target="onnxruntime")
    assert operations(report.path).count("LSTM") == 1
    assert {"r.weight_ih_l0", "r.weight_hh_l0"} <= report.names.keys()
    with torch.no_grad():
        for mine, other in zip(sim(x)[1:], on_runtime(report.path, x)[1:], strict=True):
            torch.testing.assert_close(other, mine, rtol=1e-5, atol=1e-5)


def test_with_activations_on_grids_every_step_is_written_out(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 6)
    config = qsim.int8(target="onnxruntime")
    sim = simulated(Tagger("GRU"), x, config.override(op_type="GRU", weight=config.weight, activation=config.activation))
    report = sim.export(tmp_path / "model.onnx", target="onnxruntime")
    assert "GRU" not in operations(report.path)


class Mine(nn.LSTM):
    """A layer of another class than torch's, with nothing of its own."""


def test_a_class_of_the_users_own_is_one_operation_too(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(2, 5, 6)
    model = Tagger("LSTM")
    model.r = Mine(6, 8)
    sim = simulated(model, x)
    report = sim.export(tmp_path / "model.onnx")
    assert operations(report.path).count("LSTM") == 1
    assert not [name for name in sim.quantizers() if name.startswith("r.")]
    with torch.no_grad():
        for mine, other in zip(sim(x)[1:], on_runtime(report.path, x)[1:], strict=True):
            torch.testing.assert_close(other, mine, rtol=1e-5, atol=1e-5)


def test_an_override_by_the_class_of_a_recurrent_layer_is_for_all_of_it():
    x = torch.randn(2, 5, 6)
    sim = qsim.QuantSim(Tagger("GRU").eval(), x, qsim.int8().override(op_type="GRU", off=True))
    assert list(sim.quantizers()) == ["input", "fc.weight", "fc.output"]


def test_a_layer_that_projects_is_written_out(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 6)
    model = Tagger("LSTM")
    model.r, model.fc = nn.LSTM(6, 8, proj_size=4), nn.Linear(4, 5)
    sim = simulated(model, x)
    report = sim.export(tmp_path / "model.onnx", target="onnxruntime")
    assert "LSTM" not in operations(report.path)
    with torch.no_grad():
        for mine, other in zip(sim(x)[1:], on_runtime(report.path, x)[1:], strict=True):
            torch.testing.assert_close(other, mine, rtol=1e-5, atol=1e-5)
