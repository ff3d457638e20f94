"""The simulation as PyTorch's own quantized graph: the same numbers, int8 where XNNPACK has integer kernels, float elsewhere."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qsim
from qsim.errors import ExportError

CONFIG = qsim.int8(target="executorch")


class Between(nn.Module):
    """Something between two convolutions."""

    def __init__(self, between):
        super().__init__()
        self.a, self.b, self.between = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1), between

    def forward(self, x):
        return self.b(self.between(self.a(x)))


def simulated(model, *inputs, config=CONFIG, data=None):
    sim = qsim.QuantSim(model.eval(), inputs, config)
    sim.calibrate(data or [tuple(torch.randn_like(x) for x in inputs) for _ in range(3)], progress=False)
    return sim


def operators(program):
    return [node.target.__name__.partition(".")[0] for node in program.graph.nodes if node.op == "call_function"]


BETWEEN = {
    "relu": F.relu,
    "relu6": F.relu6,
    "clamp": lambda x: x.clamp(-0.31, 0.29),
    "clamp from below": lambda x: x.clamp(min=0.1),
    "clamp from 0": lambda x: x.clamp_min(0),
    "gelu": F.gelu,
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "softmax": lambda x: x.softmax(1),
    "pool": lambda x: F.max_pool2d(x, 2),
    "pool and relu": lambda x: F.relu(F.max_pool2d(x, 2)),
    "pool and relu6": lambda x: F.relu6(F.max_pool2d(x, 2)),
    "mean": lambda x: x * x.mean((2, 3), keepdim=True),
    "residual": lambda x: F.relu(x + x.flip(2)) - x,
    "numbers": lambda x: 1 - (x + 1) / 2,
    "concatenation": lambda x: torch.cat([x, F.relu(x), 3 * x], 1)[:, 2:6],
    "moves": lambda x: F.pad(x.permute(0, 1, 3, 2)[:, :, 1:].reshape(1, 4, -1), (2, 6)).reshape(1, 4, 8, -1),
    "depthwise": nn.Conv2d(4, 4, 3, groups=4),
    "dilated": nn.Conv2d(4, 4, 3, dilation=2),
    "transposed": nn.ConvTranspose2d(4, 4, 3, stride=2),
    "in groups": nn.ConvTranspose2d(4, 4, 3, groups=2),
    "norm": nn.GroupNorm(2, 4),
}


@pytest.mark.parametrize("between", BETWEEN)
def test_a_quantized_program_computes_what_the_simulation_does(between):
    torch.manual_seed(0)
    sim = simulated(Between(BETWEEN[between]), torch.randn(1, 4, 8, 8))
    program = sim.quantized_program().module()
    step = float(sim.encodings()["b.output"].scale)
    for _ in range(3):
        x = torch.randn(1, 4, 8, 8)
        with torch.no_grad():
            assert float((program(x) - sim(x)).abs().max()) <= 1.001 * step  # a sum at a rounding edge
            assert float((program(x) - sim(x)).abs().mean()) < step / 100


@pytest.mark.parametrize(
    ("model", "inputs", "integers"),
    [
        (lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), (torch.randn(3, 8),), 2),
        (lambda: nn.Sequential(nn.Linear(8, 16, bias=False), nn.GELU(), nn.Linear(16, 4)), (torch.randn(2, 5, 8),), 2),
        (lambda: nn.Sequential(nn.Conv1d(4, 8, 3), nn.ReLU(), nn.Conv1d(8, 4, 3)), (torch.randn(2, 4, 16),), 2),
        (lambda: Between(nn.ConvTranspose2d(4, 4, 3)), (torch.randn(1, 4, 8, 8),), 3),
        (lambda: Between(nn.ConvTranspose2d(4, 4, 3, groups=2)), (torch.randn(1, 4, 8, 8),), 2),  # a scale for each of its channels
        (lambda: nn.Sequential(nn.Conv3d(2, 4, 3), nn.ReLU()), (torch.randn(1, 2, 6, 6, 6),), 0),
        (lambda: nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 4)), (torch.randint(0, 10, (2, 5)),), 1),
    ],
)
def test_weights_of_integer_kernels_are_int8_and_no_others(model, inputs, integers):
    torch.manual_seed(0)
    sim = simulated(model(), *inputs, data=[inputs])
    program = sim.quantized_program()
    assert operators(program).count("dequantize_per_channel") == integers
    stored = {name: t.dtype for name, t in program.state_dict.items() if t.dim() > 1}
    assert list(stored.values()).count(torch.int8) == integers
    with torch.no_grad():
        assert torch.allclose(program.module()(*inputs), sim(*inputs), atol=1e-5)


def test_nothing_that_is_not_read_is_in_a_program():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    program = simulated(model, torch.randn(2, 64)).quantized_program()
    assert {t.dtype for t in program.state_dict.values() if t.numel() == 64 * 64} == {torch.int8}


def test_per_tensor_weights_and_disabled_quantizers():
    torch.manual_seed(0)
    config = CONFIG.override("*", weight={"axis": None})
    sim = simulated(Between(nn.ReLU()), torch.randn(1, 4, 8, 8), config=config)
    sim.disable("b*")
    program = sim.quantized_program()
    assert "dequantize_per_channel" not in operators(program)
    x = torch.randn(1, 4, 8, 8)
    with torch.no_grad():
        assert torch.allclose(program.module()(x), sim(x), atol=1e-5)


def test_sizes_that_a_caller_leaves_open():
    sim = simulated(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(2, 8))
    program = sim.quantized_program(dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=32)},))
    x = torch.randn(7, 8)
    with torch.no_grad():
        assert torch.allclose(program.module()(x), sim(x), atol=1e-5)


BITS4, BITS8, BITS16 = (qsim.TensorSpec(bits=bits, symmetric=bits == 16) for bits in (4, 8, 16))
WEIGHT = qsim.TensorSpec(bits=8, symmetric=True, axis=0)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (qsim.Config(WEIGHT, BITS4, target="executorch"), r"'0\.output': an activation on the integers \[-8, 7\]"),
        (qsim.Config(BITS16, BITS8, target="executorch"), r"'0\.weight': a constant in int16"),
        (qsim.fp16(), "float16"),
    ],
)
@pytest.mark.filterwarnings("ignore:QuantSim.export. the simulation was made for 'default'")
def test_what_xnnpack_cannot_express_is_refused_by_name(config, said):
    sim = simulated(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4), config=config)
    with pytest.raises(ExportError, match=said):
        sim.quantized_program()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_floats_are_refused(dtype):
    sim = simulated(nn.Linear(4, 4).to(dtype), torch.randn(2, 4, dtype=dtype))
    with pytest.raises(ExportError, match=rf"{str(dtype)[6:]}.*model.float\(\)"):
        sim.quantized_program()
