"""The traced graph of a simulation: marks where quantizers are, and the same results."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from blocks import BLOCKS
from exported import NETWORKS
from models import CONV_NET_KEYS, ConvNet, Forward, seeded, trained
from torch import Tensor, nn
from traced import evaluated

import qsim
from qsim.graph.execute.marks import BIAS
from qsim.trace.capture import Program, capture
from qsim.trace.constants import fold_marked
from qsim.trace.marks_behind_moves import key_of, mark_behind_moves

TARGETS = ["default", "onnxruntime", "tensorrt"]


def marks(program: Program) -> list[str]:
    return [key for node in program.exported.graph.nodes if (key := key_of(node)) is not None]


def calibrated(model: nn.Module, inputs: Tensor, target: str = "onnxruntime") -> qsim.QuantSim:
    sim = qsim.QuantSim(model, inputs, qsim.int8(target=target))
    sim.calibrate([inputs], progress=False)
    return sim


def test_every_quantizer_has_its_mark_once():
    sim = qsim.QuantSim(seeded(ConvNet), torch.randn(2, 1, 12, 12))
    program = capture(sim, *sim.calls[0])
    assert Counter(marks(program)) == Counter(CONV_NET_KEYS)
    biases = [node.args[1:] for node in program.exported.graph.nodes if node.target is BIAS]
    assert ("adaptive_avg_pool2d.output", "fc.weight") in biases
    assert len(biases) == len(sim.decisions.biases)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", BLOCKS)
def test_the_graph_computes_what_the_simulation_does_also_with_marks_carried_and_weights_folded(name, target):
    torch.manual_seed(1)
    x = torch.randn(4, 3, 8, 8)
    sim = calibrated(trained(BLOCKS[name]()), x, target)
    program, expected = capture(sim, *sim.calls[0]), sim(x)
    assert torch.equal(evaluated(sim, program, x), expected)
    before = len(marks(program))
    mark_behind_moves(program.exported.graph)
    fold_marked(program.exported)
    assert len(marks(program)) >= before
    assert torch.equal(evaluated(sim, program, x), expected)


@pytest.mark.parametrize("name", NETWORKS)
def test_it_holds_for_any_batch(name):
    network, inputs, _ = NETWORKS[name]
    sim = qsim.QuantSim(seeded(network), inputs(1))
    sim.calibrate([inputs(8)], progress=False)
    program = capture(sim, *sim.calls[0])
    assert program.dynamic_batch
    for n in (1, 3):
        with torch.no_grad():
            expected = sim(inputs(n))
        assert torch.equal(evaluated(sim, program, inputs(n)), expected if isinstance(expected, Tensor) else expected[0])


def test_a_batch_that_forward_makes_a_number_of_is_fixed():
    model = Forward(lambda self, x: self.fc(x) * float(len(x)), fc=nn.Linear(4, 2))
    sim = qsim.QuantSim(model.eval(), torch.randn(3, 4))
    program = capture(sim, *sim.calls[0])
    assert (program.dynamic_batch, program.example_batch) == (False, 3)


def test_keywords_become_inputs_in_their_order():
    class Difference(nn.Linear):
        def forward(self, left, right):
            return super().forward(left) - right

    inputs = {"right": torch.randn(2, 4), "left": torch.randn(2, 4)}
    sim = qsim.QuantSim(nn.ModuleDict({"inner": Difference(4, 4)})["inner"].eval(), inputs)
    sim.calibrate([inputs], progress=False)
    program = capture(sim, *sim.calls[0])
    given = [node.name for node in program.inputs]
    assert sorted(given) == ["left", "right"]
    assert torch.equal(evaluated(sim, program, *(inputs[name] for name in given)), sim(**inputs))


def test_keywords_without_names_of_their_own_leave_the_batch_open():
    model = Forward(lambda self, left, right: self.fc(left) - right, fc=nn.Linear(4, 4)).eval()
    inputs = {"left": torch.randn(2, 4), "right": torch.randn(2, 4)}
    sim = qsim.QuantSim(model, inputs)
    program = capture(sim, *sim.calls[0])
    assert program.dynamic_batch
    sim.calibrate([inputs], progress=False)
    assert torch.equal(evaluated(sim, program, *inputs.values()), sim(**inputs))


def test_tracing_changes_nothing():
    sim = calibrated(seeded(ConvNet), torch.randn(2, 1, 12, 12))
    sim.train()
    before = {name: t.clone() for name, t in sim.state_dict().items()}
    capture(sim, *sim.calls[0])
    assert all(torch.equal(t, before[name]) for name, t in sim.state_dict().items())
    assert sim.model.training
    sim.eval()
    assert sim(torch.randn(2, 1, 12, 12)).isfinite().all()  # quantizers again, not marks


def test_a_graph_outlives_its_encodings():
    x = torch.randn(4, 1, 12, 12)
    sim = calibrated(seeded(ConvNet), x)
    program = capture(sim, *sim.calls[0])
    sim.set_method("minmax")
    assert torch.equal(evaluated(sim, program, x), sim(x))


def test_what_cannot_be_traced_is_an_error_with_the_reason():
    def forward(self, x):
        return self.fc(x) if x.sum().item() > 0 else -self.fc(x)

    sim = qsim.QuantSim(Forward(forward, fc=nn.Linear(4, 4)).eval(), torch.randn(2, 4))
    with pytest.raises(qsim.CaptureError, match=r"cannot trace Forward: .*control flow that depends on values"):
        capture(sim, *sim.calls[0])


def test_weights_that_are_computed_become_constants():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), nn.ReLU())
    x = torch.randn(8, 4)
    sim = calibrated(model.eval(), x)
    program = capture(sim, *sim.calls[0])
    fold_marked(program.exported)
    weights = [node.args[0] for node in program.exported.graph.nodes if key_of(node) == "0.linear.weight"]
    assert [node.op for node in weights] == ["placeholder"]
    assert torch.equal(evaluated(sim, program, x), sim(x))


def _halved(grid):
    grid[:, 0] /= 2
    return grid


def _scaled_by_an_input(grid, x):
    grid[:, 0] *= x.mean()
    return grid


CHANGED = {
    "through a view": (True, lambda m, x: _halved(torch.arange(8.0).reshape(4, 2) + 1)),
    "of what the model holds": (False, lambda m, x: _halved(m.table)),
    "by an input": (False, lambda m, x: _scaled_by_an_input(torch.arange(8.0).reshape(4, 2) + 1, x)),
}


@pytest.mark.parametrize("name", CHANGED)
def test_constants_that_are_changed_in_place(name):
    folds, made = CHANGED[name]
    model = Forward(lambda m, x: m.out(m.fc(x) * made(m, x)[:, 0]), fc=nn.Linear(4, 4), out=nn.Linear(4, 4)).eval()
    model.register_buffer("table", torch.rand(4, 2) + 1)
    x = torch.randn(8, 4)
    sim = calibrated(model, x)
    held, expected = model.table.clone(), sim(x)
    sim.model.table.copy_(held)
    program = capture(sim, *sim.calls[0])
    fold_marked(program.exported)
    assert any(constant.startswith("folded") for constant in program.exported.constants) == folds
    assert torch.equal(sim.model.table, held)
    assert torch.equal(evaluated(sim, program, x), expected)


def test_marks_are_carried_over_moves_and_through_a_common_grid_alone():
    def forward(self, x):
        x = F.relu(self.conv(x))
        moved = F.max_pool2d(x, 2).flatten(1)
        joined = torch.cat([moved, moved], 1)
        return joined * 2.0

    sim = calibrated(Forward(forward, conv=nn.Conv2d(3, 4, 3)).eval(), torch.randn(2, 3, 8, 8), "tensorrt")
    sim_keys = set(sim.quantizers())
    program = capture(sim, *sim.calls[0])
    mark_behind_moves(program.exported.graph)
    assert not [node for node in program.exported.graph.nodes if "max_pool" in node.name and key_of(next(iter(node.users)))]
    sim = calibrated(Forward(forward, conv=nn.Conv2d(3, 4, 3)).eval(), torch.randn(2, 3, 8, 8))
    program = capture(sim, *sim.calls[0])
    mark_behind_moves(program.exported.graph)
    found = {node.name: key_of(next(iter(node.users))) for node in program.exported.graph.nodes if node.op == "call_function"}
    assert found["max_pool2d"] == found["flatten"] == "conv.output"
    assert sim_keys != set(sim.quantizers())
