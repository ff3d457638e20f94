"""torch.compile in one graph: outputs and gradients are those of eager."""

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from models import ConvNet, Forward, Perceptron, ResidualBlock, seeded
from torch import nn

import qsim

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def outputs_and_gradients(sim: qsim.QuantSim, run, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    sim.zero_grad()
    torch.manual_seed(0)
    y = run(x)
    (y * torch.linspace(-1, 1, y.numel()).reshape(y.shape)).sum().backward()
    return y, [p.grad.clone() for p in sim.parameters()]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("config", [qsim.int8(), qsim.Config(bias=False)], ids=["int8", "float bias"])
def test_network(training, config):
    model, x = seeded(ConvNet), torch.randn(4, 1, 12, 12)
    model.dropout.p = 0.0  # compiled and eager draw different random numbers
    sim = qsim.QuantSim(model, x, config)
    sim.calibrate([x], progress=False)
    sim.train(training)
    expected, gradients = outputs_and_gradients(sim, sim, x)
    found, compiled_gradients = outputs_and_gradients(sim, torch.compile(sim, fullgraph=True, backend="aot_eager"), x)
    assert torch.equal(found, expected)
    for ours, theirs in zip(compiled_gradients, gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_inductor():
    model, x = seeded(Perceptron), torch.randn(16, 6)
    sim = qsim.QuantSim(model, x)
    sim.calibrate([x], progress=False)
    expected, gradients = outputs_and_gradients(sim, sim, x)
    found, compiled_gradients = outputs_and_gradients(sim, torch.compile(sim, fullgraph=True), x)
    step = sim.encodings()["fc2.output"].scale.item()
    assert (found - expected).abs().max() <= 1.01 * step  # Inductor may sum in another order: a tie falls the other way
    for ours, theirs in zip(compiled_gradients, gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)


def test_inductor_with_images_of_several_sizes():
    """It has convolutions return channels last, and asks what it copied for them for strides."""
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3, padding=1)).eval()
    x = torch.randn(4, 3, 8, 8)
    sim = qsim.QuantSim(model, x)
    sim.calibrate([x], progress=False)
    compiled = torch.compile(sim.train(), fullgraph=True)
    with torch._inductor.config.patch(force_disable_caches=True):
        for size in ((4, 3, 8, 8), (4, 3, 10, 12)):
            x = torch.randn(size)
            expected, gradients = outputs_and_gradients(sim, sim, x)
            found, compiled_gradients = outputs_and_gradients(sim, compiled, x)
            torch.testing.assert_close(found, expected, rtol=0, atol=1.01 * sim.encodings()["2.output"].scale.item())
            for ours, theirs in zip(compiled_gradients, gradients, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("norm_first", [False, True])
def test_encoder_layers_keep_off_their_fast_path(norm_first):
    layer = seeded(lambda: torch.nn.TransformerEncoderLayer(16, 4, 32, norm_first=norm_first, batch_first=True)).eval()
    x = torch.randn(2, 5, 16)
    sim = qsim.QuantSim(torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval(), x)
    sim.calibrate([x], progress=False)
    compiled = torch.compile(sim, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(x), sim(x))
        with sim.in_float():
            assert torch.equal(sim(x), sim.model(x))


def test_switches_recompile():
    x = torch.randn(16, 6)
    sim = qsim.QuantSim(seeded(Perceptron), x, qsim.int4())
    sim.calibrate([x], progress=False)
    compiled = torch.compile(sim, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), sim(x))
    with sim.in_float():
        assert torch.equal(compiled(x), sim(x))
    sim.disable("fc1.*")
    assert torch.equal(compiled(x), sim(x))
    sim.enable("fc1.*")
    sim.set_method("minmax")
    assert torch.equal(compiled(x), sim(x))


