"""Rows of a table with one scale lie on its grid: an embedding is rounded once."""

import dataclasses

import pytest
import torch
from models import Forward
from onnx_graphs import session
from torch import nn

import qsim

IDS = torch.randint(0, 50, (4, 6), generator=torch.Generator().manual_seed(0))


def summed(m, ids):
    return m.fc(m.table(ids) + m.positions(torch.arange(ids.shape[1])))


def simulated(config, forward=summed, **layers):
    torch.manual_seed(0)
    layers = {"table": nn.Embedding(50, 16), "positions": nn.Embedding(6, 16), "fc": nn.Linear(16, 16), **layers}
    sim = qsim.QuantSim(Forward(forward, **layers).eval(), IDS, config)
    sim.calibrate([IDS], progress=False)
    return sim


ONNXRUNTIME = qsim.int8(target="onnxruntime")


def test_rows_have_no_grid_of_their_own_and_kernels_read_that_of_the_table():
    sim = simulated(ONNXRUNTIME)
    assert list(sim.quantizers()) == ["table.weight", "positions.weight", "add.output", "fc.weight", "fc.output"]
    assert sim.quantizers()["table.weight"].encoding.dtype == "uint8"
    assert {kernel.name: kernel.kernel for kernel in sim.kernels()} == {"add": "QLinearAdd", "fc": "QGemm"}


def test_rows_are_those_of_the_table_on_its_grid():
    sim = simulated(ONNXRUNTIME, lambda m, ids: m.table(ids))
    table = sim.model.table.weight
    torch.testing.assert_close(sim(IDS), sim.quantizers()["table.weight"].quantize(table)[IDS], rtol=0, atol=0)
    assert not torch.equal(sim(IDS), table[IDS])


@pytest.mark.parametrize(
    "config",
    [
        ONNXRUNTIME,
        ONNXRUNTIME.override("*", activation={"signed": True}),
        ONNXRUNTIME.override(op_type="Gather", weight={"bits": 4}),
        ONNXRUNTIME.override(op_type="Gather", weight={"symmetric": True}),
        ONNXRUNTIME.override(op_type="Gather", weight={"axis": 0}),
    ],
    ids=["as it is", "signed", "four bits", "symmetric", "a scale for each row"],
)
def test_the_runtime_computes_the_integers_of_the_simulation(config, tmp_path):
    sim = simulated(config)
    report = sim.export(tmp_path / "model.onnx", verify=[IDS])
    running = session(str(report.path))
    (got,) = running.run(None, {running.get_inputs()[0].name: IDS.numpy()})
    assert (got == sim.evaluate(IDS, integer=True).numpy()).all()


def test_the_sign_is_that_of_activations():
    sim = simulated(ONNXRUNTIME.override("*", activation={"signed": True}))
    assert sim.quantizers()["table.weight"].encoding.dtype == "int8"
    assert {kernel.name: kernel.kernel for kernel in sim.kernels()} == {"add": "QLinearAdd", "fc": "QGemm"}


@pytest.mark.parametrize(
    "config",
    [
        ONNXRUNTIME.override(op_type="Gather", weight={"axis": 0}),  # a scale for each row
        ONNXRUNTIME.override("table", activation={"bits": 4}),  # coarser than the table
        ONNXRUNTIME.override("table", activation={"axis": -1, "method": "minmax"}),
        qsim.int8(),
        qsim.int8(target="openvino"),
    ],
)
def test_rows_have_a_grid_of_their_own_where_the_table_has_none_for_them(config):
    assert "table.output" in simulated(config).quantizers()


def test_a_table_with_one_scale_hands_it_on_whatever_the_target():
    assert "table.output" not in simulated(qsim.int8().override("table", weight={"axis": None})).quantizers()


def test_rows_that_are_shortened_leave_the_grid():
    sim = simulated(ONNXRUNTIME, table=nn.Embedding(50, 16, max_norm=1.0))
    assert "table.output" in sim.quantizers()


def test_rows_of_a_table_with_a_scale_for_each_row_that_floats_read_have_none():
    config = ONNXRUNTIME.override(op_type="Gather", weight={"axis": 0})
    assert "table.output" not in simulated(config, lambda m, ids: m.fc(torch.tanh(m.table(ids)))).quantizers()


def test_a_table_that_is_the_head_too_has_a_grid_for_each():
    sim = simulated(ONNXRUNTIME, lambda m, ids: nn.functional.linear(m.fc(m.table(ids)), m.table.weight))
    signed = {key: quantizer.encoding.quant_min < 0 for key, quantizer in sim.quantizers().items() if "fc" not in key}
    assert signed == {"table.weight": False, "linear.input[1]": True, "linear.output": False, "positions.weight": True}


def test_a_layer_that_falls_back_leaves_its_rows_to_who_reads_them():
    sim = simulated(ONNXRUNTIME)
    quantized = sim(IDS)
    sim.fallback("table", to="float32")
    torch.testing.assert_close(sim(IDS), quantized, rtol=0, atol=0)  # the sum reads integers, the very ones
    sim.fallback("add", to="float32")
    assert not torch.equal(sim(IDS), quantized)


def test_retargeted_rows_get_the_range_of_the_table():
    sim = simulated(ONNXRUNTIME).retarget("openvino")
    assert "table.output" in sim.quantizers()
    assert sim(IDS).isfinite().all()


def test_a_profile_of_ones_own_without_kernels_hands_on_too():
    profile = dataclasses.replace(qsim.config.profile.ONNXRUNTIME, name="mine", kernels=())
    assert "table.output" not in simulated(qsim.int8(target=profile)).quantizers()
