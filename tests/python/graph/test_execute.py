"""A simulated model against the same computation composed by hand, and what its containers keep to themselves."""

import copy
import dataclasses
import pickle
import threading
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from models import ConvNet, Forward, Perceptron, seeded
from torch import Tensor, nn

import qsim
from qsim.graph.execute.attach import places
from qsim.reference import fake_quantize


def calibrated(model: nn.Module, x: Tensor, config: qsim.Config | None = None) -> qsim.QuantSim:
    sim = qsim.QuantSim(model, x, config)
    sim.calibrate([x], progress=False)
    return sim


class StraightThrough(torch.autograd.Function):
    """The contract's fake-quantize, with its gradient written out: 1 where the rounded value is on the grid, else 0."""

    @staticmethod
    def forward(ctx, x, e):
        scale, zero = (t if e.axis is None else t.reshape(-1, *[1] * (x.dim() - 1)) for t in (e.scale, e.zero_point))
        q = (x / scale).round() + zero
        ctx.save_for_backward((q >= e.quant_min) & (q <= e.quant_max))
        return fake_quantize(x, e.scale, e.zero_point, e.quant_min, e.quant_max, axis=e.axis)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0], None


@pytest.mark.parametrize(
    "config", [qsim.int8(), qsim.int4(), dataclasses.replace(qsim.int8(), bias=False)], ids=["int8", "int4", "float bias"]
)
def test_outputs_and_gradients_are_those_of_the_composition(config):
    model, x = seeded(Perceptron), torch.randn(32, 6, requires_grad=True)
    by_hand = x.detach().clone().requires_grad_()
    sim = calibrated(model, x[:4].detach(), config)  # the other rows reach beyond the range
    encodings = sim.encodings()

    def quantized(value: Tensor, key: str) -> Tensor:
        return StraightThrough.apply(value, encodings[key])

    def bias(layer: nn.Linear, source: str, weight: str) -> Tensor:
        if config.bias is False:
            return layer.bias
        scale = (encodings[source].scale * encodings[weight].scale).double()
        return layer.bias + ((layer.bias.double() / scale).round() * scale - layer.bias).detach().float()

    hidden = F.linear(quantized(by_hand, "input"), quantized(model.fc1.weight, "fc1.weight"), bias(model.fc1, "input", "fc1.weight"))
    hidden = quantized(F.relu(hidden), "fc1.output")
    expected = quantized(
        F.linear(hidden, quantized(model.fc2.weight, "fc2.weight"), bias(model.fc2, "fc1.output", "fc2.weight")), "fc2.output"
    )
    found = sim(x)
    assert torch.equal(found, expected)
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()
    (found * weights).sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(sim.model.get_parameter(name).grad, parameter.grad, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(x.grad, by_hand.grad, rtol=1e-6, atol=1e-7)
    assert 0 < (x.grad == 0).sum() < x.numel()  # something was clipped


def test_each_quantizer_runs_once_and_leaves_its_grid():
    x = torch.randn(2, 1, 12, 12)
    sim = calibrated(seeded(ConvNet), x)
    calls, encodings = Counter(), sim.encodings()

    def on_grid(key: str):
        def hook(module: nn.Module, args: object, y: Tensor) -> None:
            calls[key] += 1
            e = encodings[key]
            assert torch.equal(y, fake_quantize(y, e.scale, e.zero_point, e.quant_min, e.quant_max, axis=e.axis))

        return hook

    for key, quantizer in sim.quantizers().items():
        quantizer.register_forward_hook(on_grid(key))
    sim(x)
    assert calls == dict.fromkeys(sim.quantizers(), 1)


LAYERS = {
    "conv": lambda: nn.Conv2d(4, 4, 3, padding=1),
    "depthwise": lambda: nn.Conv2d(4, 4, 3, padding=1, groups=4, bias=False),
    "bn": lambda: nn.BatchNorm2d(4),
    "relu": nn.ReLU,
    "relu_": lambda: nn.ReLU(inplace=True),
    "silu": nn.SiLU,
    "hardswish": nn.Hardswish,
    "max": lambda: nn.MaxPool2d(3, 1, 1),
    "mean": lambda: nn.AvgPool2d(3, 1, 1),
    "dropout": nn.Dropout,
    "cat": lambda: nn.Conv2d(8, 4, 1),
    "add": nn.Identity,
}


class Assembled(nn.Module):
    """Layers by name, one after the other; "add" and "cat" join the result with an earlier one."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names
        self.layers = nn.ModuleList(LAYERS[name]() for name in names)

    def forward(self, x: Tensor) -> Tensor:
        earlier = x = x * 1.0
        for name, layer in zip(self.names, self.layers, strict=True):
            joined = x + earlier if name == "add" else torch.cat([x, earlier], 1) if name == "cat" else x
            if name in ("add", "cat"):
                earlier = joined if name == "add" else x.clone()
            x = layer(joined)
        return x * 2.0


@settings(max_examples=30)
@given(st.lists(st.sampled_from(sorted(LAYERS)), max_size=7))
def test_no_network_quantizes_a_tensor_twice(names):
    model, x = seeded(Assembled, names), torch.randn(2, 4, 6, 6)
    expected = model(x)
    sim = calibrated(model, x, qsim.int16())
    calls, sizes, given, made = Counter(), {}, {}, {}  # tensors by identity and version, kept alive so that identities stay unique

    def before(module: nn.Module, args: tuple[Tensor]) -> None:
        given[id(args[0]), args[0]._version] = args[0]

    def after(module: nn.Module, args: tuple[Tensor], y: Tensor) -> None:
        calls[module.name] += 1
        sizes[module.name] = y.numel()
        made[id(y), y._version] = y

    for quantizer in sim.quantizers().values():
        quantizer.register_forward_pre_hook(before)
        quantizer.register_forward_hook(after)
    found = sim(x)
    assert not given.keys() & made.keys()
    assert calls.keys() == sim.quantizers().keys()
    # Only what no mode can change, and what is changed in place and read under its old name, is quantized by its readers: by each of them.
    assert {"hardswish", "relu_"} & set(names) or set(calls.values()) <= {1}
    for key, quantizer in sim.quantizers().items():
        observed = quantizer.counts.elements // sizes[key]
        assert observed == 1 or (observed <= calls[key] and "cat" in names)  # a copy (here one of `earlier`) is another tensor
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02 * expected.abs().max().item())


@pytest.mark.parametrize("training", [False, True])
def test_off_is_the_folded_model_bit_for_bit(training):
    model, x = seeded(ConvNet), torch.randn(4, 1, 12, 12)
    sim = calibrated(model, x)
    folded = copy.deepcopy(model)
    qsim.fold_batch_norms(folded, x)
    sim.train(training)
    folded.train(training)
    torch.manual_seed(1)
    with sim.in_float():
        found = sim(x)
    torch.manual_seed(1)
    expected = folded(x)
    assert torch.equal(found, expected)
    found.square().sum().backward()
    expected.square().sum().backward()
    for (name, ours), (_, theirs) in zip(sim.model.named_parameters(), folded.named_parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad), name


def test_all_quantizers_off_is_the_float_model_too():
    x = torch.randn(4, 1, 12, 12)
    sim = calibrated(seeded(ConvNet), x)
    sim.disable("*")
    with sim.in_float():
        expected = sim(x)
    assert torch.equal(sim(x), expected)


def test_inputs_by_position_and_by_keyword():
    class Two(nn.Module):
        def forward(self, x: Tensor, scale: float = 1.0, y: Tensor | None = None) -> Tensor:
            return x.exp() * scale if y is None else x.exp() * scale + y.exp()

    x, y = torch.randn(4, 3), torch.randn(4, 3)
    sim = qsim.QuantSim(Two(), {"x": x, "y": y})
    sim.calibrate([{"x": x, "y": y, "target": 0}], progress=False)
    expected = sim(x=x, y=y)
    assert torch.equal(sim(x, 1.0, y), expected)
    assert torch.equal(sim(x, y=y), expected)
    assert not torch.equal(sim.model(x, y=y), Two()(x, y=y))
    assert torch.isfinite(sim(x)).all()  # without y another path runs


def test_in_place_changes_reach_their_readers_quantized():
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            y.add_(x)
            F.relu(y, inplace=True)
            return self.b(y)

    x = torch.randn(8, 6)
    sim = calibrated(InPlace(), x, dataclasses.replace(qsim.int8(), bias=False))
    seen = {}
    sim.quantizers()["b.output"].register_forward_pre_hook(lambda module, args: seen.update(x=args[0]))
    sim(x)
    e, w = sim.encodings()["add.output"], sim.encodings()["b.weight"]
    with torch.no_grad():
        first = sim.encodings()["input"], sim.encodings()["a.weight"], sim.encodings()["a.output"]
        q = [
            fake_quantize(t, e.scale, e.zero_point, e.quant_min, e.quant_max, axis=e.axis)
            for t, e in zip((x, sim.model.a.weight), first, strict=False)
        ]
        y = F.linear(q[0], q[1], sim.model.a.bias)
        y = fake_quantize(y, first[2].scale, first[2].zero_point, first[2].quant_min, first[2].quant_max)
        y = fake_quantize(F.relu(y + q[0]), e.scale, e.zero_point, e.quant_min, e.quant_max)
        weight = fake_quantize(sim.model.b.weight, w.scale, w.zero_point, w.quant_min, w.quant_max, axis=0)
        assert torch.equal(seen["x"], F.linear(y, weight, sim.model.b.bias))


class Attention(nn.Module):
    """A causal language model of one block, its classifier tied to its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.norm = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 48)
        self.proj = nn.Linear(16, 16)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        x = self.embed(tokens)
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        mask = torch.full((tokens.shape[1],) * 2, -torch.inf).triu(1)
        x = x + self.proj(F.softmax(q @ k.transpose(-1, -2) / 4 + mask, -1) @ v)
        return {"logits": self.head(x)}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 6, batch_first=True)
        self.fc = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.lstm(x)[0][:, -1])