@torch._dynamo.config.patch(recompile_limit=64)
def test_each_quantizer_is_asked_anew():
    """What a graph takes for a constant of a quantizer, and of the plan, is guarded."""
    x = torch.randn(4, 1, 12, 12)
    model = seeded(lambda: torch.nn.Sequential(torch.nn.Conv2d(1, 8, 3), ResidualBlock(8), torch.nn.Flatten(), torch.nn.Linear(800, 5)))
    sim = qsim.QuantSim(model.eval(), x, qsim.Config(bias=False))
    sim.calibrate([x], progress=False)
    compiled = torch.compile(sim, fullgraph=True, backend="eager")
    with torch.no_grad():
        plain, unchanged = compiled(x), []
        for key, quantizer in sim.quantizers().items():
            quantizer.enabled = False
            assert torch.equal(compiled(x), sim(x)), key
            unchanged += [key] if torch.equal(compiled(x), plain) else []
            quantizer.enabled = True
        assert len(unchanged) < len(sim.quantizers()) / 2  # another one may round the same tensor, or all its errors away
        assert torch.equal(compiled(x), plain)
        key = next(key for key in sim.quantizers() if key.endswith(".output"))
        quantizer = sim.quantizers()[key]
        quantizer.reset()
        quantizer.observing = True
        compiled(2 * x)
        assert quantizer.counts.elements > 0
        quantizer.observing = False
        quantizer.set_encoding(dataclasses.replace(quantizer.encoding, scale=quantizer.encoding.scale * 3))
        assert torch.equal(compiled(x), sim(x))
        assert not torch.equal(compiled(x), plain)
        sim.fallback(key.removesuffix(".output"), to="fp16")
        assert torch.equal(compiled(x), sim(x))


def test_learnable_scales():
    spec = qsim.TensorSpec(bits=4, learnable=True)
    x = torch.randn(16, 6)
    sim = qsim.QuantSim(
        seeded(Perceptron), x, qsim.Config(weight=qsim.TensorSpec(bits=4, symmetric=True, axis=0, learnable=True), activation=spec)
    )
    sim.calibrate([x], progress=False)
    expected, gradients = outputs_and_gradients(sim, sim, x)
    found, compiled_gradients = outputs_and_gradients(sim, torch.compile(sim, fullgraph=True, backend="aot_eager"), x)
    assert torch.equal(found, expected)
    for ours, theirs in zip(compiled_gradients, gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype, training):
    model, x = seeded(ConvNet), torch.randn(4, 1, 12, 12)
    model.dropout.p = 0.0
    sim = qsim.QuantSim(model, x)
    sim.calibrate([x], progress=False)
    sim.train(training)
    compiled = torch.compile(sim, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", dtype):
        expected, gradients = outputs_and_gradients(sim, sim, x)
        found, compiled_gradients = outputs_and_gradients(sim, compiled, x)
    assert found.dtype is dtype
    assert torch.equal(found, expected)
    for ours, theirs in zip(compiled_gradients, gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3)


def test_running_ranges_move_as_in_eager():
    config = qsim.int8()
    config = dataclasses.replace(config, activation=dataclasses.replace(config.activation, method="ema", averaging=0.5))
    x = torch.randn(16, 6)
    sim = qsim.QuantSim(seeded(Perceptron), x, config)
    sim.calibrate([x], progress=False)
    eager = copy.deepcopy(sim).train()
    compiled = torch.compile(sim.train(), fullgraph=True, backend="aot_eager")
    before = sim.encodings()
    for factor in (2.0, 0.1):
        assert torch.equal(compiled(x * factor), eager(x * factor))
    assert sim.encodings() == eager.encodings()
    assert sim.encodings() != before


class Checkpointed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = seeded(Perceptron), torch.nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.utils.checkpoint.checkpoint(self.first, x, use_reentrant=False))


