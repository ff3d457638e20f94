"""Where a target's kernels are known, what none of them makes or reads has no grid; everything else keeps its own."""

import dataclasses

import numpy
import pytest
import torch
from by_hand import decibels
from models import Forward
from onnx_graphs import session
from torch import nn

import qsim
from qsim.config.profile import ONNXRUNTIME
from qsim.graph.plan.dataflow import Dataflow

X = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))


def snake(m, x):
    """The activation of neural codecs: all but the layers runs in float."""
    y = m.a(x)
    return m.b(y + torch.sin(y * m.alpha).pow(2) * m.beta)


def model(forward=snake):
    torch.manual_seed(0)
    made = Forward(forward, a=nn.Linear(8, 8), b=nn.Linear(8, 8), n=nn.LayerNorm(8)).eval()
    made.alpha, made.beta = nn.Parameter(torch.rand(8) + 1), nn.Parameter(torch.rand(8))
    return made


def simulated(forward=snake, config=None, x=X):
    sim = qsim.QuantSim(model(forward), x, config or qsim.int8(target="onnxruntime"))
    sim.calibrate([x], progress=False)
    return sim


def test_between_operations_in_float_there_is_no_grid():
    """A product that a sine alone reads is not worth an integer kernel, nor a sum whose operands come out of float for it alone."""
    assert set(simulated().quantizers()) == {"input", "a.weight", "b.weight", "add.output", "b.output"}


def test_what_has_a_grid_anyway_is_added_on_integers():
    def forward(m, x):
        y = m.a(x)
        z = torch.sin(y)
        return m.b(z) + m.b(y + z)

    assert {"a.output", "sin.output", "add.output"} <= set(simulated(forward).quantizers())


def test_the_summary_says_why():
    (row,) = [line for line in str(simulated().summary()).splitlines() if line.strip().startswith("sin ")]
    assert "computes Sin in float, and all that reads it: a grid would gain nothing" in row


def test_what_the_model_returns_in_float_has_none_and_an_input_that_floats_read_has_none():
    sim = simulated(lambda m, x: (torch.tanh(m.a(m.n(x))), m.b(m.n(x)).softmax(-1)))
    assert set(sim.quantizers()) == {"n.output", "n_2.output", "a.weight", "b.weight", "b.output", "softmax.output"}


def test_a_constant_of_an_operation_in_float_has_none():
    assert "alpha" not in simulated(lambda m, x: m.b(torch.maximum(m.a(x), m.alpha).exp())).quantizers()
    assert "alpha" in simulated(lambda m, x: m.b(m.a(x) * m.alpha)).quantizers()


@pytest.mark.parametrize(
    "config", [qsim.fp16(target="onnxruntime"), qsim.int16(target="onnxruntime"), qsim.int8(), qsim.int8(target="openvino")]
)
def test_half_precision_wider_integers_and_targets_that_say_nothing_keep_all(config):
    assert "sin.output" in simulated(config=config).quantizers()


def test_a_layer_that_the_config_leaves_in_float_counts_as_float():
    def forward(m, x):
        return m.b(torch.tanh(x + m.a(x)))

    assert "tanh.output" in simulated(forward).quantizers()
    config = qsim.int8(target="onnxruntime").override("b", off=True)
    assert "tanh.output" not in simulated(forward, config).quantizers()


def test_an_override_cannot_ask_for_one_and_a_profile_can():
    profile = dataclasses.replace(ONNXRUNTIME, name="mine", kernels=(*ONNXRUNTIME.kernels, "Sin"))
    assert "sin.output" in simulated(config=qsim.int8(target=profile)).quantizers()
    assert qsim.Config.from_json(qsim.int8(target=profile).to_json()).profile == profile


def test_the_runtime_computes_the_integers_of_the_simulation(tmp_path):
    sim = simulated()
    report = sim.export(tmp_path / "model.onnx", verify=[X])
    assert not report.lint
    running = session(str(report.path))
    (got,) = running.run(None, {running.get_inputs()[0].name: X.numpy()})
    numpy.testing.assert_array_equal(got, sim.evaluate(X, integer=True).numpy())


def test_it_is_closer_to_the_float_model():
    everything = dataclasses.replace(ONNXRUNTIME, name="everything", kernels=())
    sims = [simulated(config=qsim.int8(target=target)) for target in ("onnxruntime", everything)]
    wanted = model()(X).detach()
    fewer, more = (decibels(sim(X).detach(), wanted) for sim in sims)
    assert fewer > more


def stream(m, x):
    """A residual stream, which normalizations and additions alone read."""
    y = x + m.b(m.n(x))
    return m.n(y + m.a(m.n(y)))


def test_a_residual_stream_is_not_rounded_and_products_leave_it_float(tmp_path):
    sim = simulated(stream)
    assert set(sim.quantizers()) == {"n.output", "n_2.output", "b.weight", "a.weight"}
    assert [kernel.kernel for kernel in sim.kernels()] == [None, "QGemm", None, None, "QGemm", None, None]
    report = sim.export(tmp_path / "model.onnx", verify=[X])
    differences = {way: found for way, found in report.verification.differences.items() if "float" not in way}
    assert all(d.mismatching == 0 or d.largest < 1e-5 for found in differences.values() for d in found.values())
    everything = dataclasses.replace(ONNXRUNTIME, name="everything", kernels=())
    wanted, more = model(stream)(X).detach(), simulated(stream, qsim.int8(target=everything))
    assert decibels(sim(X).detach(), wanted) > decibels(more(X).detach(), wanted) + 1


def test_a_concatenation_has_a_grid_where_an_integer_kernel_reads_it_and_only_there():
    def joined(last):
        return lambda m, x: last(m, torch.cat([m.a(x), m.b(x)]))

    assert "cat.output" in simulated(joined(lambda m, y: m.a(y))).quantizers()
    assert "cat.output" not in simulated(joined(lambda m, y: m.n(y))).quantizers()
    assert {"a.output", "b.output"} & set(simulated(joined(lambda m, y: m.n(y))).quantizers()) == set()
    parts = simulated(joined(lambda m, y: y))  # no part takes another's range
    assert "cat.output" not in parts.quantizers()


def test_a_constant_that_is_added_to_what_the_model_returns_is_exact():
    sim = simulated(lambda m, x: m.a(x) + m.alpha)
    assert set(sim.quantizers()) == {"input", "a.weight", "b.weight"}
    assert "alpha" in simulated(lambda m, x: m.b(m.a(x) + m.alpha)).quantizers()


def test_a_bias_in_float_leaves_no_result_in_float():
    sim = simulated(lambda m, x: m.n(m.a(x)), dataclasses.replace(qsim.int8(target="onnxruntime"), bias=False))
    assert "a.output" in sim.quantizers()


def test_whether_a_result_needs_a_grid_is_asked_once_however_many_read_it(monkeypatch):
    """A row at a time, of thousands: each row reads the one result, and wrapping took ten minutes."""

    def row_by_row(m, x):
        y = m.a(x)
        m.b(y.clamp_(-6, 6))  # written to in place: quantized where it is read
        return torch.stack([torch.sigmoid(row) for row in y])

    looked = []
    readers = Dataflow.readers
    monkeypatch.setattr(Dataflow, "readers", lambda flow, site: looked.extend(found := readers(flow, site)) or found)
    counts = []
    for rows in (50, 200):
        looked.clear()
        qsim.QuantSim(model(row_by_row), torch.randn(rows, 8), qsim.int8(target="onnxruntime"))
        counts.append(len(looked))
    assert counts[1] < 5 * counts[0]