OTHER_KINDS = {
    "attention": (Attention, torch.arange(14).reshape(2, 7)),
    "recurrent": (Recurrent, torch.randn(2, 5, 8)),
    "multi-head": (lambda: nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True), torch.randn(2, 5, 16)),
    "weight norm": (lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv1d(8, 4, 3)), nn.SiLU()), torch.randn(2, 8, 9)),
}


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_other_kinds_of_models_are_simulated_as_far_as_they_are_seen(kind):
    torch.manual_seed(0)
    make, x = OTHER_KINDS[kind]
    model = make().eval()
    sim = calibrated(model, x)
    assert any(key.endswith("weight") for key in sim.quantizers())
    for entry in sim.summary().left:
        assert entry.reason
    with sim.in_float():
        off, expected = (torch.utils._pytree.tree_leaves(m(x))[0] for m in (sim, model))
    assert torch.equal(off, expected)
    sim.train()
    found = torch.utils._pytree.tree_leaves(sim(x))[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=0.2 * expected.abs().max().item())
    assert not torch.equal(found, expected)
    found.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in sim.model.parameters())


class Branching(nn.Module):
    """Goes another way than in its example where the data say so."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.exp() if x.shape[0] == 2 else x.sin()
        return self.fc(x)


def test_a_path_that_was_not_recorded_is_reported():
    sim = calibrated(Branching(), torch.randn(2, 4))
    assert sim.summary().notes == []
    sim(torch.randn(3, 4))
    assert any("sin" in note for note in sim.summary().notes)


class Positions(nn.Module):
    """Counts in integers with functions that it also computes with, and appends to a cache that starts empty."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.fc = nn.Embedding(10, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1]) + 1
        x = x + self.embedding(positions)
        return self.fc(torch.cat([torch.empty(x.shape[0], 0, 4), x], dim=1))


