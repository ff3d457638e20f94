"""Rows of embeddings are looked up in integers and dequantized behind it: ONNX Runtime would dequantize the table in each run."""

import onnx
import pytest
import torch
import torch.nn.functional as F
from models import Forward
from torch import nn

import qsim

IDS = torch.randint(0, 50, (4, 6), generator=torch.Generator().manual_seed(0))
LOOK_UPS = {
    "a layer": lambda m, ids: m.fc(m.table(ids)),
    "beside a sum": lambda m, ids: m.fc(m.table(ids) + m.positions(torch.arange(ids.shape[1]))),
    "read twice": lambda m, ids: m.fc(F.relu(m.table(ids)) + m.table(ids + 1)),
    "tied to the head": lambda m, ids: F.linear(F.relu(m.fc(m.table(ids))), m.table.weight),
}


@pytest.mark.parametrize("target", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("name", LOOK_UPS)
def test_rows_are_dequantized_and_not_the_table(name, target, tmp_path):
    torch.manual_seed(0)
    model = Forward(LOOK_UPS[name], table=nn.Embedding(52, 16), positions=nn.Embedding(6, 16), fc=nn.Linear(16, 16)).eval()
    sim = qsim.QuantSim(model, IDS, qsim.int8(target=target))
    sim.calibrate([IDS], progress=False)
    report = sim.export(tmp_path / "model.onnx", verify=[IDS])
    assert report.session_options.get("session.qdqisint8allowed") is None
    graph = onnx.load(report.path).graph
    tables = {held.name for held in graph.initializer if list(held.dims) in ([52, 16], [6, 16])}
    look_ups = [node for node in graph.node if node.op_type == "Gather" and node.input[0] in tables]
    assert bool(look_ups) == (target == "onnxruntime")
    whole = [node for node in graph.node if node.op_type == "DequantizeLinear" and node.input[0] in tables]
    assert len(whole) == (name == "tied to the head") or target != "onnxruntime"
    for way, outputs in report.verification.differences.items():
        if "float" not in way and (target == "onnxruntime" or way == ("simulation", "not optimised")):
            assert all(d.mismatching == 0 for d in outputs.values()), way
