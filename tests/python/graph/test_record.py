"""The tape against what small models are known to do, and the models against themselves: recording leaves no trace."""

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from models import Forward
from torch import nn
from torch.utils.checkpoint import checkpoint

from qsim.graph.record.record import record
from qsim.graph.record.tape import Origin, Step, Tape
from qsim.operations.functions import name_of


def taped(forward, *args, modules=None, **kwargs) -> Tape:
    tape, report = record(Forward(forward, **(modules or {})), [(args, kwargs)])
    assert report == []
    return tape


def evaluated(tape: Tape) -> dict[str, Step]:
    """The steps of the eval pass by name."""
    return {step.name: step for step in tape.steps if step.run == 0}


def names(tape: Tape, training: bool = False) -> list[str]:
    return [step.name for step in tape.steps if step.run == training]


X = torch.randn(2, 4, 6, 6)


# What is an operation, and whose.


def test_leaves_and_functions_have_names():
    block = Forward(lambda m, x: F.relu(m.conv(x)) + x, conv=nn.Conv2d(4, 4, 1))
    tape = taped(lambda m, x: m.block(m.act(x)).mean(), X, modules={"block": block, "act": nn.ReLU()})
    assert names(tape) == names(tape, training=True) == ["act", "block.conv", "block.relu", "block.add", "mean"]
    assert [(call.path, [s.name for s in call.steps]) for call in tape.calls][:2] == [
        ("", ["act", "mean"]),
        ("block", ["block.conv", "block.relu", "block.add"]),
    ]


def test_reused_leaf_is_one_step_per_call():
    tape = taped(lambda m, x: m.act(m.act(x) * 2), X, modules={"act": nn.ReLU()})
    assert names(tape) == ["act", "mul", "act"]


def test_root_may_be_a_leaf():
    tape, report = record(nn.Conv2d(4, 2, 3), [((X,), {})])
    assert (names(tape), report) == (["conv2d"], [])


def test_composite_function_is_opened():
    tape, _ = record(nn.MultiheadAttention(8, 2), [((torch.randn(3, 1, 8),) * 3, {})])
    assert {"linear", "softmax", "bmm"} & set(names(tape))
    assert "multi_head_attention_forward" not in names(tape)


def test_steps_of_training_alone():
    def forward(m, x):
        return x * torch.rand(2, 1, 1, 1) if m.training else x.relu()

    tape = taped(forward, X)
    assert (names(tape), names(tape, training=True)) == (["relu"], ["mul"])
    (noise,) = next(s for s in tape.steps if s.run == 1).operands[1]
    assert noise.kind == "random"


def test_part_that_stays_in_eval():
    """Steps carry the flag of their container, and which run they are of."""

    class Frozen(Forward):
        def train(self, mode=True):
            return super().train(False)

    tape = taped(lambda m, x: m.frozen(x).exp(), X, modules={"frozen": Frozen(lambda m, x: x.sin())})
    flags = [(s.name, s.training, s.run) for s in tape.steps]
    assert flags == [("frozen.sin", False, 0), ("exp", False, 0), ("frozen.sin", False, 1), ("exp", True, 1)]
    tape, _ = record(Frozen(lambda m, x: x.sin()), [((X,), {})])
    assert [s.operands for s in tape.steps] == [{0: {Origin("input", 0)}}] * 2


def test_checkpoint_is_looked_into():
    tape = taped(lambda m, x: checkpoint(m.conv, x, use_reentrant=False).relu(), X, modules={"conv": nn.Conv2d(4, 4, 1)})
    assert names(tape, training=True) == ["conv", "relu"]


def test_predicates_are_no_steps():
    assert names(taped(lambda m, x: x.relu() if x.isfinite().all() and x.shape[0] else x, X)) == ["relu"]


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: torch.vmap(lambda row: row.sin())(x),
        lambda m, x: torch.func.functional_call(m.fc, {"weight": torch.ones(3, 6), "bias": torch.zeros(3)}, (x,)).sin(),
        lambda m, x: torch.func.jvp(torch.sin, (x,), (x,))[0],
        lambda m, x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)),
    ],
)
def test_unusual_functions_are_no_obstacle(forward):
    assert taped(forward, X, modules={"fc": nn.Linear(6, 3)}).steps


