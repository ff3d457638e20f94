"""4-bit weights in groups as ONNX Runtime's own operators: its CPU kernels give the simulation's weights bit for bit."""

import dataclasses

import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

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


class Causal(nn.Module):
    """Two layers with a cache of `torch.cat`; the head is tied to the table."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.table, self.heads = nn.Embedding(50, width), heads
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 50, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor, *cache: Tensor) -> tuple[Tensor, ...]:
        x, caches = self.table(ids), []
        for i, (qkv, out) in enumerate(zip(self.qkv, self.out, strict=True)):
            q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in qkv(self.norm(x)).chunk(3, -1))
            k, v = (torch.cat([old, new], 2) for old, new in zip(cache[2 * i : 2 * i + 2], (k, v), strict=True))
            caches += [k, v]
            behind = torch.arange(k.shape[2]) > torch.arange(q.shape[2])[:, None] + (k.shape[2] - q.shape[2])
            scores = (q @ k.mT / 4).masked_fill(behind, -1e9)
            x = x + out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return (self.head(self.norm(x)), *caches)


def test_a_causal_model_generates_the_simulations_tokens(tmp_path):
    torch.manual_seed(0)
    model = Causal()

    def given(length, past):
        return (torch.randint(50, (1, length)), *(torch.randn(1, 4, past, 16) for _ in range(4)))

    spec = qsim.TensorSpec(bits=4, axis=1, block_size=32, method="mse")
    sim = qsim.QuantSim(model.eval(), given(3, 5), qsim.Config(spec, None))
    sim.calibrate([given(3, 5)], progress=False)
    shapes = ({1: Dim.DYNAMIC}, *({2: Dim.DYNAMIC} for _ in range(4)))
    report = sim.export(tmp_path / "lm.onnx", target="onnxruntime", dynamic_shapes=(shapes[0], shapes[1:]))
    kinds = operators(report.path)
    assert kinds.count("MatMulNBits") == 5
    assert kinds.count("GatherBlockQuantized") == 1
    session = onnxruntime.InferenceSession(str(report.path), providers=["CPUExecutionProvider"])

    def runtime(*inputs):
        feed = {end.name: t.numpy() for end, t in zip(session.get_inputs(), inputs, strict=True)}
        return [torch.from_numpy(t) for t in session.run(None, feed)]

    def generated(step):
        ids, cache, tokens = torch.arange(7)[None], [torch.zeros(1, 4, 0, 16)] * 4, []
        for _ in range(24):
            with torch.no_grad():
                logits, *cache = step(ids, *cache)
            tokens.append(int(logits[0, -1].argmax()))
            ids = torch.tensor([tokens[-1:]])
        return tokens

    assert generated(runtime) == generated(sim)
