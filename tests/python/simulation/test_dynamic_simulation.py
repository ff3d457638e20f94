"""Simulations with scales from each tensor, and the presets for language models."""

import copy
import pydoc_data.topics

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qsim
from qsim import Quantizer, TensorSpec, reference
from qsim.errors import ExportError

TOKENS = torch.randint(40, (3, 12), generator=torch.Generator().manual_seed(0))
PRESETS = ("w8a8_dynamic", "fp8_dynamic", "mxfp8", "mxfp4", "nvfp4")


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


class LanguageModel(nn.Module):
    def __init__(self, vocabulary=40, width=64):
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.blocks = nn.Sequential(Block(width), Block(width))

    def forward(self, tokens):
        return self.head(self.blocks(self.embedding(tokens)))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return LanguageModel().eval()


def simulated(model, config):
    sim = qsim.QuantSim(model, TOKENS, config)
    sim.calibrate([TOKENS], progress=False)
    return sim


def by_hand(model, quantize_weight, quantize_input):
    """The model with linear layers, but for the head, on weights and inputs that were rounded."""
    copied = copy.deepcopy(model)
    for name, layer in copied.named_modules():
        if isinstance(layer, nn.Linear) and name != "head":
            layer.weight.data = quantize_weight(layer.weight.data)
            layer.register_forward_pre_hook(lambda _, args: (quantize_input(args[0]),))
    return copied(TOKENS)


def rounded(format, **options):
    return lambda x: reference.round_to_format_dynamic(x, format, axis=-1, **options)


_E8M0, _E4M3 = {"block_size": 32, "scale_format": "float8_e8m0fnu"}, {"block_size": 16, "scale_format": "float8_e4m3fn"}
_INT8 = {"axis": -1, "symmetric": True}
BY_HAND = {
    "w8a8_dynamic": lambda x: reference.fake_quantize_dynamic(x, -127, 127, **_INT8),
    "fp8_dynamic": rounded("float8_e4m3fn"),
    "mxfp8": rounded("float8_e4m3fn", **_E8M0),
    "mxfp4": rounded("float4_e2m1fn", **_E8M0),
    "nvfp4": rounded("float4_e2m1fn", **_E4M3),
}


@pytest.mark.parametrize("name", PRESETS)
@torch.no_grad()
def test_a_preset_is_the_simulation_that_one_would_write(model, name):
    """Rows of a weight of a linear layer are its output channels: what is per token for an input is per channel for it."""
    sim = simulated(model, getattr(qsim, name)())
    assert torch.equal(sim(TOKENS), by_hand(model, BY_HAND[name], BY_HAND[name]))


@torch.no_grad()
def test_w4a16_is_groups_of_weights(model):
    def grouped(weight):
        quantizer = Quantizer(TensorSpec(bits=4, symmetric=True, axis=1, block_size=32, method="mse"), weight.shape)
        quantizer.compute_encoding_from(weight)
        return quantizer(weight)

    sim = simulated(model, qsim.w4a16(group=32))
    assert torch.equal(sim(TOKENS), by_hand(model, grouped, lambda x: x))
    assert all(quantizer.spec.block_size == 32 for quantizer in sim.quantizers().values())
    assert any((encoding.zero_point != 0).any() for encoding in simulated(model, qsim.w4a16(32, symmetric=False)).encodings().values())


@pytest.mark.parametrize("name", [*PRESETS, "w4a16"])
def test_embeddings_and_the_head_stay_in_float(model, name):
    config = getattr(qsim, name)()
    assert qsim.Config.from_json(config.to_json()) == config
    assert {key.partition(".")[0] for key in simulated(model, config).quantizers()} == {"blocks"}
    for target in ("onnxruntime", "tensorrt"):
        assert getattr(qsim, name)(target=target).target == target
    with_head = config.override(position="last", weight=config.weight, activation=config.activation)
    assert "head.weight" in simulated(model, with_head).quantizers()


@torch.no_grad()
def test_a_token_of_nan_changes_no_other(model):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 3))
    x = torch.randn(4, 8)
    sim = qsim.QuantSim(layers, x, qsim.w8a8_dynamic())
    sim.calibrate([x], progress=False)
    spoiled = x.clone()
    spoiled[1] = torch.nan
    y = sim(spoiled)
    assert y[1].isnan().all()
    assert torch.equal(y[[0, 2, 3]], sim(x)[[0, 2, 3]])


