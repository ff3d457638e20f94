"""What ONNX Runtime computes from an exported model is what the simulation says."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from exported import NETWORKS, computed, expected, exported, optimised_types, session, simulated
from models import Calls

import qsim
from qsim.onnx import sessions
from qsim.onnx.sessions import EXACT_SUMS, KEEP_INT8

FLOAT_BIAS = qsim.int8(target="onnxruntime").to_json().replace('"bias": null', '"bias": false')
CONFIGS = {
    "int8": qsim.int8(target="onnxruntime"),
    "float bias": qsim.Config.from_json(FLOAT_BIAS),
}
INT8 = CONFIGS["int8"]
WRITTEN_OUT = INT8.override(op_type="GRU", weight=INT8.weight, activation=INT8.activation)  # the target leaves recurrent layers in float
PRODUCTS = ("Conv", "FusedConv", "Gemm", "FusedGemm", "MatMul", "FusedMatMul")
OTHERS = ("Add", "Mul", "Concat", "AveragePool", "GlobalAveragePool", "MaxPool")


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", NETWORKS)
def test_hardly_any_output_differs_without_optimisation(name, config):
    path, _ = exported(name, CONFIGS[config])
    inputs = NETWORKS[name][1](NETWORKS[name][2])
    mine, theirs = expected(simulated(name, CONFIGS[config]), inputs), computed(path, inputs)
    assert sum(x.size for x in mine) >= 10_000
    # sums in float32 are rounded in an order that differs from CPU to CPU; where they are exact, test_integer_rounding wants equal bits
    assert sum(int((x != y).sum()) for x, y in zip(mine, theirs, strict=True)) <= 5


@pytest.mark.parametrize("name", ["vision", "perceptron"])
def test_optimised_differs_by_a_step_at_most_and_hardly_ever(name):
    path, _ = exported(name, CONFIGS["int8"])
    sim, inputs = simulated(name, CONFIGS["int8"]), NETWORKS[name][1](NETWORKS[name][2])
    keys = {"vision": ["mix.output", "head.output"], "perceptron": ["down.output"]}[name]
    for key, x, y in zip(keys, expected(sim, inputs), computed(path, inputs, optimised=True), strict=True):
        steps = np.abs(np.rint(x / sim.encodings()[key].scale.item()) - np.rint(y / sim.encodings()[key].scale.item()))
        assert steps.max() <= 1
        assert (steps > 0).mean() < 1e-3


@pytest.mark.parametrize("name", NETWORKS)
def test_products_run_on_integers(name, tmp_path):
    path, _ = exported(name, WRITTEN_OUT if name == "recurrent" else INT8)
    types = optimised_types(path, tmp_path)
    floating = [op for op in types if op in PRODUCTS]
    assert any(op.startswith(("QLinear", "QGemm")) for op in types)
    assert len(floating) <= (1 if name == "recurrent" else 0)  # the first hidden state is zeros that nothing quantizes


@pytest.mark.parametrize("name", ["vision", "perceptron"])
def test_all_of_a_convolutional_network_runs_on_integers(name, tmp_path):
    path, report = exported(name, CONFIGS["int8"])
    types = optimised_types(path, tmp_path)
    assert not set(types) & {*PRODUCTS, *OTHERS}
    assert types.count("QuantizeLinear") == (2 if name == "vision" else 1)  # the input, and what a transposed convolution makes
    assert not report.lint


def test_any_batch_size_runs():
    path, _ = exported("vision", CONFIGS["int8"])
    image = NETWORKS["vision"][1](5)
    whole = computed(path, image)
    for i in range(5):
        for x, y in zip(whole, computed(path, image[i : i + 1]), strict=True):
            np.testing.assert_array_equal(x[i : i + 1], y)
    assert [end.shape for end in session(path).get_inputs()] == [["batch", 3, 8, 8]]


def test_activations_are_unsigned_unless_the_config_asks_for_signed_ones():
    x = NETWORKS["perceptron"][1](500)
    signed = qsim.int8(target="onnxruntime").override("*", activation={"signed": True})
    for config, kind in ((qsim.int8(target="onnxruntime"), "uint8"), (qsim.int8(), "uint8"), (signed, "int8")):
        path, report = exported("perceptron", config)
        assert computed_type(path, report.names["up.output"]) == kind
        for optimised in (False, True):
            np.testing.assert_array_equal(expected(simulated("perceptron", config), x)[0], computed(path, x, optimised=optimised)[0])
        assert (KEEP_INT8 in report.session_options) == (kind == "int8")


def test_a_weight_with_several_readers_gets_no_option_that_cannot_load(monkeypatch):
    monkeypatch.setattr(sessions, "saturates", lambda: True)
    report = simulated("recurrent", WRITTEN_OUT).export(Path(tempfile.mkdtemp(prefix="qsim-"), "model.onnx"))
    assert EXACT_SUMS not in report.session_options
    assert any("weights of 7 bits" in note for note in report.notes)


@pytest.mark.parametrize("bits", [7, 8])
def test_what_saturates_without_vnni_is_said(bits, monkeypatch):
    config = qsim.int8(target="onnxruntime").override("*", weight={"bits": bits})
    for saturating in (False, True):
        monkeypatch.setattr(sessions, "saturates", lambda saturating=saturating: saturating)
        report = simulated("perceptron", config).export(Path(tempfile.mkdtemp(prefix="qsim-"), "model.onnx"))
        assert (EXACT_SUMS in report.session_options) == (bits == 8 and saturating)
        assert any(EXACT_SUMS in note for note in report.notes) == (bits == 8 and not saturating)


def computed_type(path, name):
    import onnx

    model = onnx.shape_inference.infer_shapes(onnx.load(path))
    kind = next(value.type.tensor_type.elem_type for value in model.graph.value_info if value.name == name)
    return onnx.helper.tensor_dtype_to_np_dtype(kind).name


def test_a_default_simulation_runs_too():
    config = qsim.int8()
    path, report = exported("perceptron", config)
    assert report.target == "onnxruntime"
    x = torch.randn(500, 16)
    np.testing.assert_array_equal(expected(simulated("perceptron", config), x)[0], computed(path, x)[0])


@pytest.mark.parametrize(("factor", "narrow"), [(1e-3, True), (3.0, False)])
def test_a_softmax_of_nearly_equal_entries_is_what_the_current_release_computes(factor, narrow, tmp_path):
    """Its grid ends little above 1 / 196: older releases leave float32 there."""
    x = torch.randn(2, 196, 8, generator=torch.Generator().manual_seed(0))
    sim = qsim.QuantSim(Calls(lambda x: torch.softmax(x @ x.mT * factor, -1) @ x), x, qsim.int8(target="onnxruntime"))
    sim.calibrate([x], progress=False)
    report = sim.export(tmp_path / "model.onnx")
    assert any("before 1.32 may return zeros for Softmax" in note for note in report.notes) == narrow
    run = session(tmp_path / "model.onnx")
    assert np.array_equal(run.run(None, {"args_0": x.numpy()})[0], sim.evaluate(x, integer=True).numpy())
