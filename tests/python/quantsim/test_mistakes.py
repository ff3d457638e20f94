"""What people get wrong: the message says what was got, what was expected, and what to write."""

import re
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from first_try import IMAGES, calibrated, network
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

import qsim
from qsim.config.named import PRESETS


class ReturnsNothing(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        self.layer(x)


class TakesPacked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(3, 3)

    def forward(self, packed):
        return pad_packed_sequence(self.layer(packed)[0])[0]


def test_the_name_of_a_preset_is_that_preset():
    assert qsim.QuantSim(network(), IMAGES, "w4a8").config == qsim.w4a8()
    assert set(PRESETS) >= {"int8", "int4", "int16", "w4a8", "fp16", "bf16", "fp8"}


@pytest.mark.parametrize(
    ("config", "error", "says"),
    [
        ("int9", ValueError, "got config='int9'; expected a qsim.Config or the name of a preset: 'int8', .*; close to it: 'int8'"),
        ("tensorrt", ValueError, re.escape("is a target, not a preset; expected a config for it, such as qsim.int8(target='tensorrt')")),
        (qsim.int8, TypeError, re.escape("got the function qsim.int8 as config; expected the config that it makes: qsim.int8()")),
        ({"bits": 8}, TypeError, "got {'bits': 8} as config; expected a qsim.Config"),
        ("w8a8", ValueError, "got config='w8a8'; .*close to it: 'int8'"),
        ("W4A8", ValueError, "close to it: 'w4a8'"),
        ("qsim.int4()", ValueError, "close to it: 'int4'"),
        ("bfloat16", ValueError, "close to it: 'bf16'"),
        ("rules.json", ValueError, re.escape("the name of a file; expected a qsim.Config: qsim.Config.from_json(Path('rules.json')")),
        (qsim.TensorSpec(), TypeError, "got a TensorSpec as config; .*" + re.escape("qsim.Config(weight=spec, activation=spec)")),
    ],
)
def test_what_is_no_config(config, error, says):
    with pytest.raises(error, match=f"QuantSim: .*{says}"):
        qsim.QuantSim(network(), IMAGES, config)


@pytest.mark.parametrize("text", ["rules.json", "[1]", "{} {}"])
def test_what_is_no_json_of_a_config(text):
    with pytest.raises(ValueError, match=r"Config.from_json: got .*; expected (what|the object that) Config.to_json\(\) returns"):
        qsim.Config.from_json(text)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (nn.ReLU, "the class ReLU as model; expected a module: an instance of it"),
        (network().state_dict(), "a state dict as model; expected a module: build the model, then model.load_state_dict"),
        ("model.onnx", "the path 'model.onnx' as model; expected a module: load the model first"),
        (lambda x: x, "a function as model; expected a module"),
        (None, "None as model; expected a module: an instance of torch.nn.Module"),
        (IMAGES, "a tensor as model; expected a module: it comes first, then its inputs"),
    ],
    ids=["class", "state", "path", "function", "none", "tensor"],
)
def test_what_is_no_module(model, says):
    with pytest.raises(TypeError, match=f"QuantSim: got {says}"):
        qsim.QuantSim(model, IMAGES)
    with pytest.raises(TypeError, match=f"qsim.equalize: got {says}"):
        qsim.equalize(model, IMAGES)
    with pytest.raises(TypeError, match=f"qsim.doctor: got {says}"):
        qsim.doctor(model, [IMAGES])


def test_a_model_that_returns_none():
    with pytest.raises(TypeError, match=r"the model returned None for the example inputs; .* Does its forward end without `return`"):
        qsim.QuantSim(ReturnsNothing(), torch.randn(2, 3))
    with pytest.raises(TypeError, match=r"qsim.equalize: the model returned None"):
        qsim.equalize(ReturnsNothing(), torch.randn(2, 3))
    with pytest.raises(TypeError, match=r"qsim.doctor: the model returned None"):
        qsim.doctor(ReturnsNothing(), [torch.randn(2, 3)], progress=False)


