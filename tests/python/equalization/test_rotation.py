"""Rotations: what they do to weights and ranges, and where they are refused."""

import copy

import pytest
import torch
from models import Forward
from torch import nn
from transformer import Transformer, tokens

import qsim
from qsim.equalization import Rotation
from qsim.equalization.orthogonal import hadamard, rotation_matrix


@pytest.mark.parametrize("n", [1, 2, 8, 64])
def test_hadamard(n):
    matrix = hadamard(n)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(n, dtype=torch.float64))
    assert bool((matrix.abs() - n**-0.5).abs().max() < 1e-15)


def test_hadamard_of_other_sizes():
    with pytest.raises(ValueError, match="got n=12; expected a power of two"):
        hadamard(12)


@pytest.mark.parametrize("keeps_mean", [False, True])
@pytest.mark.parametrize("n", [2, 12, 32])
def test_rotation_matrix(n, keeps_mean):
    matrix = rotation_matrix(n, keeps_mean, torch.Generator().manual_seed(0))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(n, dtype=torch.float64))
    ones = torch.ones(n, dtype=torch.float64)
    assert torch.allclose(matrix @ ones, ones) == keeps_mean


@pytest.mark.parametrize("options", [{}, {"rms": True}, {"rms": True, "offset": 1.0, "bias": False}, {"width": 24, "rms": True}])
def test_a_stream_is_rotated(options):
    model = Transformer(**options).eval()
    before, other = copy.deepcopy(model), tokens(5, 20)
    report = qsim.equalize(model, tokens(0, 9), methods=[Rotation(values=False)])
    assert [change.producer for change in report.changes] == ["tokens"]
    assert "the residual stream" not in report.refused
    torch.testing.assert_close(model(other), before(other), rtol=0, atol=2e-5)
    assert float((model.blocks[0].down.weight - before.blocks[0].down.weight).detach().abs().max()) > 0.01
    assert all(bool((norm.weight == 1 - options.get("offset", 0.0)).all()) for norm in (model.norm, model.blocks[1].ln2))
    # an orthogonal matrix keeps the lengths of all rows and columns that it mixes
    torch.testing.assert_close(model.tokens.weight.norm(dim=1), before.tokens.weight.norm(dim=1))


def test_an_outlier_of_the_stream_is_spread():
    model = Transformer(width=64, rms=True).eval()
    with torch.no_grad():
        model.tokens.weight[:, 5] *= 50
    (change,) = qsim.equalize(model, tokens(0, 9), methods=[Rotation(values=False)]).changes
    assert change.before > 4 * change.after


@pytest.mark.parametrize("options", [{}, {"kv": 2}, {"kv": 1, "rms": True}, {"fused": True}, {"fused": True, "kv": 2}])
def test_heads_are_rotated(options):
    model = Transformer(**options).eval()
    before, other = copy.deepcopy(model), tokens(5, 20)
    report = qsim.equalize(model, tokens(0, 9), methods=[Rotation(stream=False)])
    names = "qkv" if options.get("fused") else "v"
    assert [change.producer for change in report.changes] == [f"blocks.{i}.attn.{names}" for i in range(2)]
    torch.testing.assert_close(model(other), before(other), rtol=0, atol=2e-5)
    first, second = before.blocks[0].attn.o.weight.detach(), model.blocks[0].attn.o.weight.detach()
    turned = (first.double().view(32, 4, 8) @ hadamard(8)).flatten(1)  # heads of 8 channels
    torch.testing.assert_close(second.double(), turned, rtol=0, atol=1e-6)


def test_one_token_does_not_tell_heads_apart():
    report = qsim.equalize(Transformer().eval(), tokens(0, 1), methods=[Rotation(stream=False)])
    assert not report.changes
    assert "the heads of 'blocks.0.attn.v' cannot be told apart: give inputs with several tokens" in report.refused["blocks.0.attn.v"]


def test_tied_embeddings_are_refused():
    model = Transformer(bias=False).eval()
    model.head.weight = model.tokens.weight
    before = copy.deepcopy(model.state_dict())
    report = qsim.equalize(model, tokens(0, 9), methods=[Rotation(values=False)])
    assert "the norm 'norm', which reads the residual stream" in report.refused["the residual stream"]
    assert "the weight of 'head' is shared with 'tokens.weight'" in report.refused["norm"]
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())


def embedded(forward, **modules):
    return Forward(forward, tokens=nn.Embedding(50, 8), a=nn.Linear(8, 8), norm=nn.LayerNorm(8), **modules).eval()


REASONS = [
    (Forward(lambda m, x: m.a(x.float()), a=nn.Linear(9, 2)).eval(), "no embedding of tokens"),
    (embedded(lambda m, x: m.a(m.tokens(x))), "is also read by 'a', which is neither a sum nor a norm"),
    (embedded(lambda m, x: m.a(m.norm(m.tokens(x) + 1))), "'add' adds a number to the residual stream"),
    (embedded(lambda m, x: m.tokens(x) + m.a(m.norm(m.tokens.weight.detach()[0]))), "returned by the model"),
    (embedded(lambda m, x: m.a(m.norm(m.tokens(x) + m.a.bias.sin()))), "what 'sin' returns, which is no linear layer"),
    (embedded(lambda m, x: m.norm(m.tokens(x))), "the norm 'norm', which reads the residual stream, is not followed by layers alone"),
]


@pytest.mark.parametrize(("model", "reason"), REASONS, ids=[reason[:20] for _, reason in REASONS])
def test_reasons(model, reason):
    x, other = tokens(0, 9), tokens(1, 9)
    expected = model(other)
    report = qsim.equalize(model, x, methods=["rotation"])
    assert reason in report.refused["the residual stream"]
    assert torch.equal(model(other), expected)
