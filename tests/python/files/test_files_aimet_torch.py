"""AIMET's files by the names of modules: as `save_encodings_to_json` and an export leave them, written by hand; beside the simulation that
knows the same tensors by other names."""

import json

import pytest
import torch
from aimet_files import TORCH
from command import fine, refused
from models import ConvNet, seeded
from torch import nn

import qsim
from qsim.files import FORMATS

X = torch.randn(4, 1, 16, 16, generator=torch.Generator().manual_seed(1))


def save(path, document):
    path.write_text(json.dumps(document, sort_keys=True, indent=4))
    return path


@pytest.mark.parametrize("version", [None, "0.5.1", "0.6.1", "1.0.0"])
def test_every_layout(tmp_path, version):
    document = dict(TORCH) if version is None else {**TORCH, "version": version, "excluded_layers": ["head"], "quantizer_args": {}}
    file = qsim.load_encodings(save(tmp_path / "model_torch.encodings", document))
    assert (file.format, file.version) == ("aimet-torch", version or "")
    activations = ["output", "conv1.input[0]", "conv1.output", "half.output", "lstm.input[1]", "lstm.output[1]", "several.output"]
    assert list(file.activations) == activations
    assert list(file.parameters) == ["weight", "conv1.weight"]
    encoding = file.encodings["conv1.input[0]"]
    assert (encoding.dtype, encoding.scale.item(), encoding.min.item(), encoding.max.item()) == ("uint8", 0.25, -25.0, 38.75)
    assert file.encodings["conv1.weight"].scale.tolist() == [0.5, 0.125]
    assert file.encodings["half.output"].dtype == "float16"
    assert file.encodings["several.output"].scale.tolist() == [0.5, 2.0]
    assert set(file.extra) == ({"excluded_layers", "quantizer_args"} if version else set())


@pytest.mark.parametrize("format", [format for format in FORMATS if format != "tensorrt-cache"])
def test_it_converts(tmp_path, capsys, format):
    document = {**TORCH, "activation_encodings": {**TORCH["activation_encodings"]}}
    del document["activation_encodings"]["several"]  # an activation with several scales, which the others do not have
    path = save(tmp_path / "model.json", document)
    assert f"as {format}" in fine(capsys, "convert", path, tmp_path / "out", "--format", format)
    there, here = qsim.load_encodings(tmp_path / "out"), qsim.load_encodings(path)
    for name, encoding in there.encodings.items():
        assert encoding.scale.tolist() == here.encodings[name].scale.tolist()
        assert encoding.min.tolist() == here.encodings[name].min.tolist()
    assert "conv1.input[0]" in fine(capsys, "inspect", path)
    assert "format aimet-torch" in fine(capsys, "inspect", path)


ENDS = 'expected an object with "input", "output" or both'
WRONG = [
    ({"activation_encodings": {"conv1": []}}, "entry 'conv1': the module's entry is []", ENDS),
    ({"activation_encodings": {"conv1": {"input": {}, "weight": {}}}}, "is an object with 'input', 'weight'", ENDS),
    ({"activation_encodings": {"conv1": {"output": {"first": {}}}}}, "'output' is an object with 'first'", 'by index: "0", "1" ...'),
    (
        {"activation_encodings": {"conv1": {"output": {"0": None}}}},
        "entry 'conv1.output': the entry is null",
        "expected an object, or a list",
    ),
    ({"activation_encodings": {"conv1": {"output": {"0": {}}}}}, "entry 'conv1.output': has no 'dtype'", "expected it"),
    ({"param_encodings": {"conv1.weight": {"scale": 1.0}}}, "entry 'conv1.weight': the entry is an object with 'scale'", "expected a list"),
    ({"param_encodings": {}, "activation_encodings": 7}, "'activation_encodings' is 7", "expected an object with an entry a name"),
    (
        {"version": "0.9", "activation_encodings": {"a": {"input": {}}}},
        "version of encodings by modules is '0.9'",
        "'0.6.1', '1.0.0', or none",
    ),
    ({"version": {"major": 1}, "encodings": []}, "got version an object with 'major'", "expected format 'qsim-encodings'"),
    ({"encodings": [{"a": [1, 2]}]}, "format and version: got neither", "expected format 'qsim-encodings'"),
    ({"version": "1.0.0", "activation_encodings": {"t": []}}, "'activation_encodings' is an object with 't'", "expected a list of objects"),
]


