"""What is quantized where, decided from recordings alone."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from models import CONV_NET_KEYS, ConvNet, Forward, seeded
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import qsim
from qsim.graph.plan.actions import QuantizationPlan
from qsim.graph.plan.plan import plan
from qsim.graph.plan.reasons import MASK
from qsim.graph.record.record import record
from qsim.runs.arguments import example_calls

IMAGE = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)
ROWS = torch.linspace(-1, 1, 5 * 8).reshape(5, 8)


def planned(model: nn.Module, example_inputs: object, config: qsim.Config | None = None) -> QuantizationPlan:
    tape, problems = record(model.eval(), example_calls(example_inputs))
    assert problems == []
    return plan(tape, config or qsim.int8())


class Function(nn.Module):
    """A model whose forward is `function(self, x)`, with the given members."""

    def __init__(self, function: Callable[..., object], **members: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = function
        for name, member in members.items():
            setattr(self, name, member)

    def forward(self, *args: Tensor) -> object:
        return self.function(self, *args)


def keys(function: Callable[..., object], *example_inputs: Tensor, config: qsim.Config | None = None, **members: object) -> list[str]:
    return list(planned(Function(function, **members), example_inputs, config).quantizers)


def reasons(
    function: Callable[..., object], *example_inputs: Tensor, config: qsim.Config | None = None, **members: object
) -> dict[str, str]:
    return {entry.name: entry.reason for entry in planned(Function(function, **members), example_inputs, config).left}


def test_every_tensor_of_a_network_once():
    model = seeded(ConvNet)
    x = torch.randn(2, 1, 12, 12)
    qsim.fold_batch_norms(model, x)
    decided = planned(model, x)
    assert list(decided.quantizers) == CONV_NET_KEYS
    assert decided.quantizers["layer1.0.conv1.output"].op == "conv2d + relu"
    assert decided.quantizers["layer1.0.add.output"].op == "add + relu"
    assert decided.left == []
    without = planned(model, x, dataclasses.replace(qsim.int8(), bias=False))
    assert {entry.reason for entry in without.left} == {"bias in float: Config.bias is off"}


def test_a_plan_is_a_function_of_its_arguments():
    tape, _ = record(seeded(ConvNet), example_calls(torch.randn(2, 1, 12, 12)))
    first, second = plan(tape, qsim.w4a8()), plan(tape, qsim.w4a8())
    assert first.quantizers == second.quantizers
    assert first.left == second.left


def test_batch_norm_that_stays_is_part_of_the_chain():
    members = {"conv": nn.Conv2d(3, 4, 3), "bn": nn.BatchNorm2d(4)}
    decided = planned(Function(lambda m, x: F.silu(m.bn(m.conv(x))), **members), IMAGE)
    assert list(decided.quantizers) == ["input", "conv.weight", "conv.output"]
    assert decided.quantizers["conv.output"].op == "conv2d + batch_norm + silu"


@pytest.mark.parametrize(
    "activation",
    [F.relu, F.gelu, torch.sigmoid, lambda x: x.clamp(0, 6), F.hardswish],
    ids=["relu", "gelu", "sigmoid", "clamp", "hardswish"],
)
def test_linear_and_activation_are_one(activation):
    found = keys(lambda m, x: m.b(activation(m.a(x))), ROWS, a=nn.Linear(8, 8), b=nn.Linear(8, 8))
    assert found == ["input", "a.weight", "a.output", "b.weight", "b.output"]


def test_only_a_rectifier_joins_an_addition():
    assert keys(lambda m, x: F.relu(x + 1), ROWS) == ["input", "add.output"]
    assert keys(lambda m, x: F.gelu(x + 1), ROWS) == ["input", "add.output", "gelu.output"]


def test_a_result_read_twice_ends_its_chain():
    found = keys(lambda m, x: (lambda y: F.relu(y) + y)(m.a(x)), ROWS, a=nn.Linear(8, 8))
    assert found == ["input", "a.weight", "a.output", "relu.output", "add.output"]


def test_a_returned_result_ends_its_chain():
    assert keys(lambda m, x: (lambda y: (F.relu(y), y))(m.a(x)), ROWS, a=nn.Linear(8, 8))[-2:] == ["a.output", "relu.output"]


def test_an_activation_shared_by_calls_of_its_container_goes_by_its_own_name():
    class Activation(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.relu(x)

    found = keys(lambda m, x: m.act(m.b(m.act(m.a(x)))), ROWS, a=nn.Linear(8, 8), b=nn.Linear(8, 8), act=Activation())
    assert found == ["input", "a.weight", "act.relu.output", "b.weight"]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.max_pool2d(x, 2),
        lambda x: x.flatten(1).view(2, -1).reshape(2, 3, -1).transpose(1, 2),
        lambda x: x[:, :2].permute(0, 2, 3, 1),
        lambda x: F.dropout(x, training=False),
        lambda x: F.pad(x, (1, 1)).contiguous(),
        lambda x: x.chunk(3, 1)[1].squeeze(1),
    ],
)
def test_operations_that_move_values_add_no_quantizer(function):
    found = keys(lambda m, x: function(m.a(x)).exp(), IMAGE, a=nn.Conv2d(3, 3, 1))
    assert found == ["input", "a.weight", "a.output", "exp.output"]


def test_an_input_that_nothing_computes_on_is_not_quantized():
    assert keys(lambda m, x: x.flatten(1), IMAGE) == []
    assert keys(lambda m, i: m.table(i), torch.arange(4), table=nn.Embedding(4, 3)) == ["table.weight", "table.output"]


def test_names_of_inputs():
    assert keys(lambda m, x, y: x.exp() + y.exp(), ROWS, ROWS)[:1] == ["input[0]"]

    class Keywords(nn.Module):
        def forward(self, left: Tensor, right: list[Tensor]) -> Tensor:
            return left.exp() + right[1].exp() + right[0].exp()

    found = planned(Keywords(), {"left": ROWS, "right": [ROWS, ROWS]}).inputs
    assert found == {"left": "left", ("right", 1): "input['right', 1]", ("right", 0): "input['right', 0]"}


@pytest.mark.parametrize(
    ("function", "shape", "axis"),
    [
        (lambda m, x: F.conv2d(IMAGE, m.w), (4, 3, 3, 3), 0),
        (lambda m, x: F.conv2d(IMAGE, weight=m.w), (4, 3, 3, 3), 0),
        (lambda m, x: F.conv1d(IMAGE[0], m.w), (4, 8, 3), 0),
        (lambda m, x: F.conv_transpose2d(IMAGE, m.w), (3, 5, 2, 2), 1),
        (lambda m, x: F.linear(x, m.w), (4, 8), 0),
        (lambda m, x: x @ m.w, (8, 4), 1),
        (lambda m, x: m.w @ x.t(), (4, 8), 0),
        (lambda m, x: torch.matmul(x, m.w), (2, 8, 4), 2),
        (lambda m, x: torch.addmm(x[0, :4], x, m.w), (8, 4), 1),
        (lambda m, x: F.embedding(torch.arange(3), m.w) + x[:3, :4], (5, 4), 0),
        (lambda m, x: torch.mv(x, m.w), (8,), None),
        (lambda m, x: x @ m.w, (8,), None),
    ],
)
def test_weights_have_one_scale_per_output_channel(function, shape, axis):
    decided = planned(Function(function, w=nn.Parameter(torch.randn(shape))), ROWS)
    weight = decided.quantizers["w"]
    assert (weight.role, weight.spec.axis, weight.parameter) == ("weight", axis, "w")


def test_blocks_lie_along_the_input_channels():
    config = qsim.Config(weight=qsim.TensorSpec(bits=4, symmetric=True, axis=1, block_size=4, method="minmax"))
    decided = planned(Function(lambda m, x: x @ m.w, w=nn.Parameter(torch.randn(8, 6))), ROWS, config)
    assert (decided.quantizers["w"].spec.axis, decided.quantizers["w"].spec.block_size) == (0, 4)


def test_constants_are_quantized_like_activations():
    found = planned(
        Function(lambda m, x: (x + m.shift).mean(0) * m.gain, shift=nn.Parameter(torch.randn(8)), gain=nn.Parameter(torch.ones(()))), ROWS
    )
    assert list(found.quantizers) == ["input", "shift", "add.output", "mean.output", "mul.output"]
    assert (found.quantizers["shift"].role, found.quantizers["shift"].spec) == ("constant", qsim.int8().activation)
    assert found.left[0].reason == "a single number"


def test_a_tied_weight_has_one_quantizer_and_two_readings_have_two():
    tied = nn.Linear(8, 5, bias=False)
    table = nn.Embedding(5, 8)
    table.weight = tied.weight
    found = keys(lambda m, i: m.tied(m.table(i)), torch.arange(4), table=table, tied=tied)
    assert found == ["table.weight", "table.output", "tied.output"]
    found = keys(lambda m, x: (x @ m.w) @ F.linear(x, m.w), torch.randn(8, 8), w=nn.Parameter(torch.randn(8, 8)))
    assert found == ["input", "w", "matmul.output", "linear.input[1]", "linear.output", "matmul_2.output"]


def test_a_computed_weight_is_observed():
    conv = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3))
    decided = planned(Function(lambda m, x: m.conv(x), conv=conv), IMAGE)
    weight = decided.quantizers["conv.conv2d.weight"]
    assert (weight.parameter, weight.spec.axis, weight.spec.method) == (None, 0, "minmax")
    assert "computed from constants alone" in next(entry.reason for entry in decided.left if "parametrizations" in entry.name)


def test_a_result_that_disappears_from_view_is_quantized():
    def forward(module: nn.Module, x: Tensor) -> Tensor:
        return torch.vmap(torch.sin)(module.a(x))

    assert keys(forward, ROWS, a=nn.Linear(8, 8)) == ["input", "a.weight", "a.output", "sin.output"]


def test_repeated_operations_are_numbered():
    assert keys(lambda m, x: m.a(m.a(x)), ROWS, a=nn.Linear(8, 8)) == ["input", "a.weight", "a.output", "a_2.output"]


def test_what_runs_in_training_only_stays_float():
    def drop_path(module: nn.Module, x: Tensor) -> Tensor:
        y = module.a(x)
        if module.training:
            y = y.div(0.5) * torch.empty(len(y), 1).bernoulli_(0.5)
        return module.b(x + y)

    members = {"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)}
    assert keys(drop_path, ROWS, **members) == ["input", "a.weight", "a.output", "add.output", "b.weight", "b.output"]
    assert reasons(drop_path, ROWS, **members)["mul"] == "runs in training only"


@pytest.mark.parametrize("lowest", [-torch.inf, torch.finfo(torch.float32).min])
def test_masks_stay_float(lowest):
    mask = torch.full((5, 5), lowest).triu(1)
    found = reasons(lambda m, x: F.softmax(x @ x.t() + mask, -1), ROWS)
    assert found == {"add.input[1]": MASK}
    assert keys(lambda m, x: F.softmax(x @ x.t() + mask, -1), ROWS) == ["input", "matmul.output", "add.output"]
    found = reasons(lambda m, x: (lambda y: (F.softmax(y, -1), y.sum()))(x @ x.t() + mask), ROWS)
    assert found["add"] == MASK


def test_a_result_that_no_mode_can_change_is_quantized_by_its_readers_and_observed_once():
    model = Function(lambda m, x: (lambda y: y.exp() + y.abs())(F.hardswish(m.a(x))), a=nn.Linear(8, 8))
    decided = planned(model, ROWS)
    assert list(decided.quantizers) == ["input", "a.weight", "a.output", "exp.output", "abs.output", "add.output"]
    uses = [use for actions in decided.actions.values() for use in actions.operands.values() if use.key == "a.output"]
    assert sorted(use.observes for use in uses) == [False, True]
    assert "hardswish" in reasons(lambda m, x: F.hardswish(m.a(x)), ROWS, a=nn.Linear(8, 8))["hardswish"]


def test_an_input_that_a_block_reads_in_one_of_its_calls_is_quantized():
    def forward(module: nn.Module, x: Tensor) -> Tensor:
        for _ in range(3):
            x = module.block(x)
        return x

    block = Function(lambda m, x: m.a(x), a=nn.Linear(8, 8))
    assert keys(forward, ROWS, block=block) == ["input", "block.a.weight", "block.a.output"]


def test_a_tensor_changed_in_place_is_quantized_where_it_is_read():
    def forward(module: nn.Module, x: Tensor) -> Tensor:
        y = module.a(x)
        y.add_(x)
        return module.b(y)

    decided = planned(Function(forward, a=nn.Linear(8, 8), b=nn.Linear(8, 8)), ROWS)
    assert list(decided.quantizers) == ["input", "a.weight", "a.output", "add.output", "b.weight", "b.output"]
    readers = [site.name for site, actions in decided.actions.items() for use in actions.operands.values() if use.key == "add.output"]
    assert readers == ["b"]


def test_changes_in_place_chain_up():
    def forward(module: nn.Module, x: Tensor) -> Tensor:
        y = module.a(x)
        y.add_(x)
        F.relu(y, inplace=True)
        return module.b(y)

    decided = planned(Function(forward, a=nn.Linear(8, 8), b=nn.Linear(8, 8)), ROWS)
    assert list(decided.quantizers) == ["input", "a.weight", "a.output", "add.output", "b.weight", "b.output"]
    assert decided.quantizers["add.output"].op == "add + relu"


def test_overrides():
    members = {"a": nn.Linear(8, 8), "act": nn.ReLU(), "b": nn.Linear(8, 8)}

    def specs(config: qsim.Config) -> dict[str, qsim.TensorSpec]:
        decided = planned(Function(lambda m, x: m.b(m.act(m.a(x))), **members), ROWS, config)
        return {key: quantizer.spec for key, quantizer in decided.quantizers.items()}

    assert list(specs(qsim.int8().override("a", off=True))) == ["input", "b.weight", "b.output"]
    assert list(specs(qsim.int8().override("input", off=True))) == ["a.weight", "a.output", "b.weight", "b.output"]
    assert specs(qsim.int8().override("*", op_type="linear", bits=4))["b.weight"].bits == 4
    by_activation = specs(qsim.int8().override("act", bits=6))  # an override of any operation of the chain is meant for its result
    assert (by_activation["a.output"].bits, by_activation["a.weight"].bits) == (6, 8)
    assert (
        reasons(lambda m, x: m.b(x), ROWS, config=qsim.int8().override("b", weight=None), **members)["b.weight"]
        == "left in float by the config"
    )


def test_an_override_that_matches_nothing_is_noted():
    config = qsim.int8().override("a", bits=4).override("input", bits=4).override("layer9.*", bits=4)
    told = ["the config's override 'layer9.*' matches no operation", "operations are called 'a', 'input'"]
    assert planned(Function(lambda m, x: m.a(x), a=nn.Linear(8, 8)), ROWS, config).notes == told


def test_a_predicate_is_told_what_is_known_of_a_site():
    seen: dict[str, qsim.SiteInfo] = {}

    def note(site: qsim.SiteInfo) -> bool:
        return seen.setdefault(site.name, site) is None

    def forward(module: nn.Module, x: Tensor) -> Tensor:
        return module.b(F.relu(module.a(x)).flatten(1)) + F.linear(x.flatten(1), module.w)

    members = {"a": nn.Conv2d(3, 4, 3), "b": nn.Linear(144, 5), "w": nn.Parameter(torch.randn(5, 192))}
    decided = planned(Function(forward, **members), IMAGE, qsim.int8().override(note, bits=8))
    assert set(seen) == {"a", "relu", "b", "linear", "add", "input"}
    assert seen["linear"] == qsim.SiteInfo("linear", "linear", None, (5, 192), is_last=True)
    assert seen["a"] == qsim.SiteInfo("a", "conv2d", "Conv2d", (4, 3, 3, 3), is_first=True)
    assert seen["b"] == qsim.SiteInfo("b", "linear", "Linear", (5, 144))
    assert seen["input"] == qsim.SiteInfo("input", "input", is_first=True)
    assert decided.notes == ["the config's override 'note' matches no operation"]


def test_first_and_last_layers():
    members = {name: nn.Linear(8, 8) for name in "abc"}
    model = Function(lambda m, x: F.relu(m.c(m.b(m.a(x)))), **members)
    config = qsim.int4().override(position="first", bits=8).override(position="last", activation={"bits": 6})
    bits = {key: quantizer.spec.bits for key, quantizer in planned(model, ROWS, config).quantizers.items()}
    assert bits == {"input": 8, "a.weight": 8, "a.output": 8, "b.weight": 4, "b.output": 4, "c.weight": 4, "c.output": 6}


def test_chains_are_data_and_the_longest_one_wins():
    def ops(*chains: tuple[str, ...]) -> list[str]:
        config = qsim.Config(target=qsim.Profile("mine", chains=chains))
        model = Function(lambda m, x: torch.tanh(F.relu(m.a(x))).exp(), a=nn.Linear(8, 8))
        return [quantizer.op for quantizer in planned(model, ROWS, config).quantizers.values() if quantizer.role == "activation"]

    assert ops() == ["linear", "relu", "tanh", "exp"]
    assert ops(("Gemm", "Relu")) == ["linear + relu", "tanh", "exp"]
    assert ops(("Gemm", "Relu"), ("Conv|Gemm", "Relu|Clip", "Tanh")) == ["linear + relu + tanh", "exp"]
    assert ops(("Gemm", "Relu", "Sigmoid"), ("Relu", "Tanh")) == ["linear", "relu + tanh", "exp"]


@pytest.mark.parametrize("clip", [lambda x: x.clip(0, 6), lambda x: x.clamp_min(0), lambda x: x.clamp_max(6), F.relu6, F.hardtanh])
def test_every_clip_fuses(clip):
    assert keys(lambda m, x: clip(m.a(x)).exp(), ROWS, a=nn.Linear(8, 8)) == ["input", "a.weight", "a.output", "exp.output"]


def test_the_range_of_a_clip_is_that_of_the_data_within_its_limits():
    """Its limits would waste the steps that no data reach; a range that ends there or before is absorbed by kernels all the same."""
    model = Function(lambda m, x: F.relu6(m.a(x)), a=nn.Linear(8, 8))
    assert planned(model, ROWS, qsim.int8(target="onnxruntime")).quantizers["a.output"].range is None


def test_int32_bias():
    config = qsim.Config(bias=True)
    members = {"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)}
    decided = planned(Function(lambda m, x: m.b(m.a(x).flatten(1)), **members), ROWS, config)
    assert [(b.parameter, b.input, b.weight) for b in decided.decisions.biases] == [
        ("a.bias", "input", "a.weight"),
        ("b.bias", "a.output", "b.weight"),
    ]
    off = config.override("input", off=True)
    assert (
        reasons(lambda m, x: m.a(x), ROWS, config=off, **members)["a.bias"] == "bias in float: input and weight have no grids to multiply"
    )


def test_a_weight_that_attention_reads_and_the_config_leaves_in_float_is_not_taken_for_one_that_nothing_reached():
    x = torch.randn(2, 3, 8)
    model = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    plain = qsim.QuantSim(model, (x, x, x))
    reader = plain.decisions.quantizers["out_proj.weight"].operation
    sim = qsim.QuantSim(model, (x, x, x), qsim.int8().override(reader, weight=None))
    assert plain.quantizers().keys() - sim.quantizers().keys() == {"out_proj.weight"}


@pytest.mark.parametrize("name", ["tanh", "sigmoid"])
def test_a_function_that_dynamo_hides_is_told_with_what_to_write(name):
    """The model returns it: nothing reads it where a mode could quantize it."""

    def reasons(function):
        sim = qsim.QuantSim(Forward(lambda m, x: function(m.a(x)), a=nn.Linear(4, 4)), torch.randn(2, 4))
        return [entry.reason for entry in sim.decisions.left], sim.quantizers()

    left, quantizers = reasons(getattr(F, name))
    assert left == [f"Dynamo does not hand {name}, as it is called here, to function modes; write torch.{name}"]
    assert "a.output" not in quantizers
    left, quantizers = reasons(getattr(torch, name))
    assert left == []
    assert "a.output" in quantizers


@pytest.mark.parametrize("read", [False, True])
def test_what_a_checkpoint_hands_back_as_it_is_is_planned_as_without_it(read):
    """A view of its argument, made where gradients are off: no operation of the model."""

    def planned(run):
        forward = lambda m, x: m.b(run(m.same, F.tanh(m.a(x)))) if read else run(m.same, F.tanh(m.a(x)))  # noqa: E731
        model = Forward(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4), same=nn.Identity())
        sim = qsim.QuantSim(model, torch.randn(2, 4))
        return set(sim.quantizers()), [str(left) for left in sim.decisions.left]

    assert planned(lambda f, x: checkpoint(f, x, use_reentrant=True)) == planned(lambda f, x: f(x))
