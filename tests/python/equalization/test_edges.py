"""Which channels can be scaled, by hand; and the reason for every layer that cannot."""

import pytest
import torch
import torch.nn.functional as F
from models import Forward
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from transformer import OwnNorm, Transformer, tokens

import qsim
from qsim.equalization.candidates import find_candidates
from qsim.equalization.edge_finder import find_edges
from qsim.graph.record.record import record
from qsim.graph.record.uses import Uses
from qsim.runs.arguments import example_calls


def edges_of(model, *inputs):
    calls = example_calls(inputs)
    tape, _ = record(model.eval(), calls)
    candidates, refused = find_candidates(model, tape, Uses(model, tape))
    edges, others = find_edges(model, candidates, calls)
    return {edge.producer: edge for edge in edges}, {**refused, **others}


def reads(model, *inputs):
    """By producer and reader, the producer's channel that each input channel is."""
    edges, _ = edges_of(model, *inputs)
    return {(edge.producer, reader): index.tolist() for edge in edges.values() for reader, index in edge.readers.items()}


def test_flattened_positions():
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 2))
    assert reads(model, torch.randn(2, 1, 6, 6)) == {("0", "4"): [0] * 4 + [1] * 4 + [2] * 4}


def test_permuted_channels():
    model = nn.Sequential(nn.Conv2d(1, 4, 1), nn.ChannelShuffle(2), nn.Conv2d(4, 2, 1, groups=2))
    assert reads(model, torch.randn(2, 1, 5, 5)) == {("0", "2"): [0, 2, 1, 3]}


def test_several_producers_and_readers():
    def forward(m, x):
        y = torch.cat([F.relu(m.a(x)), F.leaky_relu(m.b(x))], 1)
        return m.c(y) + m.d(y)

    model = Forward(forward, a=nn.Linear(3, 2), b=nn.Linear(3, 3), c=nn.Linear(5, 2), d=nn.Linear(5, 2))
    first, second = [0, 1, -1, -1, -1], [-1, -1, 0, 1, 2]
    expected = {("a", "c"): first, ("a", "d"): first, ("b", "c"): second, ("b", "d"): second}
    assert reads(model, torch.randn(4, 3)) == expected


def test_squeeze_and_excitation():
    def forward(m, x):
        y = F.relu(m.a(x))
        return m.c(y * torch.sigmoid(m.se(y.mean((2, 3), keepdim=True))))

    model = Forward(forward, a=nn.Conv2d(1, 3, 1), se=nn.Conv2d(3, 3, 1), c=nn.Conv2d(3, 2, 1))
    found = reads(model, torch.randn(2, 1, 4, 4))
    assert found == {("a", "se"): [0, 1, 2], ("a", "c"): [0, 1, 2]}


def test_heads_that_share_values():
    model = Transformer(width=8, heads=4, kv=2, layers=1)
    assert reads(model, tokens(0, 5))["blocks.0.attn.v", "blocks.0.attn.o"] == [0, 1, 0, 1, 2, 3, 2, 3]


def test_values_in_one_layer_with_queries_and_keys():
    model = Transformer(width=8, heads=2, kv=2, layers=1, fused=True)
    assert reads(model, tokens(0, 5))["blocks.0.attn.qkv", "blocks.0.attn.o"] == list(range(16, 24))
    model = Transformer(width=8, heads=4, kv=2, layers=1, fused=True)
    assert reads(model, tokens(0, 5))["blocks.0.attn.qkv", "blocks.0.attn.o"] == [12, 13, 12, 13, 14, 15, 14, 15]


@pytest.mark.parametrize(("order", "expected"), [(lambda a, b: F.silu(a) * b, [4, 5, 6, 7]), (lambda a, b: a * F.silu(b), [0, 1, 2, 3])])
def test_gate_in_one_layer(order, expected):
    model = Forward(lambda m, x: m.down(order(*m.up(x).chunk(2, -1))), up=nn.Linear(3, 8), down=nn.Linear(4, 3))
    assert reads(model, torch.randn(4, 3)) == {("up", "down"): expected}


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_norm_with_a_forward_of_its_own(offset):
    edges, _ = edges_of(nn.Sequential(OwnNorm(4, offset), nn.Linear(4, 2)), torch.randn(3, 4))
    assert edges["0"].offset == offset


