"""Keys and values are quantized as if each had been where it was written to the cache, whatever the cache is made of."""

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from language_model import TOKENS, LanguageModel
from torch import nn

import qsim
from qsim import reference


def only(cache):
    return dataclasses.replace(qsim.w4a16(kv_cache=cache), weight=None)


def by_token(x, bits):
    return reference.fake_quantize_dynamic(x, -(1 << bits - 1), (1 << bits - 1) - 1, axis=-1)


class Attention(nn.Module):
    """Attention by hand or fused, with a cache of one of several kinds; `written` is done to what is written into it, once."""

    def __init__(self, fused=True, kind="cat", turned=False):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(16, 16) for _ in range(3))
        self.fused, self.kind, self.turned = fused, kind, turned
        if kind == "buffers":
            self.register_buffer("keys", torch.zeros(2, 2, 24, 8), persistent=False)
            self.register_buffer("values", torch.zeros(2, 2, 24, 8), persistent=False)

    def written(self, keys, values):
        return keys, values

    def forward(self, x, cache=None, start=0):
        q, k, v = (p(x).unflatten(-1, (2, 8)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        k, v = self.written(k, v)
        end = start + x.shape[1]
        if self.kind == "buffers":
            self.keys[:, :, start:end], self.values[:, :, start:end] = k, v
            k, v = self.keys[:, :, :end], self.values[:, :, :end]
        elif self.kind == "given":
            k, v = cache.update(k, v, start)
        elif cache is not None:
            k, v = (torch.cat([old, new], -2) for old, new in zip(cache, (k, v), strict=True))
        kept = (k, v)
        if self.turned:
            k = k * torch.linspace(0.5, 1, k.shape[-2]).unsqueeze(-1)
        if self.fused:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=start == 0)
        else:
            scores = torch.matmul(q, k.transpose(-2, -1)) * 8**-0.5
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(start)
            out = torch.matmul(scores.masked_fill(~mask, float("-inf")).softmax(-1), v)
        return (out, kept) if self.kind == "cat" else out


class ByHand(Attention):
    keys_bits = values_bits = 8

    def written(self, keys, values):
        return by_token(keys, self.keys_bits), by_token(values, self.values_bits)


class Preallocated:
    def __init__(self):
        self.keys, self.values = torch.zeros(2, 2, 24, 8), torch.zeros(2, 2, 24, 8)

    def update(self, keys, values, start):
        places = torch.arange(start, start + keys.shape[-2])
        self.keys.index_copy_(2, places, keys), self.values.index_copy_(2, places, values)
        return self.keys[:, :, : start + keys.shape[-2]], self.values[:, :, : start + keys.shape[-2]]


def steps(model, kind):
    """Outputs of a prefill of 5 tokens, and of 10 more, one at a time."""
    x = torch.randn(2, 15, 16, generator=torch.Generator().manual_seed(3)).exp()
    cache, found, start = Preallocated() if kind == "given" else None, [], 0
    with torch.no_grad():
        for end in range(5, 16):
            out = model(x[:, start:end], **({} if cache is None else {"cache": cache}), start=start)
            out, cache = out if kind == "cat" else (out, cache)
            found.append(out)
            start = end
    return torch.cat(found, -2)


def examples(kind):
    x = torch.randn(2, 5, 16)
    if kind == "given":
        return [{"x": x, "cache": Preallocated()}]
    decode = {"x": x[:, :1], "start": 5} | ({"cache": (torch.randn(2, 2, 5, 8),) * 2} if kind == "cat" else {})
    return [{"x": x}, decode]


@pytest.mark.parametrize("kind", ["cat", "buffers", "given"])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("bits", [(8, 8), (4, 4), (2, 2), (8, 4)])
def test_reading_is_quantizing_where_it_is_written(kind, fused, bits):
    torch.manual_seed(0)
    hand = ByHand(fused, kind).eval()
    hand.keys_bits, hand.values_bits = bits
    model = Attention(fused, kind).eval()
    model.load_state_dict(hand.state_dict())
    in_float = steps(copy.deepcopy(model), kind)
    sim = qsim.QuantSim(model, examples(kind), only(bits))
    assert len(sim.quantizers()) == 2
    got = steps(sim, kind)
    assert torch.equal(got, steps(hand, kind))
    assert not torch.equal(got, in_float)


@pytest.mark.parametrize("fused", [True, False])
def test_keys_per_channel_have_calibrated_scales(fused):
    """Keys of 4 bits with a scale for each channel of head_dim, which heads and tokens share."""
    torch.manual_seed(0)
    model = Attention(fused).eval()
    sim = qsim.QuantSim(model, examples("cat"), only((qsim.TensorSpec(bits=4, axis=-1, method="minmax"), None)))
    x = torch.randn(2, 9, 16)
    sim.calibrate([{"x": x}], progress=False)
    (encoding,) = (quantizer.encoding for quantizer in sim.quantizers().values())
    keys = model.k_proj(x).unflatten(-1, (2, 8)).detach()
    low, high = keys.amin((0, 1, 2)).clamp(max=0), keys.amax((0, 1, 2)).clamp(min=0)
    torch.testing.assert_close(encoding.scale, (high - low) / 15)

    class PerChannel(Attention):
        def written(self, keys, values):
            return reference.fake_quantize(keys, encoding.scale, encoding.zero_point, -8, 7, axis=3), values

    hand = PerChannel(fused).eval()
    hand.load_state_dict(model.state_dict())
    assert torch.equal(steps(sim, "cat"), steps(hand, "cat"))


@pytest.mark.filterwarnings("ignore:QuantSim. 'attention.cat")
def test_a_language_model_generates_by_hand_written_numbers():
    torch.manual_seed(0)
    model = LanguageModel().eval()
    sim = qsim.QuantSim(model, {"input_ids": TOKENS}, qsim.w8a8_dynamic(kv_cache=4))
    sim.calibrate([{"input_ids": TOKENS}], progress=False)
    plain = qsim.QuantSim(model, {"input_ids": TOKENS}, qsim.w8a8_dynamic())
    plain.calibrate([{"input_ids": TOKENS}], progress=False)
    attention = plain.model.attention
    for projection in (attention.k_proj, attention.v_proj):
        projection.register_forward_hook(lambda _, __, out: by_token(out.unflatten(-1, (2, 8)), 4).flatten(-2))
    ours, theirs = sim.generate(TOKENS, 64), plain.generate(TOKENS, 64)
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))
    assert torch.equal(ours, theirs)


