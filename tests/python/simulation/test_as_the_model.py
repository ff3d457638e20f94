"""A simulation is asked for more than a call: its model's methods, its config, the signature of its forward."""

import copy
import dataclasses
import gc
import inspect
import io
import pickle
import weakref

import pytest
import torch
from language_model import TOKENS, LanguageModel
from torch import nn

import qsim


@pytest.fixture
def sim():
    torch.manual_seed(0)
    decode = {"input_ids": TOKENS[:, :1], "cache": LanguageModel()(TOKENS)["cache"]}
    sim = qsim.QuantSim(LanguageModel().eval(), [{"input_ids": TOKENS}, decode])
    sim.calibrate([{"input_ids": TOKENS}, decode], progress=False)
    return sim


def loop(call, tokens, count):
    """Greedy decoding written out."""
    logits, cache = [], None
    with torch.no_grad():
        for _ in range(count):
            out = call(input_ids=tokens) if cache is None else call(input_ids=tokens, cache=cache)
            logits.append(out["logits"][:, -1])
            tokens, cache = logits[-1].argmax(-1, keepdim=True), out["cache"]
    return torch.stack(logits, 1)


@pytest.mark.filterwarnings("ignore:QuantSim. 'attention")
def test_the_models_methods_are_simulated(sim):
    generated = sim.generate(TOKENS, 64)
    assert torch.equal(generated, loop(sim, TOKENS, 64))
    with sim.in_float():
        assert not torch.equal(sim.generate(TOKENS, 64), generated)
    for other in (copy.deepcopy(sim), pickle.loads(pickle.dumps(sim)), _saved(sim)):
        assert torch.equal(other.generate(TOKENS, 64), generated)


def _saved(sim):
    file = io.BytesIO()
    torch.save(sim, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_a_method_before_calibration_says_what_a_call_says():
    sim = qsim.QuantSim(LanguageModel().eval(), {"input_ids": TOKENS})
    with pytest.raises(qsim.NoEncodingError, match=r"quantizers have no encoding.*sim\.calibrate"):
        sim.generate(TOKENS, 2)


def test_no_method_runs_in_float_where_integers_are_asked_for():
    sim = qsim.QuantSim(LanguageModel().eval(), {"input_ids": TOKENS}, qsim.int8(target="onnxruntime"))
    sim.calibrate([{"input_ids": TOKENS}], progress=False)
    with sim.integer(), pytest.raises(RuntimeError, match=r"only sim\(\.\.\.\) itself is computed as the runtime does"):
        sim.generate(TOKENS, 2)


def test_the_signature_is_that_of_the_model(sim):
    expected = [*inspect.signature(LanguageModel.forward).parameters]
    assert [*inspect.signature(sim.forward).parameters] == expected[1:]
    assert [*inspect.signature(type(sim).forward).parameters] == expected
    assert isinstance(sim, qsim.QuantSim)
    assert type(sim).__name__ == "QuantSim"
    assert type(copy.deepcopy(sim)) is type(sim)
    assert [*inspect.signature(qsim.QuantSim.forward).parameters] == ["self", "args", "kwargs"]  # the class itself is as it was


def test_config_is_what_was_planned_and_beside_it_the_models(sim):
    assert sim.config == qsim.int8()
    assert qsim.int8() == sim.config
    assert hash(sim.config) == hash(qsim.int8())
    assert sim.config.weight.bits == 8
    assert type(dataclasses.replace(sim.config, bias=True)) is qsim.Config
    assert qsim.Config.from_json(sim.config.to_json()) == copy.deepcopy(sim.config) == pickle.loads(pickle.dumps(sim.config))
    assert sim.config.to_dict() == {"use_cache": True, "model_type": "toy"}
    sim.config.use_cache = False
    assert sim.config.use_cache is sim.model.config.use_cache is False
    assert "cache" not in sim(TOKENS)
    with pytest.raises(AttributeError, match="nothing_has_that"):
        _ = sim.config.nothing_has_that


def test_another_config_is_refused(sim):
    with pytest.raises(AttributeError, match="Make another simulation"):
        sim.config = qsim.int4()
    with pytest.raises(dataclasses.FrozenInstanceError, match=r"dataclasses\.replace"):
        sim.config.weight = None
    assert sim.config == qsim.int8()


def test_a_model_without_config_leaves_it_as_it_is():
    config = qsim.int4()
    assert qsim.QuantSim(nn.Linear(2, 2), torch.zeros(1, 2), config).config is config


def test_what_the_model_has_is_read_and_written_through(sim):
    assert sim.lm_head is sim.model.lm_head
    sim.model.mode = "a"
    sim.mode = "b"  # as transformers' generation_config
    assert sim.model.mode == sim.mode == "b"
    sim.fresh = 3
    assert "fresh" not in vars(sim.model)
    with pytest.raises(AttributeError, match="'QuantSim' object has no attribute 'nothing'"):
        _ = sim.nothing


def test_of_private_names_those_of_the_models_class_are_shown():
    class Library(nn.Linear):
        _supports = True

        def __call_me__(self):
            raise NotImplementedError

        def _asked(self):
            return self.out_features

    sim = qsim.QuantSim(Library(2, 3), torch.zeros(1, 2))
    sim.model._hook_of_another = 1
    assert sim._supports
    assert sim._asked() == 3
    assert not hasattr(sim, "_hook_of_another")
    assert not hasattr(sim, "__call_me__")


def test_own_names_are_never_the_models():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.notes, self.decisions, self.switch, self.calls = 1, 2, 3, 4
            self.layer = nn.Linear(2, 2)

        def forward(self, x):
            return self.layer(x)

    sim = qsim.QuantSim(Odd(), torch.zeros(1, 2))
    assert (sim.model.notes, sim.model.decisions, sim.model.switch, sim.model.calls) == (1, 2, 3, 4)
    assert list(sim.decisions.quantizers) == ["input", "layer.weight", "layer.output"]


def test_replicas_are_refused(sim):
    for module in (sim, sim.model, sim.model.attention):  # what DataParallel does on several devices
        with pytest.raises(RuntimeError, match="DistributedDataParallel"):
            module._replicate_for_data_parallel()
    with pytest.raises(ValueError, match=r"is in DataParallel; simulate its \.module"):
        qsim.QuantSim(nn.DataParallel(LanguageModel()), {"input_ids": TOKENS})


def test_labels_that_no_example_had_leave_the_loss_in_float(sim):
    out = sim(TOKENS, labels=TOKENS)
    expected = nn.functional.cross_entropy(out["logits"][:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())
    assert torch.equal(out["loss"], expected)
    out["loss"].backward()
    assert sim.model.lm_head.weight.grad.norm() > 0.1


def test_weights_that_no_mode_meets_are_told_of():
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.randn(16, 16))

        def forward(self, x):
            return torch.ops.aten.linear(x, self.up)

    with pytest.warns(UserWarning, match="weights stay in float.*'up'"):
        qsim.QuantSim(Experts(), torch.randn(4, 16))


class Named(nn.Module):
    """A model that tells its optimizer about parameters by name, as timm's do."""

    def __init__(self, matcher):
        super().__init__()
        self.matcher = matcher
        self.pos_embed = nn.Parameter(torch.randn(1, 4, 8))
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 2)

    def no_weight_decay(self):
        return {"pos_embed"}

    def group_matcher(self, coarse=False):
        return self.matcher

    def forward(self, x):
        x = x + self.pos_embed
        for block in self.blocks:
            x = block(x).relu()
        return self.head(self.norm(x).mean(1))


