"""AIMET's configuration files, key by key, and what each does to the plan of a model."""

import copy
import json

import pytest
import torch
from blocks import BLOCKS
from models import trained

import qsim
from qsim.config.profile import selects

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))

# In the shape that AIMET documents, with the values that its default file has.
DEFAULT = {
    "defaults": {
        "ops": {"is_output_quantized": "True"},
        "params": {"is_quantized": "True", "is_symmetric": "True"},
        "strict_symmetric": "False",
        "unsigned_symmetric": "True",
        "per_channel_quantization": "True",
    },
    "params": {"bias": {"is_quantized": "False"}},
    "op_type": {"Squeeze": {"is_output_quantized": "False"}, "Pad": {}, "Mean": {"is_output_quantized": "False"}},
    "supergroups": [{"op_list": ["Conv", "Relu"]}, {"op_list": ["Add", "Relu"]}, {"op_list": ["Gemm", "Relu"]}],
    "model_input": {"is_input_quantized": "True"},
    "model_output": {},
}


def changed(path: str, value: object) -> dict:
    """The default file with one value put in, or with the section that holds it."""
    rules = copy.deepcopy(DEFAULT)
    *outer, last = path.split("/")
    place = rules
    for key in outer:
        place = place.setdefault(key, {})
    place[last] = value
    return rules


def planned(name: str, rules: dict, base: qsim.Config | None = None) -> dict:
    torch.manual_seed(0)
    return qsim.QuantSim(trained(BLOCKS[name]()), X, qsim.Config.from_aimet(rules, base)).decisions.quantizers


def specs(name: str, rules: dict, base: qsim.Config | None = None) -> dict[str, qsim.TensorSpec]:
    return {key: quantizer.spec for key, quantizer in planned(name, rules, base).items()}


def test_the_default_file():
    found = planned("resnet", DEFAULT)
    assert found["stem.0.weight"].spec == qsim.TensorSpec(symmetric=True, axis=0, method="minmax")
    assert found["fc.output"].spec == qsim.TensorSpec()
    assert found["layer1.add.output"].op == "add + relu"
    assert [key for key, quantizer in found.items() if quantizer.role == "input"] == ["input"]
    squeeze = planned("squeeze", DEFAULT)
    assert "mean.output" not in squeeze
    assert [squeeze[key].op for key in ("conv.output", "relu6.output", "squeeze.output")] == ["conv2d", "relu6", "conv2d"]
    assert not qsim.QuantSim(trained(BLOCKS["resnet"]()), X, qsim.Config.from_aimet(DEFAULT)).decisions.biases


def test_a_file_is_read_as_its_content_is(tmp_path):
    path = tmp_path / "aimet.json"
    path.write_text(json.dumps(DEFAULT))
    config = qsim.Config.from_aimet(path)
    assert config == qsim.Config.from_aimet(str(path)) == qsim.Config.from_aimet(DEFAULT)
    assert qsim.Config.from_json(config.to_json()) == config
    assert config.profile.name == "aimet"


def test_the_base_has_what_the_file_does_not_say():
    found = specs("resnet", DEFAULT, qsim.w4a8().override("fc", bits=16))
    assert (found["stem.0.weight"].bits, found["stem.0.weight"].method, found["stem.0.output"].bits) == (4, "mse", 8)
    assert found["fc.weight"].bits == 16


def test_symmetry_and_granularity():
    assert not specs("resnet", changed("defaults/params/is_symmetric", "False"))["fc.weight"].symmetric
    assert specs("resnet", changed("defaults/per_channel_quantization", "False"))["fc.weight"].axis is None
    strict = specs("resnet", changed("defaults/strict_symmetric", "True"))["fc.weight"]
    assert (strict.quant_min, strict.quant_max) == (-127, 127)
    one = specs("resnet", changed("op_type/Gemm", {"per_channel_quantization": "False"}))
    assert (one["fc.weight"].axis, one["layer1.conv1.weight"].axis) == (None, 0)
    asymmetric = specs("resnet", changed("op_type/Conv", {"params": {"weight": {"is_symmetric": "False"}}}))
    assert (asymmetric["layer1.conv1.weight"].symmetric, asymmetric["fc.weight"].symmetric) == (False, True)