def test_sparse_results_are_reported_and_no_operands():
    tape, report = record(Forward(lambda m, x: (x.to_sparse() * 2).to_dense().sin()), [((X,), {})])
    assert "sin" in names(tape)
    reason = "is not dense (sparse, or of another layout): it stays in float"
    assert report == [f"the result of '{name}' {reason}" for name in ("to_sparse", "mul")]


def test_compiled_part_is_seen():
    compiled = torch.compile(nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU()), fullgraph=True)
    tape, report = record(nn.Sequential(compiled), [((X,), {})])
    assert names(tape) == ["0._orig_mod.0", "0._orig_mod.1"]
    assert report == ["'0' has a forward set on the instance: its operations are counted as its caller's"]


# Where operands come from.


def test_inputs_know_their_argument():
    def forward(m, x, pair, *, scale, options):
        return x * scale + pair[1] - options["shift"]

    ids = torch.zeros(1, dtype=torch.int64)
    tape = taped(forward, X, (ids, X), scale=X, options={"shift": X})
    assert tape.inputs == {
        0: torch.float32,
        (1, 0): torch.int64,
        (1, 1): torch.float32,
        "scale": torch.float32,
        ("options", "shift"): torch.float32,
    }
    steps = evaluated(tape)
    assert steps["mul"].operands == {0: {Origin("input", 0)}, 1: {Origin("input", "scale")}}
    assert steps["add"].operands == {0: {Origin("step", steps["mul"])}, 1: {Origin("input", (1, 1))}}
    assert steps["sub"].operands[1] == {Origin("input", ("options", "shift"))}


def test_inputs_in_a_named_tuple():
    class Pair(NamedTuple):
        left: torch.Tensor
        right: torch.Tensor

    assert taped(lambda m, pair: pair.left + pair.right, Pair(X, X)).inputs.keys() == {(0, "left"), (0, "right")}


def test_inputs_are_those_the_forward_gets():
    """Pre-hooks of the model run before the place where the simulation quantizes inputs."""
    model = Forward(lambda m, x: x.relu())
    model.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    tape, _ = record(model, [((X,), {})])
    assert evaluated(tape)["relu"].operands == {0: {Origin("input", 0)}}


def test_parameters_and_buffers_have_names():
    tape = taped(lambda m, x: m.bn(F.conv2d(x, weight=m.conv.weight)), X, modules={"conv": nn.Conv2d(4, 4, 1), "bn": nn.BatchNorm2d(4)})
    steps = evaluated(tape)
    assert steps["conv2d"].constants == {"weight": "conv.weight"}
    assert set(steps["bn"].constants.values()) == {"bn.running_mean", "bn.running_var", "bn.weight", "bn.bias"}
    assert steps["conv2d"].shapes == {0: X.shape, "weight": (4, 4, 1, 1)}


def test_options_are_noted():
    step = evaluated(taped(lambda m, x: torch.cat([x, x], dim=1).flatten(1).softmax(-1), X))
    assert step["cat"].options == {"dim": 1}
    assert step["softmax"].options == {1: -1}


def test_transparent_functions_hand_origins_on():
    tape = taped(
        lambda m, x: torch.cat([m.drop(m.pool(x.relu())).flatten(1)], 1).sum(), X, modules={"pool": nn.MaxPool2d(2), "drop": nn.Dropout()}
    )
    steps = evaluated(tape)
    assert steps["cat"].operands == {(0, 0): {Origin("step", steps["relu"], direct=False)}}


def test_outputs_are_numbered():
    steps = evaluated(taped(lambda m, x: torch.var_mean(x, 0)[1].exp(), X))
    assert list(steps["var_mean"].results) == [0, 1]
    assert steps["exp"].operands == {0: {Origin("step", steps["var_mean"], output=1)}}