def _by_function(name):
    return int(name.split(".")[1]) if name.startswith("blocks.") else 99


MATCHERS = [
    {"stem": "^cls_token|pos_embed", "blocks": [(r"^blocks\.(\d+)", None), ("^norm", (99999,))]},
    {"stem": "pos_embed", "none": None, "blocks": r"^blocks\.(\d+)"},
    _by_function,
]


@pytest.mark.parametrize("matcher", MATCHERS)
def test_what_the_model_says_of_its_parameters_by_name_is_true_of_the_simulations(matcher):
    timm = pytest.importorskip("timm.optim")
    torch.manual_seed(0)
    model = Named(matcher).eval()
    sim = qsim.QuantSim(model, torch.randn(2, 4, 8))

    def groups(module):
        optimizer = timm.create_optimizer_v2(module, "adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.5)
        plain = timm.create_optimizer_v2(module, "adamw", lr=1e-3, weight_decay=0.05)
        names = {id(p): name.removeprefix("model.") for name, p in module.named_parameters()}
        found = [{names[id(p)]: (g["lr_scale"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}]
        return [*found, {names[id(p)]: g["weight_decay"] for g in plain.param_groups for p in g["params"]}]

    expected = groups(model)
    assert len(set(expected[0].values())) > 4
    assert expected[1]["pos_embed"] == 0
    assert groups(sim) == expected
    assert groups(sim.model) == expected


def test_it_goes_by_the_name_of_its_model_and_is_shown_as_a_simulation():
    sim = qsim.QuantSim(torch.nn.Linear(3, 2).eval(), torch.randn(2, 3))
    assert sim._get_name() == "Linear"
    assert str(sim).startswith("QuantSim(\n  (model): Linear(in_features=3, out_features=2, bias=True)")
    assert "(sim): QuantSim(" in str(torch.nn.ModuleDict({"sim": sim}))


def test_a_simulation_that_is_gone_leaves_no_class_behind():
    """Each has a class of its own, and what Dynamo compiled with it."""
    x = torch.randn(2, 3)
    sim = qsim.QuantSim(torch.nn.Linear(3, 2).eval(), x)
    sim.calibrate([x], progress=False)
    sim.note = 1  # asks whether the name is the model's
    left = weakref.ref(type(sim))
    del sim
    gc.collect()
    assert left() is None