@pytest.mark.parametrize("unsigned", ["True", "False"])
def test_unsigned_symmetric_is_a_grid_from_zero_where_nothing_is_negative(unsigned):
    rules = changed("defaults/ops/is_symmetric", "True")
    rules["defaults"]["unsigned_symmetric"] = unsigned
    torch.manual_seed(0)
    sim = qsim.QuantSim(trained(BLOCKS["resnet"]()), X, qsim.Config.from_aimet(rules))
    sim.calibrate([X], progress=False)
    sim.set_method("minmax")
    found = sim.encodings()
    assert found["fc.output"].zero_point == 0
    rectified = found["layer1.add.output"]
    largest = sim.quantizers()["layer1.add.output"].max
    steps = 255 if unsigned == "True" else 127  # as AIMET's offset 0 on [0, 255]
    assert rectified.scale == pytest.approx(largest.item() / steps, rel=1e-6)


def test_weights_alone_and_operations_alone():
    off = changed("defaults/params/is_quantized", "False")
    assert not any(key.endswith("weight") for key in planned("resnet", off))
    off["op_type"]["Gemm"] = {"params": {"weight": {"is_quantized": "True"}}}
    assert [key for key in planned("resnet", off) if key.endswith("weight")] == ["fc.weight"]
    without = changed("op_type/Conv", {"params": {"weight": {"is_quantized": "False"}}})
    assert [key for key in planned("resnet", without) if key.endswith("weight")] == ["fc.weight"]


def test_one_operation_only():
    rules = {
        "defaults": {"ops": {}, "params": {}},
        "params": {},
        "op_type": {
            "MatMul": {"is_input_quantized": "True", "is_output_quantized": "True"},
            "Gemm": {"params": {"weight": {"is_quantized": "True"}}},
        },
        "supergroups": [],
        "model_input": {},
        "model_output": {},
    }
    products = ["matmul.input[0]", "matmul.input[1]", "matmul.output", "matmul_2.input[0]", "matmul_2.input[1]", "matmul_2.output"]
    weights = ["qkv.weight", "proj.weight", "up.weight", "down.weight"]
    assert sorted(planned("transformer", rules)) == sorted(products + weights)


def test_inputs_and_outputs_of_the_model():
    assert "input" not in planned("resnet", changed("model_input", {}))
    asked = changed("defaults/ops", {})
    assert set(planned("resnet", changed("defaults/ops", {}))) & {"fc.output", "stem.0.output"} == set()
    asked["model_output"] = {"is_output_quantized": "True"}
    assert {"fc.output"} == {key for key in planned("resnet", asked) if key.endswith("output")}
    assert "fc.output" not in planned("resnet", changed("model_output", {"is_output_quantized": "False"}))


def test_biases():
    rules = changed("params", {})
    torch.manual_seed(0)
    quantized = qsim.QuantSim(trained(BLOCKS["resnet"]()), X, qsim.Config.from_aimet(rules))
    assert "fc.bias" in {bias.parameter for bias in quantized.decisions.biases}
    rules["op_type"]["Gemm"] = {"params": {"bias": {"is_quantized": "False"}}}
    one = qsim.QuantSim(trained(BLOCKS["resnet"]()), X, qsim.Config.from_aimet(rules))
    assert {bias.parameter for bias in quantized.decisions.biases} - {bias.parameter for bias in one.decisions.biases} == {"fc.bias"}


def test_ranges():
    found = planned("transformer", changed("op_type/Softmax", {"encoding_constraints": {"min": 0.0, "max": 1.0}}))
    assert [key for key, quantizer in found.items() if quantizer.range == (0, 1)] == ["softmax.output"]


