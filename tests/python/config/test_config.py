import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import qsim
from qsim import Config, Override, Profile, SiteInfo, TensorSpec
from qsim.clinic.targets import target_named
from qsim.config.profile import PROFILES
from qsim.trace.runtimes import target_of

PRESETS = {name: getattr(qsim, name)() for name in ("int8", "int4", "int16", "w4a8", "fp16", "bf16", "fp8")}

fields = st.fixed_dictionaries(
    {}, optional={"bits": st.integers(2, 16), "method": st.sampled_from(["mse", "minmax"]), "symmetric": st.booleans()}
)
changes = st.none() | st.builds(TensorSpec, bits=st.integers(2, 16)) | fields
overrides = st.builds(
    Override,
    pattern=st.sampled_from(["*", "layer1.*", "*.conv1", "fc", "layer1.0.conv[12]"]),
    op_type=st.sampled_from([None, "conv2d", "Conv", "*"]),
    position=st.sampled_from([None, "first", "last"]),
    weight=changes,
    activation=changes,
)
targets = st.sampled_from([*PROFILES]) | st.builds(
    Profile,
    name=st.just("mine"),
    chains=st.lists(st.lists(st.sampled_from(["Conv|Gemm", "Relu"]), min_size=2, max_size=3), max_size=3),
    outputs=st.lists(st.sampled_from(["*", "!Softmax", "Conv"])),
    ranges=st.sampled_from([(), (("Tanh", -1.0, 1.0),)]),
    model_output=st.sampled_from([None, True, False]),
    activation=st.sampled_from([{}, {"symmetric": True}]),
    rules=st.lists(overrides, max_size=2),
)
configs = st.builds(
    Config,
    weight=st.none() | st.builds(TensorSpec, axis=st.just(0)),
    overrides=st.lists(overrides, max_size=5),
    bias=st.none() | st.booleans(),
    target=targets,
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
    replaced = config.override("*", **{role: spec}).spec_for(*site, role)
    assert dataclasses.replace(replaced, signed=None) == spec


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


def test_operations_go_by_their_onnx_types_too():
    config = qsim.int8().override(op_type="Conv*", bits=4)
    bits = {op: config.spec_for("x", op, "weight").bits for op in ("conv1d", "conv2d", "conv_transpose2d", "linear", None)}
    assert bits == {"conv1d": 4, "conv2d": 4, "conv_transpose2d": 4, "linear": 8, None: 8}


def test_a_predicate_decides_by_all_that_is_known_of_a_site():
    config = qsim.int8().override(lambda site: site.weight_shape is not None and site.weight_shape[1] == 1, bits=4)
    depthwise, plain = SiteInfo("a", "conv2d", "Conv2d", (8, 1, 3, 3)), SiteInfo("b", "conv2d", "Conv2d", (8, 8, 3, 3))
    assert [config.spec_of(site, "weight").bits for site in (depthwise, plain, SiteInfo("add", "add"))] == [4, 8, 8]
    with pytest.raises(ValueError, match=r"predicate .<lambda>.*is code and has no JSON; use a glob, op_type or position"):
        config.to_json()


def test_positions():
    config = qsim.int4().override(position="first", bits=8).override("fc", position="last", off=True)
    first, last = SiteInfo("stem", "conv2d", is_first=True), SiteInfo("fc", "linear", is_last=True)
    assert (config.spec_of(first, "weight").bits, config.spec_of(last, "weight")) == (8, None)
    assert config.spec_for("fc", "linear", "weight").bits == 4
    assert Config.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        *((f"int{bits}", {"dtype": "int", "bits": bits, "signed": True}) for bits in (2, 3, 4, 8, 16)),
        ("uint8", {"dtype": "int", "bits": 8, "signed": False}),
        ("fp16", {"dtype": "float16", "bits": 16}),
        ("bf16", {"dtype": "bfloat16", "bits": 16}),
        ("fp8", {"dtype": "float8_e4m3fn", "bits": 8}),
        ("float8_e5m2", {"dtype": "float8_e5m2", "bits": 8}),
    ],
)
def test_short_names_of_formats(dtype, expected):
    for base in (qsim.int8(), qsim.fp16()):
        spec = base.override("fc", dtype=dtype).spec_for("fc", None, "activation")
        assert {name: getattr(spec, name) for name in expected} == expected
    config = qsim.int8().override("fc", dtype="float").override("head", weight={"dtype": "float"})
    assert (
        config.spec_for("fc", None, "weight")
        is config.spec_for("fc", None, "activation")
        is config.spec_for("head", None, "weight")
        is None
    )
    assert config.spec_for("head", None, "activation") == config.activation


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("target", [name for name in PROFILES if name != "default"])
def test_a_target_decides_grids_of_integers(name, target):
    config = getattr(qsim, name)(target=target)
    assert config.profile.name == config.target == target
    assert Config.from_json(config.to_json()) == config
    if not config.weight.is_float:
        assert (config.weight.symmetric, config.weight.signed) == (True, True)
        symmetric = target in ("tensorrt", "coreml")
        signed = symmetric or target == "executorch"
        assert (config.activation.symmetric, config.activation.signed) == (symmetric, signed)
        whole = config.override("*", activation=TensorSpec(bits=5)).spec_for("x", None, "activation")
        assert (whole.bits, whole.symmetric, whole.signed) == (5, False, signed)  # what it leaves open is the target's
        assert dataclasses.replace(PRESETS[name], target=target) == config
    else:
        assert config.weight == PRESETS[name].weight


