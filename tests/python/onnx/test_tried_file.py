"""A file that was not asked to be verified is run on the example inputs, and told where it computes something else."""

import dataclasses
import warnings

import onnx
import pytest
import torch
from exported import NETWORKS
from models import Forward, seeded
from onnx import numpy_helper
from onnxruntime.capi.onnxruntime_pybind11_state import Fail
from torch import nn

import qsim
from qsim.deploy import verify as verification
from qsim.onnx import file as onnx_file

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def simulated(forward, config=None):
    torch.manual_seed(0)
    sim = qsim.QuantSim(Forward(forward, conv=nn.Conv2d(3, 8, 3)).eval(), X, config)
    sim.calibrate([X], progress=False)
    return sim


def told(report):
    return [note for note in report.notes if "something else" in note or "does not run" in note]


@pytest.mark.parametrize("target", [None, "onnxruntime", "openvino", "coreml"])
def test_a_file_that_computes_something_else_is_told(target, tmp_path, monkeypatch):
    write = onnx_file.write

    def wrong(model, path, **options):
        files = write(model, path, **options)
        made = onnx.load(path)
        weight = next(
            t for t in made.graph.initializer if t.data_type in (onnx.TensorProto.INT8, onnx.TensorProto.UINT8) and len(t.dims) == 4
        )
        weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight)[::-1], weight.name))
        onnx.save(made, path)
        return files

    sim = simulated(lambda m, x: torch.relu(m.conv(x)))
    monkeypatch.setattr(onnx_file, "write", wrong)
    with pytest.warns(UserWarning, match=r"the file computes something else than the simulation: 'output' has -?[\d.]+ dB between them"):
        report = sim.export(tmp_path / "model.onnx", target=target)
    assert len(told(report)) == 1
    assert "run" in report.seconds


def test_a_file_that_does_not_run_is_told(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise Fail("no such kernel")

    monkeypatch.setattr(verification, "session", refuse)
    sim = simulated(lambda m, x: torch.relu(m.conv(x)))
    with pytest.warns(UserWarning, match="ONNX Runtime .* does not run the file: no such kernel"):
        assert told(sim.export(tmp_path / "model.onnx", target="onnxruntime"))
    assert not told(sim.export(tmp_path / "model.onnx", target="coreml"))  # whose operations it need not have


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_a_file_that_computes_the_simulation_is_not_told(name, bits, tmp_path):
    network, inputs, _ = NETWORKS[name]
    config = qsim.int8()
    config = dataclasses.replace(config, activation=dataclasses.replace(config.activation, bits=bits))
    sim = qsim.QuantSim(seeded(network).eval(), inputs(4), config)
    sim.calibrate([inputs(4)], progress=False)
    assert not told(sim.export(tmp_path / "model.onnx"))


FINE = {
    "-Inf": lambda m, x: torch.where((y := m.conv(x)) > 0, y, -torch.inf),
    "zeros": lambda m, x: m.conv(x) * 0,
    "indices": lambda m, x: (m.conv(x).argmax(1), m.conv(x)),
    "random numbers": lambda m, x: m.conv(x) + torch.rand(1),
}


@pytest.mark.parametrize("name", FINE)
def test_what_cannot_be_told(name, tmp_path):
    sim = simulated(FINE[name])
    numbers = torch.random.get_rng_state()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "QuantSim.export")
        assert not told(sim.export(tmp_path / "model.onnx"))
    assert torch.equal(torch.random.get_rng_state(), numbers)
