"""What a simulation was recorded on goes where the model goes: whatever looks at the model again finds inputs that it takes."""

import dataclasses

import pytest
import torch
from torch import nn

import qsim

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


def simulated(config=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)).eval()
    sim = qsim.QuantSim(model, X, config or dataclasses.replace(qsim.int8(), batch_norm="keep"))
    sim.calibrate([X], progress=False)
    return sim


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_model_in_another_type_is_looked_at_in_that_type(dtype):
    sim = simulated().to(dtype)
    assert sim.retarget("openvino")(X.to(dtype)).dtype is dtype
    assert sim.fold_batch_norms().folded == {"2": "1"}
    assert sim.kernels()
    sim.disable("input", "*.output")
    assert torch.equal(sim.bake()(X.to(dtype)), sim(X.to(dtype)))


@pytest.mark.parametrize(("dtype", "named"), [(torch.float16, "FLOAT16"), (torch.bfloat16, "BFLOAT16")])
def test_it_is_exported_in_that_type(dtype, named, tmp_path):
    onnx = pytest.importorskip("onnx")
    simulated(qsim.int8()).to(dtype).export(tmp_path / "model.onnx", "onnxruntime")
    written = onnx.load(tmp_path / "model.onnx").graph
    assert [onnx.TensorProto.DataType.Name(v.type.tensor_type.elem_type) for v in (*written.input, *written.output)] == [named] * 2


def test_only_what_was_of_the_models_type_follows_it():
    times = torch.arange(16, dtype=torch.float64)

    class Timed(nn.Linear):
        def forward(self, x, times, rows):
            return super().forward(x)[rows] * times[rows, None].to(x.dtype)

    sim = qsim.QuantSim(Timed(8, 4).eval(), (X, times, torch.arange(3)))
    sim.half()
    assert [t.dtype for t in sim.calls[0][0]] == [torch.float16, torch.float64, torch.int64]
    sim.float()
    assert [t.dtype for t in sim.calls[0][0]] == [torch.float32, torch.float64, torch.int64]