class Squared(OwnNorm):
    def forward(self, x):
        return super().forward(x) * self.weight


class Halving(nn.Linear):
    def forward(self, x):
        return super().forward(x) - self.bias / 2


class Flipped(nn.Linear):
    def forward(self, x):
        return super().forward(x.flip(-1))


class Extended(nn.Linear):
    def forward(self, x):
        return super().forward(F.pad(x, [0, 1], value=1.0))


class Padded(nn.Conv2d):
    """As timm's Conv2dSame: pads by itself."""

    def forward(self, x):
        return F.conv2d(F.pad(x, [0, 1, 0, 1]), self.weight, self.bias)


def test_a_layer_with_a_forward_of_its_own():
    model = nn.Sequential(Padded(1, 3, 2), nn.ReLU(), Padded(3, 2, 2))
    assert reads(model, torch.randn(2, 1, 4, 4)) == {("0", "2"): [0, 1, 2]}


LINEAR = {"a": lambda: nn.Linear(4, 4), "b": lambda: nn.Linear(4, 4), "c": lambda: nn.Linear(4, 4)}
REASONS = [
    (lambda m, x: m.b(F.gelu(m.a(x))), {}, "gelu of a scaled value is not the scaled gelu of it"),
    (lambda m, x: m.b(F.relu6(m.a(x))), {}, "relu6 of a scaled value"),
    (lambda m, x: m.b(m.a(x) + x), {}, "is also read by 'add', which adds to it what is not scaled"),
    (lambda m, x: m.b(m.a(x).softmax(-1)), {}, "softmax of a scaled value"),
    (lambda m, x: (m.a(x), m.b(m.a(x))), {}, "'a' is called 2 times in one forward"),
    (lambda m, x: m.b(m.b(F.relu(m.a(x)))), {}, "'b' is called 2 times in one forward"),
    (lambda m, x: _both(m, x), {}, "is returned by the model"),
    (lambda m, x: m.b(m.a(x)) * m.a.weight.sum(), {}, "the weight of 'a' is also read by 'sum'"),
    (lambda m, x: m.b(F.relu(m.a(x))), {"a": lambda: weight_norm(nn.Linear(4, 4))}, "the weight of 'a' is computed anew in each call"),
    (lambda m, x: m.b(F.relu(m.a(x))), {"b": lambda: weight_norm(nn.Linear(4, 4))}, "whose weight is computed anew in each call"),
    (lambda m, x: m.b(F.relu(m.a(x))), {"a": lambda: Halving(4, 4)}, "'a' (Halving) has a forward of its own, which uses weight and bias"),
    (lambda m, x: m.b(F.relu(m.a(x))), {"b": lambda: Flipped(4, 4)}, "'b' (Flipped) has a forward of its own, which does not scale"),
    (lambda m, x: m.b(F.relu(m.a(x))), {"b": lambda: Extended(5, 4)}, "'b' (Extended) has a forward of its own, which does not scale"),
    (lambda m, x: m.c(m.b(m.n(y := m.a(x).flip(0))) + y), {"n": lambda: nn.LayerNorm(4)}, "is read by 'n': layer_norm of a"),
    (lambda m, x: m.b(m.a(x)), {"a": lambda: Squared(4)}, "'a' (Squared) does not end with a multiplication by its weight"),
    (lambda m, x: m.b(m.a(x).cumsum(-1)), {}, "cumsum of a scaled value"),
    (lambda m, x: m.b(m.a(x) @ torch.ones(4, 4)), {}, "'b' does not read each channel of 'a' by itself"),
    (lambda m, x: m.b(m.a(x) * m.a(x.flip(0))), {}, "'a' is called 2 times in one forward"),
    (lambda m, x: m.b(_square(m.a(x))), {}, "'b' does not read each channel of 'a' by itself behind mul"),
    (lambda m, x: F.linear(m.a(x), m.b.weight * 2), {}, "with a weight that is no layer's|computed anew"),
    (lambda m, x: m.b(torch.zeros(3, 4) * m.a(x)), {}, "'b' reads zeros alone in 4 channels, first in 0"),
    (lambda m, x: m.b(m.a(x)) if m.a(x).max() > 0 else x, {}, "called 2 times"),
    (lambda m, x: _asked(m, m.a(x)), {}, "read out as a mask or number"),
]