@pytest.mark.parametrize(("document", "got", "expected"), WRONG)
def test_errors_say_what_was_got_and_expected_in_words(tmp_path, capsys, document, got, expected):
    path = save(tmp_path / "strange.json", document)
    with pytest.raises(qsim.FileFormatError) as caught:
        qsim.load_encodings(path)
    assert got in str(caught.value)
    assert expected in str(caught.value)
    assert "{" not in str(caught.value)
    for command in (("convert", path, tmp_path / "out"), ("inspect", path)):
        assert got in refused(capsys, *command)
    assert not (tmp_path / "out").exists()


def by_modules(sim, rename):
    """What AIMET would write for a simulation, given what it calls the tensors."""
    activations, parameters = {}, {}
    for key, encoding in sim.encodings().items():
        asymmetric = [{
            **{"bitwidth": 8, "dtype": "int", "is_symmetric": str(encoding.symmetric), "scale": scale, "offset": encoding.quant_min - zero},
            **{"min": (encoding.quant_min - zero) * scale, "max": (encoding.quant_max - zero) * scale},
        } for scale, zero in zip(encoding.scale.flatten().tolist(), encoding.zero_point.flatten().tolist(), strict=True)]  # fmt: skip
        if key.endswith(".weight"):
            parameters[key] = asymmetric
        else:
            module, end = rename.get(key, (key.removesuffix(".output"), "output"))
            activations.setdefault(module, {}).setdefault(end, {})["0"] = asymmetric[0]
    return {"activation_encodings": activations, "param_encodings": parameters}


def calibrated(target="default", calibrate=True):
    sim = qsim.QuantSim(seeded(ConvNet), X, qsim.int8(target=target))
    if calibrate:
        sim.calibrate([X], progress=False)
    return sim


@pytest.mark.parametrize("target", ["default", "tensorrt"])
def test_the_tensors_of_a_simulation_by_the_names_of_aimet(tmp_path, target):
    """A chain by its last module, the model's input by its first layer, and what TensorRT reads by the module that makes it."""
    sim, other = calibrated(target), calibrated(target, calibrate=False)
    rename = {"input": ("stem.0", "input"), "stem.0.output": ("stem.2", "output")}
    if target == "tensorrt":
        rename = {key: (key.removesuffix(".input[0]"), "input") for key in sim.encodings() if key.endswith(".input[0]")}
        rename |= {"input": ("stem.0", "input"), "branch.input[0]": ("layer1.1.relu_2", "output")}
    names = dict(sim.decisions.operations)
    chains = {f"{name}.output": (operation.members[-1], "output") for name, operation in names.items() if len(operation.members) > 1}
    path = save(tmp_path / "model.json", by_modules(sim, {**chains, **rename} if target == "default" else rename))
    assert other.load_encodings(path) == ([], [])
    assert other.encodings() == sim.encodings()
    assert torch.equal(other(X), sim(X))


def test_two_names_of_one_tensor(tmp_path):
    sim, other = calibrated(), calibrated(calibrate=False)
    document = by_modules(sim, {"input": ("stem.0", "input")})
    document["activation_encodings"]["stem.2"] = {"output": dict(document["activation_encodings"]["stem.0"]["output"])}
    assert other.load_encodings(save(tmp_path / "same.json", document)) == ([], [])
    document["activation_encodings"]["stem.2"]["output"]["0"] = {
        "bitwidth": 8,
        "dtype": "int",
        "is_symmetric": "False",
        "scale": 9.0,
        "offset": 0,
    }
    with pytest.raises(ValueError, match=r"'stem\.0\.output': the file has 'stem\.0\.output' and 'stem\.2\.output' for it, which differ"):
        other.load_encodings(save(tmp_path / "other.json", document))


def test_a_name_that_could_mean_two_tensors_is_unknown(tmp_path):
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x, y):
            return self.fc(x) + y

    sim = qsim.QuantSim(Sum().eval(), (torch.randn(2, 4), torch.randn(2, 4)), qsim.int8())
    sim.calibrate([(torch.randn(2, 4), torch.randn(2, 4))], progress=False)
    path = save(tmp_path / "model.json", by_modules(sim, {"input[0]": ("fc", "input"), "input[1]": ("add", "input")}))
    with pytest.raises(ValueError, match=r"unknown to the simulation: 'add\.input\[0\]'"):
        sim.load_encodings(path)
    assert sim.load_encodings(path, names={"input[1]": "add.input[0]"}) == ([], [])
