import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import qsim
from qsim import Config, Override, TensorSpec

PRESETS = {name: getattr(qsim, name)() for name in ("int8", "int4", "int16", "w4a8", "fp16", "bf16", "fp8")}

fields = st.fixed_dictionaries(
    {}, optional={"bits": st.integers(2, 16), "method": st.sampled_from(["mse", "minmax"]), "symmetric": st.booleans()}
)
changes = st.none() | st.builds(TensorSpec, bits=st.integers(2, 16)) | fields
overrides = st.builds(
    Override,
    pattern=st.sampled_from(["*", "layer1.*", "*.conv1", "fc", "layer1.0.conv[12]"]),
    op_type=st.sampled_from([None, "conv2d", "*"]),
    weight=changes,
    activation=changes,
)
configs = st.builds(
    Config, weight=st.none() | st.builds(TensorSpec, axis=st.just(0)), overrides=st.lists(overrides, max_size=5), bias=st.booleans()
)
sites = st.sampled_from([("layer1.0.conv1", "conv2d"), ("layer1.0.add", "add"), ("fc", "linear"), ("input", None)])


@given(configs)
def test_json_is_lossless(config):
    assert Config.from_json(config.to_json()) == config
    assert hash(Config.from_json(config.to_json())) == hash(config)
    assert dataclasses.replace(config) == config


@given(configs, sites, st.sampled_from(["weight", "activation"]))
def test_a_later_override_for_everything_wins(config, site, role):
    before = config.spec_for(*site, role)
    assert config.override("*", off=True).spec_for(*site, role) is None
    after = config.override("*", bits=3).spec_for(*site, role)
    assert after == (None if before is None else dataclasses.replace(before, bits=3))
    spec = TensorSpec(bits=5)
    assert config.override("*", **{role: spec}).spec_for(*site, role) == spec


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name):
    config = PRESETS[name]
    weight, activation = config.weight, config.activation
    widths = {"int8": (8, 8), "int4": (4, 4), "int16": (16, 16), "w4a8": (4, 8), "fp16": (16, 16), "bf16": (16, 16), "fp8": (8, 8)}
    assert (weight.bits, activation.bits) == widths[name]
    if weight.is_float:
        assert weight.dtype == activation.dtype
    else:
        assert (weight.symmetric, weight.axis, weight.quant_min < 0) == (True, 0, True)
        assert (activation.symmetric, activation.axis, activation.quant_min < 0) == (False, None, True)
    assert Config.from_json(config.to_json()) == config


def test_int8_is_the_default():
    assert Config() == qsim.int8()


def test_overrides_resolve_by_site_role_and_type():
    config = (
        qsim.int8()
        .override("layer1.*", bits=4)
        .override("*.conv2", weight={"method": "mse"}, activation=None)
        .override("*", op_type="linear", weight=TensorSpec(bits=6))
        .override("head.*", off=True)
    )
    both = config.spec_for("layer1.0.conv2", "conv2d", "weight")
    assert (both.bits, both.method, both.axis) == (4, "mse", 0)
    assert config.spec_for("layer1.0.conv2", "conv2d", "activation") is None
    assert config.spec_for("layer1.0.add", "add", "activation").bits == 4
    assert config.spec_for("layer2.0.conv1", "conv2d", "weight") == config.weight
    assert config.spec_for("fc", "linear", "weight") == TensorSpec(bits=6)
    assert config.spec_for("fc", None, "weight") == config.weight
    assert config.spec_for("head.0", "linear", "weight") is None


def test_patterns_are_case_sensitive_globs_of_whole_names():
    config = qsim.int8().override("Layer?.conv", bits=4)
    matched = [
        site for site in ("Layer1.conv", "layer1.conv", "Layer1.conv1", "Layer10.conv") if config.spec_for(site, None, "weight").bits == 4
    ]
    assert matched == ["Layer1.conv"]


def test_a_change_of_fields_leaves_off_what_is_off():
    config = qsim.int8().override("fc", off=True).override("*", bits=4)
    assert config.spec_for("fc", "linear", "weight") is None
    assert config.override("fc", weight=TensorSpec()).spec_for("fc", "linear", "weight") == TensorSpec()


def test_the_order_of_fields_is_that_of_the_call_and_values_are_kept_apart():
    change = {"bits": 4}
    config = qsim.int8().override("fc", weight=change)
    change["bits"] = 2
    assert config.spec_for("fc", None, "weight").bits == 4


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.override("fc", bit=4), "unknown field 'bit'"),
        (lambda c: c.override("fc", bits=40), "got bits=40"),
        (lambda c: c.override("fc", off=True, bits=4), "off=True leaves nothing to change; got bits too"),
        (lambda c: c.override("fc", weight=TensorSpec(), bits=4), "decides every field; got bits too"),
        (lambda c: c.override("fc", weight=None, bits=4), "decides every field; got bits too"),
        (lambda c: c.override("fc", activation={"bits": 1}), "got bits=1"),
        (lambda c: c.spec_for("fc", "linear", "bias"), "got role 'bias'"),
        (lambda c: c.override("fc", activation={"block_size": 32}).spec_for("fc", None, "activation"), "'fc'.*activation.*block_size"),
        (lambda c: Config(weight={"bits": 8}), "expected a TensorSpec"),
        (lambda c: Config(overrides=[{"pattern": "fc"}]), "expected Override"),
        (lambda c: Config(bias=1), "got bias=1"),
    ],
)
def test_errors_say_what_was_got(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call(qsim.int8())


@pytest.mark.parametrize(
    ("path", "name"), [((), "wieght"), (("weight",), "bit"), (("overrides", 0), "patern"), (("overrides", 0, "weight"), "Bits")]
)
def test_unknown_keys_are_named_at_every_level(path, name):
    data = json.loads(qsim.int8().override("fc", bits=4).to_json())
    place = data
    for key in path:
        place = place[key]
    place[name] = 1
    with pytest.raises(ValueError, match=f"'{name}'"):
        Config.from_json(json.dumps(data))