def test_a_profile_of_a_target_is_the_target():
    assert Config(target=PROFILES["tensorrt"]) == Config(target="tensorrt")
    mine = dataclasses.replace(PROFILES["tensorrt"], outputs=("Conv",))
    assert Config(target=mine).target == mine


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
        (lambda c: Config(target="tensor-rt"), "got target='tensor-rt'; expected a Profile or one of 'default', 'onnxruntime'"),
        (lambda c: c.override(7, bits=4), "got pattern=7; expected a glob, or a function"),
        (lambda c: c.override(position="second"), "got position='second'; expected 'first', 'last'"),
        (lambda c: c.override("fc", dtype="int4", bits=8), "dtype='int4' says bits=4; got bits=8 too"),
        (lambda c: c.override("fc", dtype="float", bits=8), "dtype='float' leaves nothing to change; got bits too"),
        (lambda c: qsim.fp16().override("fc", bits=8).spec_for("fc", None, "weight"), "bits=8 says nothing about float16"),
        (lambda c: Profile("x", outputs="Conv"), r"got outputs='Conv'; expected a tuple: \('Conv',\)"),
        (lambda c: Profile("x", ranges=[("Tanh", 1, -1)]), "expected its lower end below"),
        (lambda c: Profile("x", activation={"bit": 8}), "unknown field 'bit'"),
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


class TestNamesOfTargets:
    """One list: a config, an export, the doctor and the command line take the same names."""

    def test_with_a_precision(self):
        assert qsim.int8(target="tensorrt-int8") == qsim.int8(target="tensorrt")
        assert qsim.fp16(target="tensorrt-fp16") == qsim.fp16(target="tensorrt")

    @pytest.mark.parametrize(
        ("make", "says"),
        [
            (lambda: qsim.int8(target="tensorrt-fp16"), r"for a config of int8; .*qsim\.fp16\(target='tensorrt'\)"),
            (lambda: qsim.fp16(target="tensorrt-int8"), r"for a config of float16; .*qsim\.int8\(target='tensorrt'\)"),
            (lambda: qsim.int4(target="tensorrt-int8"), "for a config of int4"),
            (lambda: Config(target="tensort"), "close to it: 'tensorrt'"),
            (lambda: Config(target=None), "got target=None; expected a Profile or one of"),
        ],
    )
    def test_errors(self, make, says):
        with pytest.raises(ValueError, match=says):
            make()

    def test_the_doctor_has_them(self):
        for name, profile in PROFILES.items():
            if name != "default":
                target = target_named(name)
                assert target is target_named(f"{name}-int8")
                assert target.int32_bias == bool(profile.bias)
        with pytest.raises(ValueError, match=r"doctor: got target='tensorrt-int4'; expected one of .*'tensorrt', "):
            target_named("tensorrt-int4")

    def test_an_export_has_them(self):
        assert target_of("tensorrt-int8", qsim.int8()) is target_of("tensorrt", qsim.int8())
        with pytest.raises(ValueError, match=r"QuantSim\.export: got target='tensorrt-fp16' for a config of int8"):
            target_of("tensorrt-fp16", qsim.int8())