def test_example_inputs_without_elements():
    """The plan would lack what reads them."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).eval()
    for given in (model, model[:1]):
        with pytest.raises(ValueError, match=r"QuantSim: example inputs without elements \(a float32 tensor of the shape \(0, 3, 8, 8\)\)"):
            qsim.QuantSim(given, IMAGES[:0])


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        (IMAGES[:, :1], "a float32 tensor of the shape (4, 1, 8, 8). forward takes (input). It raised RuntimeError: Given groups=1"),
        ((IMAGES, IMAGES), "forward takes (input). A tuple holds positional arguments"),
        ({"image": IMAGES}, "image=a float32 tensor of the shape (4, 3, 8, 8). forward takes (input)"),
        ((1, 3, 8, 8), "of a shape make a tensor, torch.randn(shape)"),
        (None, "Give an input, such as torch.randn(1, 3, 224, 224)"),
        (torch.utils.data.DataLoader(IMAGES), "Give the inputs of one batch, such as next(iter(loader))[0]"),
        (IMAGES.double(), "The model computes in torch.float32, an input is torch.float64: convert it"),
        (IMAGES.to(torch.uint8), "The model computes in torch.float32, an input is torch.uint8: convert it"),
        ("image.png", "A str is no tensor: give what forward takes"),
        (iter([IMAGES]), "A list_iterator is no batch: give one, such as next(it)"),
        (
            torch.utils.data.TensorDataset(IMAGES),
            "A data set is no batch: give one, such as next(iter(torch.utils.data.DataLoader(it, 8)))",
        ),
        ((IMAGES, torch.zeros(4)), "A tuple holds positional arguments: give those that forward takes, without targets"),
        ([IMAGES, torch.zeros(2)], "call 1 of the 2 in example_inputs: a float32 tensor of the shape (2,)"),
    ],
    ids=["channels", "two", "keyword", "shape", "none", "loader", "double", "uint8", "text", "iterator", "set", "targets", "batch"],
)
def test_wrong_example_inputs(inputs, says):
    with pytest.raises(ValueError, match="QuantSim: the model does not run on ") as caught:
        qsim.QuantSim(network(), inputs)
    assert says in str(caught.value)
    assert "It raised" in says or str(caught.value).index(says) < str(caught.value).index("It raised")  # before what may be long
    assert caught.value.__cause__ is not None


def test_packed_sequences():
    packed = pack_sequence([torch.randn(4, 3), torch.randn(2, 3)])
    assert isinstance(packed, PackedSequence)
    with pytest.raises(TypeError, match=r"got a PackedSequence among the example inputs; expected tensors: .* call pack_padded_sequence"):
        qsim.QuantSim(TakesPacked(), packed)
    with pytest.raises(TypeError, match=r"qsim.doctor: got a PackedSequence"):
        qsim.doctor(TakesPacked(), [packed], progress=False)


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (None, "returned None; expected a number: does it end without `return`"),
        (torch.zeros(2), r"returned a Tensor of the shape \(2,\); expected a number"),
        ((0.5, 0.6), "returned a tuple; expected a number"),
    ],
    ids=["none", "tensor", "tuple"],
)
def test_what_is_no_number_of_a_metric(result, says):
    def accuracy(sim, data):
        return result

    sim = calibrated()
    for measure in (sim.sensitivity, sim.progressive):
        with pytest.raises(TypeError, match=f"the metric 'accuracy' {says}"):
            measure([IMAGES], accuracy, progress=False)
    with pytest.raises(TypeError, match=f"qsim.quantize: the metric 'accuracy' {says}"):
        qsim.quantize(network(), IMAGES, [IMAGES], accuracy, progress=False)


def test_what_is_no_metric():
    def accuracy(sim):
        return 1.0

    with pytest.raises(TypeError, match=re.escape("got metric='accuracy'; expected a function, metric(sim, data) -> float")):
        calibrated().sensitivity([IMAGES], "accuracy", progress=False)
    with pytest.raises(TypeError, match=r"got metric=a list; expected a function"):  # metric and data, the other way round
        calibrated().sensitivity(lambda sim, data: 1.0, [IMAGES], progress=False)
    says = r"the metric accuracy\(sim\) cannot be called as metric\(sim, data\).*lambda sim, data: accuracy\(sim\)"
    with pytest.raises(TypeError, match=says):
        calibrated().sensitivity([IMAGES], accuracy, progress=False)
    with pytest.raises(ValueError, match="got a metric and forward="):
        calibrated().sensitivity([IMAGES], lambda sim, data: 1.0, forward=lambda model, batch: model(batch), progress=False)


@pytest.mark.parametrize(("opset", "error"), [(13, qsim.ExportError), (999, qsim.ExportError), ("19", TypeError)])
def test_opsets(opset, error, tmp_path):
    says = {13: "got opset=13, .*Leave opset out, or write opset=19", 999: "knows opsets up to", "19": "expected an integer from 19"}
    with pytest.raises(error, match=says[opset]):
        calibrated(qsim.int8(target="onnxruntime")).export(tmp_path / "model.onnx", opset=opset)
    assert not list(tmp_path.iterdir())


def test_what_no_example_reaches_is_warned_of():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.small, self.large = nn.Linear(4, 4), nn.Linear(8, 4)

        def forward(self, x):
            return self.small(x) if x.shape[-1] == 4 else self.large(x)

    with pytest.warns(
        UserWarning, match="no example input reaches 'large': only weights are quantized there, and nothing in a thread that"
    ):
        qsim.QuantSim(Branches(), torch.randn(1, 4))


def test_rows_of_zeros_do_not_hide_the_range():
    model = network()
    with torch.no_grad():
        model[4].weight[1].zero_()
        model[0].weight.zero_()
    rows = {row.key: row for row in calibrated(model=model).summary().rows}
    assert rows["4.weight"].zeros == 1
    assert rows["4.weight"].high == pytest.approx(float(model[4].weight.detach().abs().max()), rel=0.02)
    assert rows["4.weight"].scale[1] < 0.01
    assert rows["4.weight"].remark == "1 channel all zero"
    assert (rows["0.weight"].range, rows["0.weight"].remark) == ("[0, 0]", "all zero")


def test_empty_or_single_verification(tmp_path):
    sim = calibrated(qsim.int8(target="onnxruntime"))
    with pytest.raises(ValueError, match="verify= got no batch"):
        sim.export(tmp_path / "model.onnx", verify=[])
    with pytest.raises(TypeError, match=r"QuantSim.export: got data of type Tensor; expected an iterable of batches"):
        sim.export(tmp_path / "model.onnx", verify=IMAGES)


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no folder '.*nowhere'; make it first"):
        calibrated().summary().save(tmp_path / "nowhere" / "page.html")


def test_a_scripted_model():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.jit.script(network())
    with pytest.raises(TypeError, match=r"got a scripted model, .*; expected the Python module that it was made of"):
        qsim.QuantSim(model, IMAGES)


class TestForward:
    """Batches in dicts that the model does not take."""

    DATA = ({"pixels": IMAGES, "label": 1},)

    @staticmethod
    def forward(model, batch):
        return model(batch["pixels"])

    @pytest.fixture
    def sim(self):
        sim = qsim.QuantSim(network(), IMAGES, qsim.int8(target="onnxruntime"))
        sim.calibrate(self.DATA, self.forward, progress=False)
        return sim

    def test_analysis_takes_it(self, sim):
        plain = sim.sensitivity([IMAGES], progress=False)
        assert sim.sensitivity(self.DATA, forward=self.forward, progress=False) == plain
        assert sim.progressive(self.DATA, order="forward", forward=self.forward, progress=False).steps[-1].value == plain.quantized
        assert sim.float_plan(self.DATA, target=1000.0, forward=self.forward, progress=False).keep == ("input", "0", "2", "4")

    def test_a_single_call_takes_it(self, sim):
        for integer in (False, True):
            assert torch.equal(sim.evaluate(self.DATA[0], self.forward, integer=integer), sim.evaluate(IMAGES, integer=integer))

    def test_the_search_for_bits_takes_it(self, sim):
        options = {"budget": qsim.Budget(size=0.3), "candidates": (4, 8), "probes": 8, "progress": False}
        plain = sim.search_bits([IMAGES], **options)
        assert sim.search_bits(self.DATA, forward=self.forward, **options).best.bits == plain.best.bits

    def test_export_verifies_with_it(self, sim, tmp_path):
        report = sim.export(tmp_path / "model.onnx", verify=self.DATA, forward=self.forward)
        assert [d.mismatching for d in report.verification.differences["on integers", "optimised"].values()] == [0]
        assert next(iter(report.verification.differences["on integers", "optimised"].values())).elements == 16

    def test_equalize_takes_it(self):
        models = [network(), network()]
        qsim.equalize(models[0], IMAGES, [IMAGES], methods=["smooth_quant"])
        qsim.equalize(models[1], IMAGES, self.DATA, methods=["smooth_quant"], forward=self.forward)
        assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))


def test_no_progress_bar_in_a_pipe():
    code = "import torch, qsim; m = torch.nn.Linear(2, 2); s = qsim.QuantSim(m, torch.ones(1, 2)); s.calibrate([torch.ones(4, 2)])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_one_sentence_for_what_is_the_same():
    model = nn.Sequential(*(nn.Sequential(nn.ReLU(), nn.BatchNorm1d(4), nn.ReLU()) for _ in range(5))).eval()
    x = torch.from_numpy(np.ones((2, 4), np.float32))
    summary = qsim.QuantSim(model, x).summary()
    lines = [line for line in str(summary).splitlines() if line.startswith("note: BatchNorm")]
    assert len([note for note in summary.notes if note.startswith("BatchNorm")]) == 5
    assert len(lines) == 1
    assert "(and so of 4 more: '1.1', '2.1', '3.1', ...)" in lines[0]


def test_a_config_that_finds_nothing_to_quantize_is_told():
    convolutions = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval()
    with pytest.warns(UserWarning, match="nothing of this model is quantized.*'linear_layers' leaves weights of Conv in float"):
        qsim.QuantSim(convolutions, IMAGES, qsim.w4a16())
    layers = [nn.Conv2d(3, 256, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 4), nn.Linear(4, 2)]
    says = r"6912 of the 7936 elements of weights stay in float, and no figure .*'linear_layers' leaves weights of Conv in float"
    with pytest.warns(UserWarning, match=says) as caught:
        sim = qsim.QuantSim(nn.Sequential(*layers).eval(), IMAGES, qsim.w8a8_dynamic())
    assert [warning.filename for warning in caught] == [__file__]
    assert list(sim.weights()) == ["4.weight"]


@pytest.mark.parametrize("op_type", ["Conv2d", "conv2d", "Conv"])
def test_operations_go_by_the_names_of_their_class_their_function_and_onnx(op_type):
    sim = qsim.QuantSim(network(), IMAGES, qsim.int8().override(op_type=op_type, weight=None))
    assert [key for key in sim.quantizers() if key.endswith("weight")] == ["4.weight"]


def test_inputs_of_one_value_are_told():
    sim = qsim.QuantSim(network(), IMAGES)
    report = sim.calibrate([torch.full_like(IMAGES, 0.5)] * 2, progress=False)
    assert report.problems[0].startswith("'input' was 0.5 throughout")
    assert not calibrated().calibrate([IMAGES], progress=False).problems


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((IMAGES,), {}, "got path=Tensor; expected a file's name"),
        (("model.onnx",), {"input_names": 5}, r"got input_names=5; expected a list of names, such as \['image'\]"),
        (("model.onnx",), {"output_names": "logits"}, "got output_names='logits'; expected a list"),
    ],
)
def test_arguments_of_export(arguments, options, message):
    with pytest.raises(TypeError, match=message):
        calibrated().export(*arguments, **options)


def test_a_batch_of_another_size_than_the_file_has(tmp_path):
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 4)

        def forward(self, x):
            return self.fc(x.view(len(x) * 1, -1, 8)).sum(1)

    sim = qsim.QuantSim(Counts().eval(), torch.randn(2, 16))
    sim.calibrate([torch.randn(4, 16)], progress=False)
    with pytest.raises(ValueError, match=r"has shape \(4, 16\).*takes \(2, 16\).*verify with batches of those sizes"):
        sim.export(tmp_path / "model.onnx", verify=[torch.randn(4, 16)])


def test_data_in_the_place_of_a_name_is_not_printed():
    """`doctor(model, data, target)`, called as QuantSim is."""
    with pytest.raises(ValueError, match=r"doctor: got target=a list; expected one of 'float32'"):
        qsim.doctor(nn.Linear(4, 2), torch.randn(1, 4), [torch.randn(64, 4)])
    sim = qsim.QuantSim(nn.Linear(4, 2), torch.randn(1, 4))
    sim.calibrate([torch.randn(8, 4)], progress=False)
    with pytest.raises(ValueError, match="got groups=a Tensor; expected one of"):
        sim.sensitivity([torch.randn(8, 4)], groups=torch.randn(64, 4))