def test_what_is_in_no_cache_is_left_in_float_by_name():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = Attention(), Attention()

        def forward(self, x):
            return self.decoder(self.encoder(x)[0].transpose(1, 2).flatten(2))

    sim = qsim.QuantSim(Two().eval(), torch.randn(2, 5, 16), only(8))
    assert all(key.startswith("decoder.") for key in sim.quantizers())
    left = {entry.name for entry in sim.summary().left if "cache" in entry.reason}
    assert left == {f"encoder.scaled_dot_product_attention.input[{slot}]" for slot in (1, 2)}


def test_what_cannot_be_simulated_is_refused_by_name():
    with pytest.raises(ValueError, match="no example shows attention"):
        qsim.QuantSim(nn.Linear(4, 4).eval(), torch.randn(2, 4), only(8))
    with pytest.raises(ValueError, match="the keys that 'matmul' reads are not in the cache as they are read"):
        qsim.QuantSim(Attention(fused=False, turned=True).eval(), torch.randn(2, 5, 16), only(8))
    sim = qsim.QuantSim(Attention(fused=False, turned=True).eval(), torch.randn(2, 5, 16), only((None, 8)))
    assert [*sim.quantizers()] == ["matmul_2.input[1]"]
    with pytest.raises(ValueError, match=r"input\[1\]' is quantized as an activation already, on target 'default'"):
        qsim.QuantSim(Attention().eval(), torch.randn(2, 5, 16), dataclasses.replace(qsim.int8(), kv_cache=8))


@pytest.mark.parametrize("way", ["einsum", "keys first"])
def test_a_cache_that_is_read_otherwise_is_refused_by_name(way):
    class Otherwise(nn.Module):
        def __init__(self):
            super().__init__()
            self.fused, self.k_proj, self.v_proj = Attention(), nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x):
            out, cache = self.fused(x)
            q, k, v = self.fused.q_proj(x), self.k_proj(x), self.v_proj(x)
            if way == "einsum":
                return torch.einsum("bij,bjd->bid", torch.einsum("bid,bjd->bij", q, k).softmax(-1), v), out, cache, k, v
            return torch.matmul(torch.matmul(k, q.transpose(1, 2)).transpose(1, 2).softmax(-1), v), out, cache, k, v

    with pytest.raises(ValueError, match=r"the keys that '(einsum|matmul)' reads"):
        qsim.QuantSim(Otherwise().eval(), torch.randn(2, 5, 16), only(8))


def test_examples_are_used_as_they_were_given():
    class Growing:
        def __init__(self):
            self.kept = [torch.zeros(2, 16)]
            self.kept.append(nn.Parameter(torch.ones(2, 16)) * 2)  # in a graph: such a tensor refuses to be deep-copied

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(16, 16)

        def forward(self, x, cache, lines):
            cache.kept[0].add_(1)
            cache.kept.append(self.fc(x))
            return torch.cat(cache.kept).sum(0)

    cache = Growing()
    sim = qsim.QuantSim(Net().eval(), {"x": torch.randn(2, 16), "cache": cache, "lines": (line for line in "ab")})
    assert len(cache.kept) == 2
    assert not cache.kept[0].any()
    assert any("argument of type generator cannot be copied" in note for note in sim.summary().notes)