def test_named_tuples_are_outputs():
    steps = evaluated(taped(lambda m, x: torch.linalg.qr(x).R.exp(), torch.randn(3, 3)))
    (origin,) = steps["exp"].operands[0]
    assert (origin.kind, origin.output) == ("step", 1)


def test_two_origins_meet():
    steps = evaluated(taped(lambda m, x: torch.where(x > 0, x.sin(), x.cos()).exp(), X))
    assert {o.source.name for o in steps["exp"].operands[0]} == {"sin", "cos"}


def test_concat_by_slices():
    def forward(m, x):
        y = x.new_zeros(2, 8, 6, 6)
        y[:, :4], y[:, 4:] = x.sin(), x.cos()
        return y.exp()

    steps = evaluated(taped(forward, X))
    assert {o.source.name for o in steps["exp"].operands[0] if o.kind == "step"} == {"sin", "cos"}


def test_masks_and_complex_numbers_are_on_the_side():
    steps = evaluated(taped(lambda m, x: torch.fft.irfft2(torch.fft.rfft2(x.sin())) * (x.cos() > 0), X))
    assert steps["fft_irfft2"].operands == {}
    assert steps["fft_irfft2"].side == {Origin("step", steps["sin"], direct=False)}
    assert steps["mul"].side == {Origin("step", steps["cos"], direct=False)}


def test_integer_input_reaches_the_floats_it_becomes():
    steps = evaluated(taped(lambda m, x: x.float().exp() + x / 2, torch.zeros(3, dtype=torch.uint8)))
    assert steps["exp"].operands == {0: {Origin("input", 0, direct=False)}}
    assert steps["div"].side == {Origin("input", 0)}


# In-place changes.


@pytest.mark.parametrize("inference", [False, True])
def test_returned_and_changed_tensor_differ(inference):
    def forward(m, x):
        y = x.sin()
        z = y.mul_(2)
        return z.exp() + y.cos()

    with torch.inference_mode(inference):
        steps = evaluated(taped(forward, torch.randn(3)))
    assert steps["mul"].changed == {0}
    assert steps["exp"].operands == {0: {Origin("step", steps["mul"])}}
    assert steps["cos"].operands == {0: {Origin("stale", steps["mul"])}}


def test_in_place_activation():
    steps = evaluated(taped(lambda m, x: m.act(x.sin()).exp(), X, modules={"act": nn.ReLU(inplace=True)}))
    assert steps["act"].operands == {0: {Origin("step", steps["sin"])}}
    assert steps["exp"].operands == {0: {Origin("step", steps["act"])}}


@pytest.mark.parametrize(
    ("write", "wrote"),
    [
        (lambda y: y[:, 0].add_(1), {"cos", "add"}),
        (lambda y: y.view(-1).fill_(0), {"cos"}),
        (lambda y: torch.sin(y, out=y), {"sin"}),
    ],
)
def test_written_tensor_is_no_longer_what_was_returned(write, wrote):
    def forward(m, x):
        y = x.cos()
        write(y)
        return y.exp()

    steps = evaluated(taped(forward, X))
    assert {origin.kind for origin in steps["exp"].operands[0]} == {"stale"}
    assert {origin.source for origin in steps["exp"].operands[0]} == {steps[name] for name in wrote}


def test_buffer_that_is_updated_is_the_result_of_that():
    def forward(m, x):
        m.bn.running_mean.lerp_(x.mean((0, 2, 3)), 0.1)
        return x + m.bn.running_mean.sum()

    tape = taped(forward, X, modules={"bn": nn.BatchNorm2d(4)})
    for training in (False, True):  # the second pass starts anew
        steps = {s.name: s for s in tape.steps if s.run == training}
        assert steps["lerp"].constants == {0: "bn.running_mean"}
        assert steps["sum"].operands == {0: {Origin("stale", steps["lerp"])}}


def test_function_that_dynamo_hides_is_stale():
    steps = evaluated(taped(lambda m, x: F.hardswish(x).exp(), X))
    assert steps["exp"].operands == {0: {Origin("stale", steps["hardswish"])}}