def test_checkpointing():
    x = torch.randn(16, 6)
    sim = qsim.QuantSim(Checkpointed().eval(), x)
    sim.calibrate([x], progress=False)
    sim.train()
    expected, gradients = outputs_and_gradients(sim, sim, x)
    found, compiled_gradients = outputs_and_gradients(sim, torch.compile(sim, fullgraph=True, backend="aot_eager"), x)
    assert torch.equal(found, expected)
    for ours, theirs in zip(compiled_gradients, gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "branches",
    [
        lambda m, x: [2 * y for y in (layer(x) for layer in m.layers)],
        lambda m, x: [a + b for a, b in zip((layer(x) for layer in m.layers), (layer(-x) for layer in m.layers), strict=True)],
        lambda m, x: list({i: y.relu() for i, y in enumerate(layer(x) for layer in m.layers)}.values()),
        lambda m, x: [sum(y * z for z in parts) for y, parts in ((layer(x), [x, -x]) for layer in m.layers)],
    ],
    ids=["list", "zip", "dict", "sum"],
)
@pytest.mark.filterwarnings("error:QuantSim")
def test_generator_expressions_that_others_go_through(branches):
    """In eager mode what asks for an element stands on the stack, and Dynamo takes the expression for a call of its function."""
    torch.manual_seed(0)
    model, x = (
        Forward(lambda m, x: m.last(sum(branches(m, x))), layers=nn.ModuleList(nn.Linear(6, 6) for _ in range(3)), last=nn.Linear(6, 4)),
        torch.randn(8, 6),
    )
    sim = qsim.QuantSim(model, x, qsim.int8(target="tensorrt"))
    sim.calibrate([x], progress=False)
    torch.testing.assert_close(torch.compile(sim, fullgraph=True, backend="eager")(x), sim(x), rtol=0, atol=0)


class Doubles(nn.Module):
    def forward(self, x):
        return x + x


@pytest.mark.parametrize("shifted", [False, True])
def test_a_part_that_is_compiled_reads_what_the_eager_rest_computed(shifted):
    """Behind a function that Dynamo hides, in a chain that began outside of it: it raised "WeakRefVariable()"."""

    def forward(model, x, shift=False):
        y = F.linear(x, model.weight)
        return model.part(model.act(y + 1 if shift else y))

    torch.manual_seed(0)
    model = Forward(forward, act=nn.Hardswish(), part=Doubles())
    model.weight = nn.Parameter(torch.randn(8, 8))
    x = torch.randn(16, 8)
    sim = qsim.QuantSim(model.eval(), x)
    sim.calibrate([x], progress=False)
    with torch.no_grad():
        expected = sim(x), sim(x, shifted)
        sim.model.part.compile(backend="eager")
        for mine, other in zip((sim(x), sim(x, shifted)), expected, strict=True):
            assert torch.equal(mine, other)


def test_more_simulations_than_dynamo_compiles_of_one_code():
    """It gives up at the ninth with one code, and runs that eager with a line in its own log."""
    x = torch.randn(4, 6)
    for width in range(10):
        sim = qsim.QuantSim(nn.Sequential(nn.Linear(6, 3 + width)), x)
        sim.calibrate([x], progress=False)
        assert torch.equal(torch.compile(sim, fullgraph=True, backend="eager")(x), sim(x))


@pytest.mark.parametrize("copied", [False, True])
def test_more_blocks_of_one_class_than_dynamo_compiles_of_one_code(copied):
    """Compiled one by one, as long language models are."""
    blocks, x = nn.ModuleList(ResidualBlock(4) for _ in range(10)), torch.randn(2, 4, 6, 6)

    def in_order(m, x):
        for block in m.blocks:
            x = block(x)
        return x

    sim = qsim.QuantSim(Forward(in_order, blocks=blocks).eval(), x)
    sim.calibrate([x], progress=False)
    expected = sim(x)
    sim = copy.deepcopy(sim) if copied else sim
    for block in sim.model.blocks:
        block.compile(backend="eager", fullgraph=True)
    assert torch.equal(sim(x), expected)