def test_integer_arithmetic_and_empty_tensors_are_no_operations():
    sim = calibrated(Positions(), torch.randn(2, 5, 4))
    keys = ["embedding.weight", "embedding.output", "input", "add.output", "cat.output", "fc.weight", "fc.output"]
    assert list(sim.quantizers()) == keys
    assert sim.summary().notes == []
    e = sim.encodings()["add.output"]
    seen = []
    sim.quantizers()["cat.output"].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    sim(torch.randn(2, 5, 4))
    assert torch.equal(seen[0], fake_quantize(seen[0], e.scale, e.zero_point, e.quant_min, e.quant_max))


def test_threads_share_a_simulation():
    x = torch.randn(8, 1, 12, 12)
    sim = calibrated(seeded(ConvNet), x)
    expected = [sim(x[i : i + 1]) for i in range(8)]
    found: dict[int, list[Tensor]] = {}

    def work(i: int) -> None:
        found[i] = [sim(x[i : i + 1]) for _ in range(5)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(y, expected[i]) for i in range(8) for y in found[i])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda sim: pickle.loads(pickle.dumps(sim))], ids=["deepcopy", "pickle"])
def test_copies_are_whole_and_independent(copied):
    x = torch.randn(4, 1, 12, 12)
    sim = calibrated(seeded(ConvNet), x)
    other = copied(sim)
    assert torch.equal(other(x), sim(x))
    assert isinstance(other.model, ConvNet)
    other.disable("*")
    assert not torch.equal(other(x), sim(x))
    with other.in_float():
        assert sim.encodings().keys() == sim.quantizers().keys()
        assert not torch.equal(other(x), sim(x))
    used = {id(quantizer) for place in places(other.model) for node in place.planned.plain for _, quantizer in node.outputs}
    assert used <= {id(quantizer) for quantizer in other.quantizers().values()}


def test_the_given_model_is_untouched():
    model, x = seeded(ConvNet), torch.randn(4, 1, 12, 12)
    before, kept = model(x), copy.deepcopy(model.state_dict())
    calibrated(model, x)
    assert type(model) is ConvNet
    assert places(model) == []
    assert torch.equal(model(x), before)
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())


def test_a_branch_that_was_not_seen_does_not_use_anothers_scales():
    model = Forward(lambda m, x: m.a(x) if x.sum() > 0 else m.b(x), a=nn.Linear(6, 6), b=nn.Linear(6, 6)).eval()
    x = torch.rand(8, 6)
    with torch.no_grad():
        model.b.weight.mul_(100)
        sim = qsim.QuantSim(model, x)
        with pytest.warns(UserWarning, match="'b' .* ran where the example inputs did not show it, its weight is quantized"):
            sim.calibrate([x, -x], progress=False)
        found = sim.quantizers()
        assert torch.equal(sim(-x), F.linear(found["input"](-x), found["b.weight"].quantize(model.b.weight), model.b.bias))
    assert any("'b'" in note and "ran where the example inputs did not show it" in note for note in sim.summary().notes)
