"""Marks in front of rectifiers change no bit, and stand only where the grid goes on beyond the rectifier's limits."""

import pytest
import torch
from torch import nn

import qsim
from qsim.graph.execute.marks import BIAS, QUANTIZED
from qsim.trace.capture import capture
from qsim.trace.marks_before_rectifiers import mark_before_rectifiers
from qsim.trace.marks_behind_moves import key_of, operation


class Interpreted(torch.fx.Interpreter):
    """Runs a graph with the simulation's quantizers in the places of its marks."""

    def __init__(self, module, sim):
        super().__init__(module)
        self.quantizers = sim.quantizers()

    def call_function(self, target, args, kwargs):
        if target is QUANTIZED:
            return self.quantizers[args[1]](args[0])
        assert target is not BIAS, "the config leaves biases in float"
        return super().call_function(target, args, kwargs)


class Clamped(nn.Module):
    def __init__(self, clamp):
        super().__init__()
        self.conv, self.clamp = nn.Conv2d(3, 4, 3), clamp

    def forward(self, x):
        return self.clamp(self.conv(x))


def simulated(clamp, symmetric):
    torch.manual_seed(0)
    activation = qsim.TensorSpec(bits=4, symmetric=symmetric, method="minmax")
    config = qsim.Config(weight=qsim.TensorSpec(symmetric=True, axis=0), activation=activation, bias=False)
    sim = qsim.QuantSim(Clamped(clamp).eval(), torch.randn(2, 3, 8, 8), config)
    sim.calibrate([3 * torch.randn(8, 3, 8, 8)], progress=False)
    return sim


@pytest.mark.parametrize("clamp", [nn.ReLU(), nn.ReLU6(), nn.Hardtanh(-0.4, 0.9), nn.Hardtanh(0.2, 5.0)], ids=str)
@pytest.mark.parametrize("symmetric", [False, True])
def test_outputs_keep_their_bits(clamp, symmetric):
    sim = simulated(clamp, symmetric)
    x = 3 * torch.randn(16, 3, 8, 8)
    program = capture(sim, (x,), {})
    graph = program.exported.graph
    mark_before_rectifiers(graph, sim.encodings())
    module = program.exported.graph_module
    module.recompile()
    parameters = [dict(sim.model.named_parameters())[name] for name in program.exported.graph_signature.inputs_to_parameters.values()]
    with torch.no_grad():
        (out,) = Interpreted(module, sim).run(*parameters, x)
        assert torch.equal(out, sim(x))
    before = next(node for node in graph.nodes if operation(node).startswith(("relu", "hardtanh", "clamp"))).args[0]
    encoding = sim.encodings()["conv.output"]
    low, high = (
        (0.0, {nn.ReLU: float("inf")}.get(type(clamp), 6.0)) if isinstance(clamp, (nn.ReLU, nn.ReLU6)) else (clamp.min_val, clamp.max_val)
    )
    ends = sim.quantizers()["conv.output"].quantize(torch.tensor([low, high]))  # where the limits fall on the grid
    beyond = ends[0] > encoding.min or ends[1] < encoding.max
    assert (key_of(before) == "conv.output") == beyond


def test_a_result_that_others_read_too_stays_as_it_is():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x):
            x = self.conv(x)
            return torch.relu(x) + x

    activation = qsim.TensorSpec(symmetric=True)
    sim = qsim.QuantSim(Shared().eval(), torch.randn(2, 3, 8, 8), qsim.Config(activation=activation, bias=False))
    sim.calibrate([torch.randn(8, 3, 8, 8)], progress=False)
    program = capture(sim, (torch.randn(2, 3, 8, 8),), {})
    marks = sum(node.target is QUANTIZED for node in program.exported.graph.nodes)
    mark_before_rectifiers(program.exported.graph, sim.encodings())
    assert sum(node.target is QUANTIZED for node in program.exported.graph.nodes) == marks