# Who reads a result.


def test_readers():
    def forward(m, x):
        y = x.sin()
        return y.exp() + y, y.reshape(-1)

    tape = taped(forward, X)
    steps = evaluated(tape)
    assert [(r.step, r.slot, r.origin.direct) for r in tape.readers(steps["sin"])] == [
        (steps["exp"], 0, True),
        (steps["add"], 1, True),
        (None, None, False),
    ]
    assert [r.step for r in tape.readers(steps["add"])] == [None]


@pytest.mark.parametrize("read", [lambda y: y.mean().item(), lambda y: y > 0, lambda y: y.argmax(), lambda y: bool(y.sum() > 0)])
def test_what_is_read_out_has_a_reader(read):
    def forward(m, x):
        y = x.sin()
        read(y)
        return x.exp()

    tape = taped(forward, X)
    left = [evaluated(tape)["sin"]]
    while left:  # the chain from sin ends outside of the model
        readers = [r.step for step in left for r in tape.readers(step)]
        if None in readers:
            return
        left = readers
    pytest.fail("nobody reads it")


@dataclass
class Output:
    y: torch.Tensor
    hidden: list


@pytest.mark.parametrize(
    "wrap", [lambda y: y, lambda y: {"a": [y]}, lambda y: Output(y.exp(), [y]), lambda y: torch.distributions.Normal(y, 1.0)]
)
def test_results_in_any_structure(wrap):
    tape = taped(lambda m, x: wrap(x.sin()), X)
    assert evaluated(tape)["sin"] in {o.source for o in tape.results}


# What cannot be seen is said.


def test_pass_that_fails_is_dropped_and_reported():
    def forward(m, x):
        y = x.sin()
        if m.training:
            raise RuntimeError("not here")
        return y

    tape, report = record(Forward(forward), [((X,), {})])
    assert report == ["the model could not be recorded in training mode: RuntimeError: not here"]
    assert [s.run for s in tape.steps] == [0]
    assert {o.source for o in tape.results} == set(tape.steps)


def test_lazy_module_asks_to_be_run():
    with pytest.raises(ValueError, match=r"'fc.weight' has no shape yet: run the model once"):
        record(Forward(lambda m, x: m.fc(x), fc=nn.LazyLinear(3)), [((X,), {})])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_module_is_reported():
    scripted = torch.jit.script(nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU()))
    tape, report = record(nn.Sequential(scripted, nn.ReLU()), [((X,), {})])
    assert report == ["'0' is a scripted module: its operations are not seen"]
    assert names(tape) == ["1"]


def test_forward_on_the_instance_is_reported():
    block = Forward(lambda m, x: x)
    block.forward = lambda x: x.sin()
    tape, report = record(nn.Sequential(block), [((X,), {})])
    assert report == ["'0' has a forward set on the instance: its operations are counted as its caller's"]
    assert names(tape) == ["sin"]


def test_memory_that_is_used_again_is_another():
    """What was changed in place and is freed: what is written where it lay writes into nothing of it."""

    def forward(m, x):
        total = x.sum()
        for _ in range(20):
            total = total + (x * 2).add_(1).sum()  # freed at once
            other = x * 3
            total = total + other.sum()
            other[0] = 0.0  # a write into memory of the same size
        return total

    tape = taped(forward, X)
    changed = [step for step in tape.steps if name_of(step.func) == "add" and step.changed]
    assert len(changed) == 40
    assert not {step for step, _ in tape.rewritten} & set(changed)


def test_what_has_no_memory_is_not_taken_for_one_another():
    """Sparse tensors name no memory that they share."""

    def forward(m, x):
        y = (x * 2).add_(1)
        sparse = x.flatten(1).to_sparse()
        sparse.mul_(2.0)
        return y, sparse.to_dense()

    tape, _ = record(Forward(forward), [((X,), {})])
    assert not any(step.changed and name_of(step.func) == "add" for step, _ in tape.rewritten)