def _both(m, x):
    y = m.a(x)
    return y, m.b(y)


def _square(y):
    return y * y


def _asked(m, y):
    return m.b(y) if y.max() > -1e9 else y


@pytest.mark.parametrize(("forward", "layers", "reason"), REASONS, ids=[str(i) for i in range(len(REASONS))])
def test_reasons(forward, layers, reason):
    torch.manual_seed(0)
    model = Forward(forward, **{name: make() for name, make in {**LINEAR, **layers}.items()}).eval()
    x, other = torch.randn(3, 4), torch.randn(3, 4)
    expected = model(other)
    report = qsim.equalize(model, x, [x], methods=["cross_layer", "smooth_quant"])
    assert any(part in report.refused["a"] for part in reason.split("|")), report.refused
    assert report.put_back == ""
    for found, wanted in zip(_tuple(model(other)), _tuple(expected), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def _tuple(out):
    return out if isinstance(out, tuple) else (out,)


def test_shared_weights():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[4].weight = model[0].weight
    report = qsim.equalize(model, torch.randn(3, 4))
    assert report.refused["0"] == "the weight of '0' is shared with '4.weight'"
    assert "the weight of '4' is shared with '0.weight'" in report.refused["2"]


def test_a_batch_norm_that_was_not_folded():
    model = nn.Sequential(nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1)).eval()
    report = qsim.equalize(model, torch.randn(2, 2, 4, 4), [torch.randn(2, 2, 4, 4)], methods=["smooth_quant"])
    assert "is read by BatchNorm '1', which was not folded" in report.refused["0"]
    assert [change.producer for change in report.changes] == ["1"]  # itself it is a norm


def test_what_is_kept_in_a_buffer_is_refused():
    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.register_buffer("last", torch.zeros(3, 4))

        def forward(self, x):
            y = F.relu(self.a(x).flip(0))
            out = self.b(y) + self.last.mean()
            self.last.copy_(y)
            return out

    report = qsim.equalize(Keeping().eval(), torch.randn(3, 4))
    assert report.refused["a"] == "what it returns is kept in the buffer 'last'"


def test_what_training_alone_reads_is_no_slice():
    def forward(m, x):
        y = m.a(x).flip(0)
        out = m.b(y)
        return out + F.gelu(y) if m.training else out

    report = qsim.equalize(Forward(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4)).eval(), torch.randn(3, 4))
    assert "gelu of a scaled value is not the scaled gelu of it" in report.refused["a"]


def test_hooks_are_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[0].register_forward_hook(lambda m, args, out: None)
    assert qsim.equalize(model, torch.randn(3, 4)).refused["0"] == "'0' has hooks, which would see other tensors"


def test_a_residual_that_is_read_through_a_norm_is_no_slice():
    """What a producer returns permuted, to a layer and to a sum: half of it is not the layer's alone, though norms hide the sum."""

    def forward(m, x):
        y = m.a(x).flip(0)
        return m.c(m.n(y + m.b(y)))

    model = Forward(forward, **{name: make() for name, make in LINEAR.items()}, n=nn.LayerNorm(4))
    _, refused = edges_of(model, torch.randn(3, 4))
    assert "is also read by 'add'" in refused["a"]