def test_nothing_but_weights_waits_for_calibration(model, tmp_path):
    config = qsim.w8a8_dynamic()
    sim = qsim.QuantSim(model, TOKENS, config)
    assert all(key.endswith(".weight") for key in sim.missing())
    sim.calibrate([TOKENS], progress=False)
    assert not sim.missing()
    assert not sim.borders().missing
    assert "dynamic, per token" in str(sim.summary())
    y = sim(TOKENS)
    sim.save_encodings(tmp_path / "encodings.json", "qsim")
    loaded, restored = (qsim.QuantSim(model, TOKENS, config) for _ in range(2))
    found = loaded.load_encodings(tmp_path / "encodings.json")
    assert (found.missing, found.unknown) == ([], [])
    restored.load_state_dict(sim.state_dict())
    for other in (loaded, restored, copy.deepcopy(sim)):
        assert torch.equal(other(TOKENS), y)
    sim.set_method("mse")  # of weights: the others have none to choose
    assert sim.quantizers()["blocks.0.up.input[0]"].spec.is_dynamic


def test_what_has_no_fixed_scale_is_refused_by_name(model, tmp_path):
    sim = simulated(model, qsim.fp8_dynamic())
    with sim.integer(), pytest.raises(ValueError, match=r"blocks\.0\.qkv\.input.*dynamic"):
        sim(TOKENS)
    with pytest.raises(ExportError, match="method='dynamic'"):
        sim.export(tmp_path / "model.onnx", target="onnxruntime")
    assert not (tmp_path / "model.onnx").exists()


def test_weights_are_not_dynamic():
    spec = TensorSpec(method="dynamic")
    with pytest.raises(ValueError, match="for weights"):
        qsim.Config(weight=spec)
    with pytest.raises(ValueError, match="for weights"):
        qsim.int8().override("*", method="dynamic").spec_for("fc", "linear", "weight")
    assert qsim.int8().override("*", activation=spec).spec_for("fc", "linear", "activation").is_dynamic


def test_an_override_by_the_name_of_a_block_format():
    config = qsim.int8().override("a", dtype="mxfp4").override("b", dtype="mxfp4").override("b", dtype="int8", axis=0, block_size=None)
    mx, plain = (config.spec_for(site, "linear", "weight") for site in "ab")
    assert (mx.dtype, mx.axis, mx.block_size, mx.scale_format) == ("float4_e2m1fn", -1, 32, "float8_e8m0fnu")
    assert config.spec_for("a", "linear", "activation").is_dynamic  # activations in a block format take their scales from each tensor
    assert not config.spec_for("b", "linear", "activation").is_dynamic
    assert (plain.dtype, plain.bits, plain.axis, plain.block_size, plain.scale_format) == ("int", 8, 0, None, None)


def test_training(model):
    sim = simulated(model, qsim.mxfp4())
    sim.train()
    before = sim(TOKENS).detach()
    loss = F.cross_entropy(sim(TOKENS).flatten(0, 1), TOKENS.flatten())
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in sim.model.parameters())
    with torch.no_grad():
        for p in sim.model.parameters():
            p -= 0.05 * p.grad
    assert F.cross_entropy(sim(TOKENS).flatten(0, 1), TOKENS.flatten()) < loss
    assert not torch.equal(sim(TOKENS), before)


def test_restoring_keeps_scales_that_the_format_stores(model):
    sim = simulated(model, qsim.mxfp4())
    report = sim.restore([TOKENS] * 4, progress=False)
    assert "ranges" in str(report)
    for encoding in sim.encodings().values():
        assert torch.equal(encoding.scale.log2(), encoding.scale.log2().round())


@pytest.fixture(scope="module")
def trained():
    """A model of characters, and what it is judged on: batches of text that comes with Python."""
    text = "".join(pydoc_data.topics.topics.values())[:120_000]
    characters = sorted(set(text))
    ids = torch.tensor([characters.index(c) for c in text])
    torch.manual_seed(0)
    model = LanguageModel(len(characters))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(120):
        drawn = torch.stack([ids[i : i + 33] for i in torch.randint(len(ids) - 10_000, (16,))])
        optimizer.zero_grad()
        F.cross_entropy(model(drawn[:, :-1]).flatten(0, 1), drawn[:, 1:].flatten()).backward()
        optimizer.step()
    return model.eval(), ids[-6401:]


@torch.no_grad()
def nats(model, ids):
    return F.cross_entropy(model(ids[:-1].reshape(-1, 32)).flatten(0, 1), ids[1:]).item()


@pytest.mark.parametrize(
    ("name", "most"), [("w8a8_dynamic", 0.002), ("fp8_dynamic", 0.01), ("w4a16", 0.03), ("nvfp4", 0.05), ("mxfp4", 0.1)]
)
def test_a_language_model_of_characters_loses_little(trained, name, most):
    """In nats a character over the model in float, which learned something: 3.3 nats are what the frequencies of characters alone give."""
    model, ids = trained
    assert nats(model, ids) < 2.8
    assert nats(simulated(model, getattr(qsim, name)()), ids) - nats(model, ids) < most