def test_supported_kernels():
    kernels = [{"activation": {"bitwidth": 16, "dtype": "int"}, "param": {"bitwidth": 8, "dtype": "int"}}]
    found = specs("resnet", changed("op_type/Gemm", {"supported_kernels": kernels}))
    assert (found["fc.output"].bits, found["fc.weight"].bits, found["stem.0.output"].bits) == (16, 8, 8)
    floating = [{"activation": {"bitwidth": 16, "dtype": "float"}, "param": {"bitwidth": 16, "dtype": "float"}}]
    assert specs("resnet", changed("op_type/Add", {"supported_kernels": floating}))["layer1.add.output"].dtype == "float16"
    both = changed("defaults/supported_kernels", [*kernels, *floating])
    with pytest.raises(ValueError, match=r"expected a kernel of .defaults\.supported_kernels."):
        qsim.Config.from_aimet(both)
    assert qsim.Config.from_aimet(both, qsim.fp16()).weight.dtype == "float16"


def test_rules_for_what_a_model_lacks_are_no_notes():
    torch.manual_seed(0)
    rules = changed("op_type/PRelu", {"is_output_quantized": "False", "is_symmetric": "True"})
    assert not any(
        "matches no operation" in note
        for note in qsim.QuantSim(trained(BLOCKS["resnet"]()), X, qsim.Config.from_aimet(rules)).summary().notes
    )


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("default", {}, "got unknown key 'default'; expected one of defaults, params"),
        ("defaults/ops/bits", 8, "got unknown key 'defaults.ops.bits'; expected one of is_input_quantized"),
        ("defaults/ops/is_symmetric", "yes", "got 'yes' for 'defaults.ops.is_symmetric'; expected \"True\" or \"False\""),
        ("params/gamma", {}, "got unknown key 'params.gamma'; expected one of weight, bias"),
        ("op_type/Convolution", {}, "got 'Convolution' for 'op_type.Convolution'; expected an ONNX operator type"),
        ("op_type/Conv", {"is_quantized": "True"}, "got unknown key 'op_type.Conv.is_quantized'"),
        ("op_type/Conv", {"params": {"weight": {"bits": 4}}}, "got unknown key 'op_type.Conv.params.weight.bits'"),
        ("op_type/Reshape", {"is_output_quantized": 1}, "got 1 for 'op_type.Reshape.is_output_quantized'"),
        ("op_type/Conv", [], r"got \[\] for 'op_type.Conv'; expected an object"),
        ("op_type/Tanh", {"encoding_constraints": {"min": 1, "max": -1}}, "for 'op_type.Tanh.encoding_constraints'; expected numbers"),
        ("supergroups", [{"op_list": ["Conv"]}], r"'supergroups\[0\].op_list'; expected two operations or more"),
        ("supergroups", [{"op_list": ["Conv", "Rely"]}], r"got 'Rely' for 'supergroups\[0\].op_list\[1\]'"),
        ("supergroups", {}, "got {} for 'supergroups'; expected a list"),
        ("model_input", {"is_output_quantized": "True"}, "got unknown key 'model_input.is_output_quantized'"),
        (
            "op_type/Conv",
            {"supported_kernels": [{"activation": {"bitwidth": 5}}]},
            r"'op_type.Conv.supported_kernels\[0\].activation.bitwidth'",
        ),
    ],
)
def test_errors_name_file_and_key(path, value, message, tmp_path):
    file = tmp_path / "rules.json"
    file.write_text(json.dumps(changed(path, value)))
    with pytest.raises(ValueError, match=message) as raised:
        qsim.Config.from_aimet(file)
    assert str(file) in str(raised.value)


def test_no_json_is_an_error_that_names_the_file(tmp_path):
    (tmp_path / "rules.json").write_text("{")
    with pytest.raises(ValueError, match=r"rules.json: got no JSON .*expected AIMET"):
        qsim.Config.from_aimet(tmp_path / "rules.json")


def test_patterns_take_types_out_again():
    assert selects(("*", "!Mean"), "Conv")
    assert not selects(("*", "!Mean"), "Mean")
    assert selects(("*", "!Conv*", "ConvTranspose"), "ConvTranspose")
    assert not selects((), "Conv")
