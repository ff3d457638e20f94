"""4-bit weights in groups as ONNX Runtime's own operators: its CPU kernels give the simulation's weights bit for bit."""

import dataclasses

import onnx
import onnxruntime
import pytest
import torch
from causal import Causal, exported_tokens, generated
from torch import Tensor, nn

import qsim

SPECS = {
    "symmetric 32": {"block_size": 32, "symmetric": True},
    "asymmetric 16": {"block_size": 16},
    "unsigned 64": {"block_size": 64, "signed": False},
    "asymmetric 128": {"block_size": 128},
}


def simulated(model, x, **spec):
    config = qsim.Config(qsim.TensorSpec(bits=4, axis=1, method="minmax", **spec), None)
    sim = qsim.QuantSim(model.eval(), x, config)
    sim.calibrate([x], progress=False)
    return sim


def operators(path):
    return [node.op_type for node in onnx.load(path).graph.node]


def computed(path, x: Tensor, **options) -> Tensor:
    settings = onnxruntime.SessionOptions()
    for entry in options.items():
        settings.add_session_config_entry(*entry)
    session = onnxruntime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("columns", [128, 80], ids=["whole groups", "a short group"])
@pytest.mark.parametrize("dims", [2, 3], ids=["Gemm", "MatMul"])
def test_what_the_kernel_reads_is_the_baked_weight(name, columns, dims, tmp_path):
    """Times the identity: sums of one product are exact."""
    torch.manual_seed(0)
    layer = nn.Linear(columns, 24)
    nn.init.zeros_(layer.bias)
    one = torch.eye(columns).reshape((1,) * (dims - 2) + (columns, columns))
    sim = simulated(layer, one, **SPECS[name])
    report = sim.export(tmp_path / "model.onnx", target="onnxruntime")
    assert "MatMulNBits" in operators(report.path)
    assert "DequantizeLinear" not in operators(report.path)
    assert torch.equal(computed(report.path, one).reshape(columns, 24), sim.bake().weight.T)
    assert onnx.load(report.path).graph.output[0].name == "output"


def test_levels_are_stated(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32))
    x = torch.randn(5, 64)
    sim = simulated(model, x, block_size=32)
    exact, found = sim(x).detach(), {}
    for level in (0, 1, 4):
        report = sim.export(tmp_path / f"{level}.onnx", target="onnxruntime", accuracy_level=level)
        nodes = [node for node in onnx.load(report.path).graph.node if node.op_type == "MatMulNBits"]
        assert [a.i for node in nodes for a in node.attribute if a.name == "accuracy_level"] == [level, level]
        found[level] = float((computed(report.path, x) - exact).abs().max())
        assert any("accuracy_level=4: in int8" in note for note in report.notes) == (level == 4)
    assert max(found[0], found[1]) < 1e-5 < found[4]
    with pytest.raises(ValueError, match="got accuracy_level=5; expected 0, 1, 2, 3, 4 or None"):
        sim.export(tmp_path / "model.onnx", target="onnxruntime", accuracy_level=5)


def test_without_them_the_session_is_told(tmp_path):
    """ONNX Runtime fuses DequantizeLinear and MatMul by itself, and would round activations to int8."""
    torch.manual_seed(0)
    x = torch.randn(2, 5, 64)
    sim = simulated(nn.Linear(64, 32), x, block_size=32)
    report = sim.export(tmp_path / "model.onnx", target="onnxruntime", accuracy_level=None)
    assert "DequantizeLinear" in operators(report.path)
    assert report.session_options == {"session.qdq_matmulnbits_accuracy_level": "1"}
    assert (computed(report.path, x, **report.session_options) - sim(x)).abs().max() < 1e-5
    assert "MatMulNBits" not in operators(sim.export(tmp_path / "openvino.onnx", target="openvino").path)


def test_weights_with_a_scale_for_each_channel_are_told_of_too(tmp_path):
    """ONNX Runtime makes the same kernel of a product of float with a weight of 8 bits."""
    torch.manual_seed(0)
    x, config = torch.randn(2, 5, 64), dataclasses.replace(qsim.int8(target="onnxruntime"), activation=None)
    sim = qsim.QuantSim(nn.Linear(64, 32), x, config)
    sim.calibrate([x], progress=False)
    report = sim.export(tmp_path / "model.onnx")
    assert report.session_options == {"session.qdq_matmulnbits_accuracy_level": "1"}
    assert (computed(report.path, x, **report.session_options) - sim(x)).abs().max() < 1e-5
    assert (computed(report.path, x) - sim(x)).abs().max() > 1e-4


def test_a_block_that_the_kernel_does_not_take_stays(tmp_path):
    x = torch.randn(3, 48)
    sim = simulated(nn.Linear(48, 8), x, block_size=24)
    report = sim.export(tmp_path / "model.onnx", target="onnxruntime")
    assert "MatMulNBits" not in operators(report.path)
    assert (computed(report.path, x) - sim(x)).abs().max() < 1e-5


def test_a_causal_model_generates_the_simulations_tokens(tmp_path):
    torch.manual_seed(0)
    model = Causal()
    spec = qsim.TensorSpec(bits=4, axis=1, block_size=32, method="mse")
    sim = qsim.QuantSim(model.eval(), model.call(3, 5), qsim.Config(spec, None))
    sim.calibrate([model.call(3, 5)], progress=False)
    report, tokens = exported_tokens(sim, tmp_path / "lm.onnx")
    kinds = operators(report.path)
    assert kinds.count("MatMulNBits") == 5
    assert kinds.count("GatherBlockQuantized") == 1
    assert tokens == generated(sim)


@pytest.mark.parametrize("spec", [{"axis": 0}, {}, {"axis": 1, "block_size": 32}], ids=["per channel", "per tensor", "in groups"])
@pytest.mark.parametrize("dims", [2, 3])
def test_float_activations_stay_float_beside_weights_of_8_bits(spec, dims, tmp_path):
    """ONNX Runtime 1.32 makes MatMulNBits of any integers that a product dequantizes, and would round activations to int8."""
    torch.manual_seed(0)
    x = torch.randn(*[2, 5, 64][3 - dims :])
    sim = qsim.QuantSim(Product(), x, qsim.Config(qsim.TensorSpec(symmetric=True, method="minmax", **spec), None, target="onnxruntime"))
    sim.calibrate([x], progress=False)
    report = sim.export(tmp_path / "model.onnx", target="onnxruntime")
    assert (computed(report.path, x, **report.session_options) - sim(x)).abs().max() < 1e-5


class Product(nn.Module):
    """A Gemm, for matrices, whose weight is not transposed; a MatMul for more axes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(64, 32)), nn.Parameter(torch.randn(32))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight) if x.dim() == 2 else x @ self.weight
