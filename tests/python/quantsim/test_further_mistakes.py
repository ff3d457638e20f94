"""What a first user gets wrong beyond `test_mistakes.py`: names of arguments, the order of calls, what is set in vain."""

import re
import warnings
from pathlib import Path

import pytest
import torch
from first_try import IMAGES, calibrated, network
from torch import nn

import qsim


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            lambda: qsim.QuantSim(network(), IMAGES, bits=4),
            "QuantSim: got the argument 'bits'; expected QuantSim(model, example_inputs, config=None",
        ),
        (lambda: qsim.QuantSim(network(), IMAGES, target="tensorrt"), "is the config: qsim.int8(target='tensorrt')"),
        (lambda: qsim.QuantSim(network(), IMAGES, device="cuda"), "the device is the model's: model.to('cuda')"),
        (lambda: qsim.QuantSim(network()), "QuantSim: got no 'example_inputs'"),
        (lambda: qsim.QuantSim(network(), IMAGES, "int8", True), "QuantSim: got 4 arguments by position"),
        (lambda: qsim.QuantSim(network(), IMAGES, model=1), "QuantSim: got an argument twice"),
        (
            lambda: qsim.int8(bits=4),
            "int8: got the argument 'bits'; expected int8(target='default'). Fields of its specs are changed by override",
        ),
        (lambda: qsim.Config(weights=None), "Config: got the argument 'weights'; expected Config(weight=..., "),
        (lambda: qsim.Config(batch_norm_policy="keep"), "close to it: 'batch_norm'"),
        (lambda: qsim.TensorSpec(bit=4), "TensorSpec: got the argument 'bit'; expected TensorSpec(bits=8, "),
        (lambda: qsim.Budget(sizes=0.2), "Budget: got the argument 'sizes'"),
        (
            lambda: calibrated().calibrate([IMAGES], batches=10),
            "QuantSim.calibrate: got the argument 'batches'; .*close to it: 'max_batches'",
        ),
        (
            lambda: calibrated().calibrate(),
            "QuantSim.calibrate: got no 'data'; expected QuantSim.calibrate(data, forward=None, *, max_batches=None",
        ),
        (lambda: calibrated().compare(), "QuantSim.compare: got no 'batch'"),
        (
            lambda: calibrated().export("m.onnx", dynamic_axes={}),
            "QuantSim.export: got the argument 'dynamic_axes'; .*close to it: 'dynamic_shapes'",
        ),
        (lambda: calibrated().search_bits([IMAGES]), "QuantSim.search_bits: got no 'budget'"),
        (lambda: qsim.Quantizer(bits=8), "Quantizer: got the argument 'bits'; .*qsim.Quantizer(qsim.TensorSpec(bits=4))"),
        (lambda: qsim.Override("0", bits=4), "Override: got the argument 'bits'; .*Config.override makes it"),
        (lambda: qsim.Encoding(scale=0.1), "Encoding: got no 'zero_point'"),
        (lambda: qsim.load_encodings(), "qsim.load_encodings: got no 'path'"),
        (lambda: calibrated().sensitivity([IMAGES], progress=False).worst("2"), "Sensitivity.worst: got count='2'; expected an integer"),
        (lambda: qsim.doctor(network()), "qsim.doctor: got no 'data'"),
        (lambda: qsim.quantize(network(), IMAGES, [IMAGES]), "qsim.quantize: got no 'metric'"),
        (lambda: qsim.clip_grad_norm_(network().parameters()), "qsim.clip_grad_norm_: got no 'max_norm'"),
    ],
)
def test_arguments_that_there_are_not(call, says):
    with pytest.raises(TypeError, match=".*".join(map(re.escape, says.split(".*")))):
        call()


def test_what_is_raised_within_is_left_alone():
    def metric(sim, data):
        raise TypeError("got an unexpected keyword argument 'x'")

    with pytest.raises(TypeError, match=r"^got an unexpected keyword argument 'x'$"):
        calibrated().sensitivity([IMAGES], metric, progress=False)


@pytest.mark.parametrize("given", [0.999, 1.0])
def test_a_share_is_no_percentile(given):
    """99.9 % as 0.999 would clip nearly everything."""
    for make in (
        lambda: qsim.TensorSpec(method="percentile", percentile=given),
        lambda: calibrated().set_method("percentile", percentile=given),
    ):
        with pytest.raises(ValueError, match=r"percent of the values to keep, as 99\.9"):
            make()


def test_what_no_method_reads_is_told():
    sim = calibrated()
    before = sim.encodings()
    for options in ({"percentile": 99.0}, {"gamma": 2.0}):
        with pytest.raises(
            ValueError, match=r"QuantSim.set_method: got (percentile=99.0|gamma=2.0) and method='mse', which does not read it"
        ):
            sim.set_method("mse", **options)
    assert sim.encodings() == before
    with pytest.raises(ValueError, match=r"got percentile=99.0 and method='minmax', 'tf_enhanced', which does not read it"):
        sim.set_method(None, percentile=99.0)
    sim.set_method(None, gamma=2.0)  # activations have the method that does
    with pytest.warns(
        UserWarning, match=r"percentile=99.0 of '0.output' is not read: their method is 'tf_enhanced'; write method='percentile'"
    ):
        qsim.QuantSim(network(), IMAGES, qsim.int8().override("0", activation={"percentile": 99.0}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        qsim.QuantSim(network(), IMAGES, qsim.int8().override("0", activation={"percentile": 99.0, "method": "percentile"}))


@pytest.mark.parametrize("field", ["bits", "symmetric", "method", "dtype", "learnable"])
def test_fields_of_a_quantizer_are_read(field):
    quantizer = calibrated().quantizers()["0.weight"]
    assert getattr(quantizer, field) == getattr(quantizer.spec, field)
    with pytest.raises(AttributeError, match=rf"'0.weight': its {field} is what was planned; .*config.override\('0', {field}="):
        setattr(quantizer, field, 4)


class TestModelsChangedAfterwards:
    """The head of another task, a vocabulary that grew: before the simulation."""

    SAYS = r"'4.weight' has the shape \(10, 8\) now, and had \(4, 8\): the model was changed after it was simulated"

    @pytest.mark.filterwarnings("ignore:QuantSim. '4' is planned")
    @pytest.mark.parametrize("use", ["call", "calibrate", "compare", "summary", "export"])
    def test_another_shape(self, use, tmp_path):
        sim = calibrated()
        sim.model[4] = nn.Linear(8, 10)
        uses = {
            "call": lambda: sim(IMAGES),
            "calibrate": lambda: sim.calibrate([IMAGES], progress=False),
            "compare": lambda: sim.compare(IMAGES),
            "summary": sim.summary,
            "export": lambda: sim.export(tmp_path / "model.onnx"),
        }
        with pytest.raises(ValueError, match=self.SAYS):
            uses[use]()

    def test_a_layer_that_is_gone(self):
        sim = calibrated()
        del sim.model[4]
        with pytest.raises(ValueError, match=r"the model has no '4\.weight' any more"):
            sim.compare(IMAGES)

    def test_other_numbers_are_no_other_shape(self):
        sim = calibrated()
        with torch.no_grad():
            sim.model[4].weight.mul_(2)
        sim.compare(IMAGES)


def test_what_takes_the_float_model_refuses_a_simulation():
    sim = calibrated()
    for given in (sim, sim.model):
        with pytest.raises(ValueError, match=r"qsim.doctor: got a simulation; examine the float model"):
            qsim.doctor(given, [IMAGES])
        with pytest.raises(ValueError, match=r"qsim.equalize: got a simulation; equalize the float model"):
            qsim.equalize(given, IMAGES)
        with pytest.raises(ValueError, match=r"qsim.fold_batch_norms: got a simulation, which folds its own"):
            qsim.fold_batch_norms(given, IMAGES)


def test_forward_that_is_no_function(tmp_path):
    sim = calibrated(qsim.int8(target="onnxruntime"))
    for use in (
        lambda: sim.compare(network(), IMAGES),
        lambda: sim.export(tmp_path / "model.onnx", verify=[IMAGES], forward=3),
        lambda: sim.evaluate(IMAGES, 3),
    ):
        with pytest.raises(TypeError, match=r"got forward=.*; expected a function, forward\(model, batch\)"):
            use()


def test_a_batch_in_place_of_batches():
    sim = qsim.QuantSim(network(), IMAGES)
    with pytest.raises(
        TypeError, match=r"a tuple of tensors of the shapes \(4, 3, 8, 8\) and \(4,\) as data, which looks like a batch; .*\[batch\]"
    ):
        sim.calibrate((IMAGES, torch.zeros(4)))
    assert sim.calibrate((IMAGES, IMAGES), progress=False).batches == 2


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated", "ignore:You are using the legacy TorchScript")
@pytest.mark.parametrize(
    "part", [lambda sim: sim, lambda sim: sim.model, lambda sim: nn.Sequential(sim.model)], ids=["sim", "model", "within"]
)
def test_other_exporters(tmp_path, part):
    sim = calibrated()
    says = r"QuantSim: torch.onnx.export cannot write a simulation; sim.export\('model.onnx'"
    for dynamo in (True, False):
        with pytest.raises(Exception, match=says):  # PyTorch's error has ours in it
            torch.onnx.export(part(sim), (IMAGES,), tmp_path / "model.onnx", verbose=False, dynamo=dynamo)
    with sim.in_float():
        torch.onnx.export(part(sim), (IMAGES,), tmp_path / "float.onnx", verbose=False)
    assert (tmp_path / "float.onnx").exists()
    with pytest.raises(TypeError, match=r"torch.jit.script cannot compile a simulation; sim.export\(path\)"):
        torch.jit.script(part(sim))


@pytest.mark.parametrize("name", ["model.pt", "model.engine", "model.xml"])
def test_names_of_files_that_others_write(tmp_path, name):
    with pytest.raises(ValueError, match=r"got path='.*' for 'onnxruntime'; expected a name such as 'model.onnx'"):
        calibrated(qsim.int8(target="onnxruntime")).export(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_paths_that_are_something_else(tmp_path):
    sim = calibrated()
    with pytest.raises(IsADirectoryError, match=r"cannot write '.*': it is a folder; give the name of a file in it"):
        sim.summary().save(tmp_path)
    torch.save(sim.state_dict(), tmp_path / "state.pt")
    with pytest.raises(
        qsim.FileFormatError, match=r"is a zip file, as torch.save writes; of a state dict: sim.load_state_dict\(torch.load"
    ):
        sim.load_encodings(tmp_path / "state.pt")
    with pytest.raises(TypeError, match=r"Config.from_json: got .*Path\(.*\); expected the text that Config.to_json\(\) returns"):
        qsim.Config.from_json(Path("config.json"))


def test_beside_what_is_no_comparison(tmp_path):
    sim = calibrated()
    for other in (sim.summary(), "other.html"):
        with pytest.raises(TypeError, match=r"Comparison.save: got beside=.*; expected another comparison"):
            sim.compare(IMAGES).save(tmp_path / "page.html", beside=other)
    assert not list(tmp_path.iterdir())


def test_a_model_in_place_of_its_parameters():
    with pytest.raises(TypeError, match=r"qsim.clip_grad_norm_: got a QuantSim; expected its parameters: model.parameters\(\)"):
        qsim.clip_grad_norm_(calibrated(), 1.0)


def test_a_model_without_operations_is_told():
    with pytest.warns(UserWarning, match="nothing of this model is quantized.*the example inputs reach no operation that could be"):
        qsim.QuantSim(nn.Identity(), IMAGES)


def test_the_names_of_operations_stand_beside_those_that_match_none():
    with pytest.warns(UserWarning, match=r"override 'layer1.\*' matches no operation; operations are called '0', .* and \d more"):
        qsim.QuantSim(network(), IMAGES, qsim.int8().override("layer1.*", bits=4))


def test_mistyped_methods_are_suggested():
    """Python says "Did you mean: 'calibrate'?" of what the error names."""
    sim = calibrated()
    with pytest.raises(AttributeError) as caught:
        sim.calibrat([IMAGES])
    assert (caught.value.name, caught.value.obj) == ("calibrat", sim)


def test_keys_that_there_are_not():
    sim = calibrated()
    for found in (sim.quantizers(), sim.encodings()):
        with pytest.raises(KeyError, match=r"no quantizer '0' here; close to it: '0.weight', '0.output'"):
            found["0"]
        with pytest.raises(KeyError, match=r"no quantizer '4.wieght' here; close to it: '4.weight'"):
            found["4.wieght"]
        assert found.get("0") is None
        assert found == dict(found)


def test_statistics_that_are_folded_are_not_measured_anew_without_a_word():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).eval()
    nn.init.uniform_(model[1].running_var, 0.5, 2.0)
    model[1].num_batches_tracked += 1
    with pytest.warns(UserWarning, match=r"there is no BatchNorm: all 1 are folded, .* They stay with Config\(batch_norm='keep'\)"):
        assert calibrated(model=model).reestimate_batch_norms([IMAGES], progress=False) == {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept = calibrated(qsim.Config(batch_norm="keep"), model)
        assert kept.reestimate_batch_norms([IMAGES], progress=False) == {"1": 1}
