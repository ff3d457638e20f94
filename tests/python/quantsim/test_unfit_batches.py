"""Batches that a model does not take, models that cannot be simulated, states of others: told in qsim's words, and nothing is lost."""

import copy
import re
import warnings

import pytest
import torch
from torch import nn

import qsim

IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def network(width=8):
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 4)]
    return nn.Sequential(*layers).eval()


def observed(sim):
    """What activations showed; weights are observed when ranges are chosen."""
    return {key: buffer.clone() for key, buffer in sim.state_dict().items() if ".observer." in key and "/weight" not in key}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        (IMAGES[:, :1], "a float32 tensor of the shape (4, 1, 8, 8); the example inputs had a float32 tensor of the shape (4, 3, 8, 8). "
                        "What it raised in '0' (Conv2d) is RuntimeError: Given groups=1"),
        (IMAGES[0], "a float32 tensor .* It lacks the dimension of the batch.* What it raised in '4' (Linear) is RuntimeError: "),
        (IMAGES.double(), "a float64 tensor .* convert it, x.to(torch.float32).* in '0' (Conv2d) "),
        ((IMAGES * 255).to(torch.uint8), "a uint8 tensor .* convert it, x.to(torch.float32)"),
        ("image.png", "'image.png'; the example inputs had a float32 tensor"),
    ],
    ids=["channels", "unbatched", "double", "uint8", "path"],
)  # fmt: skip
def test_a_batch_that_does_not_fit_names_itself_and_loses_nothing(batch, says):
    sim, alone = (qsim.QuantSim(network(), IMAGES) for _ in range(2))
    pattern = ".*".join(map(re.escape, says.split(".*")))
    with pytest.raises(ValueError, match=f"QuantSim.calibrate: the model does not run on batch 2: {pattern}") as caught:
        sim.calibrate([IMAGES, IMAGES * 2, batch, IMAGES], progress=False)
    assert "What the 2 before it showed is kept, and nothing of this one" in str(caught.value)
    assert caught.value.__cause__ is not None
    alone.calibrate([IMAGES, IMAGES * 2], progress=False)
    assert same(observed(sim), observed(alone))
    sim.calibrate([IMAGES], progress=False)  # it goes on
    alone.calibrate([IMAGES], progress=False)
    assert all(torch.equal(e.scale, alone.encodings()[key].scale) for key, e in sim.encodings().items())


def test_the_first_batch_of_all_leaves_nothing():
    sim, untouched = (qsim.QuantSim(network(), IMAGES) for _ in range(2))
    with pytest.raises(ValueError, match=r"does not run on batch 0: .* Nothing was noted of it"):
        sim.calibrate([(IMAGES * 255).to(torch.uint8)], progress=False)
    assert same(observed(sim), observed(untouched))


def test_half_a_batch_is_forgotten_with_a_forward_of_ones_own_too():
    sim, untouched = (qsim.QuantSim(network(), IMAGES) for _ in range(2))
    with pytest.raises(RuntimeError, match="Input type"):
        sim.calibrate([{"x": IMAGES.double()}], lambda model, batch: model(batch["x"]), progress=False)
    assert same(observed(sim), observed(untouched))


def test_running_ranges_and_channels_are_forgotten_too():
    config = qsim.int8().override("*", activation={"method": "ema"}).override("4", activation={"axis": -1, "method": "minmax"})
    sim, alone = (qsim.QuantSim(network(), IMAGES, config) for _ in range(2))
    for given in (sim, alone):
        given.calibrate([IMAGES], progress=False)
    with pytest.raises(ValueError, match="does not run on batch 0"):
        sim.calibrate([IMAGES[0] * 100], progress=False)
    assert same(observed(sim), observed(alone))


def test_what_a_model_raises_by_itself_stays_what_it_is():
    class Stops(Exception):
        pass

    class Raises(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.error = nn.Linear(4, 4), None

        def forward(self, x):
            if self.error is not None:
                raise self.error
            return self.layer(x)

    x = torch.randn(2, 4)
    for error, batch in ((Stops("mine"), x[:1]), (RuntimeError("of its own"), x), (ValueError("of its own"), x)):
        model = Raises()
        sim = qsim.QuantSim(model, x, inplace=True)
        model.error = error
        with pytest.raises(type(error)) as caught:
            sim.calibrate([batch], progress=False)
        assert caught.value is error


def test_other_methods_tell_the_same():
    sim = qsim.QuantSim(network(), IMAGES)
    sim.calibrate([IMAGES], progress=False)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(IMAGES))
    with pytest.raises(ValueError, match=r"the model does not run on the batch: a DataLoader; .* such as next\(iter\(loader\)\)\[0\]"):
        sim.compare(loader)
    for measure in (sim.compare, lambda batch: sim.sensitivity([batch], progress=False)):
        with pytest.raises(
            ValueError, match=r"QuantSim: the model does not run on the batch: a float32 tensor of the shape \(4, 1, 8, 8\)"
        ):
            measure(IMAGES[:, :1])


class TestModels:
    def test_quantized_already(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = torch.ao.quantization.quantize_dynamic(network(), {nn.Linear}, torch.qint8)
        with pytest.raises(
            TypeError, match=r"'4' is quantized already, torch.ao's Linear, whose weights are no floats; expected the float model"
        ):
            qsim.QuantSim(model, IMAGES)

    def test_exported(self):
        program = torch.export.export(network(), (IMAGES,))
        with pytest.raises(TypeError, match="got an ExportedProgram as model; expected a module: the Python module that was exported"):
            qsim.QuantSim(program, IMAGES)
        with pytest.raises(
            TypeError, match=r"the model itself is a graph of torch.export .*; expected the Python module that it was made of"
        ):
            qsim.QuantSim(program.module(), IMAGES)

    def test_graphs_of_torch_functions_are_simulated(self):
        sim = qsim.QuantSim(torch.fx.symbolic_trace(network()), IMAGES)
        assert list(sim.quantizers()) == list(qsim.QuantSim(network(), IMAGES).quantizers())

    def test_without_values(self):
        with torch.device("meta"):
            model = network()
        sim = qsim.QuantSim(model, IMAGES.to("meta"))  # what would be quantized can be asked for
        assert len(sim.quantizers()) == 6
        with pytest.raises(ValueError, match="lies on the meta device and has no values to compute with; load it first"):
            sim.calibrate([IMAGES], progress=False)


class TestStates:
    @pytest.fixture
    def sim(self):
        sim = qsim.QuantSim(network(), IMAGES)
        sim.calibrate([IMAGES], progress=False)
        return sim

    def test_of_another_model(self, sim):
        with pytest.raises(RuntimeError, match=r"QuantSim: the state is of another model: it has '4.weight', .* and 21 more"):
            qsim.QuantSim(network()[:2], IMAGES).load_state_dict(sim.state_dict())

    def test_of_another_config(self, sim):
        with pytest.raises(RuntimeError, match="QuantSim: the state is of another config or version: it lacks 'quantization"):
            qsim.QuantSim(network(), IMAGES, qsim.fp16()).load_state_dict(sim.state_dict())

    def test_of_other_widths(self, sim):
        with pytest.raises(RuntimeError, match=r"QuantSim: the state does not fit this simulation: .* size mismatch for"):
            qsim.QuantSim(network(16), IMAGES).load_state_dict(sim.state_dict())

    def test_of_the_float_model_into_a_calibrated_simulation(self, sim):
        other = copy.deepcopy(network())
        with torch.no_grad():
            other[0].weight *= 5
        with pytest.warns(UserWarning, match="the parameters are new, and the ranges are those of the ones before") as caught:
            sim.load_state_dict(other.state_dict())
        assert caught[0].filename == __file__
        assert torch.equal(sim.model[0].weight, other[0].weight)

    def test_of_the_float_model_before_calibration_says_nothing(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            qsim.QuantSim(network(), IMAGES).load_state_dict(network().state_dict())


@pytest.mark.parametrize("numbers", [IMAGES.numpy(), IMAGES.tolist()], ids=["array", "lists"])
def test_numbers_in_place_of_tensors(numbers, tmp_path):
    """One sentence wherever data is taken, not torch's list of signatures."""
    cure = r"expected tensors: torch\.(from_numpy\(array\)|tensor\(lists\))"
    model = network()
    sim = qsim.QuantSim(model, IMAGES)
    sim.calibrate([(IMAGES, [1, 2]), (IMAGES, IMAGES.numpy())], progress=False)  # targets may be anything
    calls = [
        lambda: qsim.QuantSim(model, numbers),
        lambda: qsim.fold_batch_norms(model, (numbers,)),
        lambda: qsim.equalize(model, IMAGES, [numbers]),
        lambda: qsim.equalize(model, (numbers,), methods=["cross_layer"]),
        lambda: qsim.doctor(model, [numbers], progress=False),
        lambda: sim(numbers),
        lambda: sim.calibrate([numbers], progress=False),
        lambda: sim.compare(numbers),
        lambda: sim.sensitivity([numbers], progress=False),
        lambda: sim.restore([numbers], progress=False),
        lambda: sim.distill([numbers], steps=1, progress=False),
        lambda: sim.export(tmp_path / "model.onnx", verify=[numbers]),
        lambda: sim.reestimate_batch_norms([numbers], progress=False),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=cure) as caught:
            call()
        assert "conv2d()" not in str(caught.value)
    with pytest.raises(TypeError, match="calibrate: got data of type ndarray; expected an iterable of batches"):
        sim.calibrate(IMAGES.numpy())


def test_a_model_that_takes_numbers_gets_them():
    class OfArrays(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 2)

        def forward(self, x, weights):
            return self.fc(x if isinstance(x, torch.Tensor) else torch.from_numpy(x)) * weights[0][0]

    rows = torch.randn(8, 4)
    for given in (rows.numpy(), rows):
        sim = qsim.QuantSim(OfArrays().eval(), (given, [[0.5]]))
        sim.calibrate([(given, [[0.5]])], progress=False)
        assert sim(given, [[0.5]]).shape == (8, 2)


TAKERS = {
    "sensitivity": lambda sim, data: sim.sensitivity(data, progress=False),
    "progressive": lambda sim, data: sim.progressive(data, progress=False),
    "float_plan": lambda sim, data: sim.float_plan(data, target=20.0, progress=False),
    "search_bits": lambda sim, data: sim.search_bits(data, budget=qsim.Budget(size=0.3), probes=0, progress=False),
    "restore": lambda sim, data: sim.restore(data, progress=False),
    "distill": lambda sim, data: sim.distill(data, steps=1, progress=False),
    "equalize": lambda sim, data: qsim.equalize(network(), IMAGES, data, methods=["smooth_quant"]),
    "quantize": lambda sim, data: qsim.quantize(network(), IMAGES, data, lambda sim, data: 1.0, progress=False),
}


@pytest.mark.parametrize("name", TAKERS)
def test_no_data_gives_no_numbers(name):
    if name == "search_bits":
        pytest.importorskip("scipy")
    sim = qsim.QuantSim(network(), IMAGES)
    sim.calibrate([IMAGES], progress=False)
    with pytest.raises((qsim.CalibrationError, ValueError), match="got no batch"):
        TAKERS[name](sim, [])


@pytest.mark.parametrize("name", [name for name in TAKERS if name != "quantize"])
def test_a_batch_that_does_not_fit_is_told_of_wherever_data_is_taken(name):
    if name == "search_bits":
        pytest.importorskip("scipy")
    sim = qsim.QuantSim(network(), IMAGES)
    sim.calibrate([IMAGES], progress=False)
    with pytest.raises(ValueError, match=r"the model does not run on the batch: .*the example inputs had a float32 tensor of the shape"):
        TAKERS[name](sim, [torch.randn(2, 5), torch.randn(2, 5)])


def test_before_calibration():
    sim = qsim.QuantSim(network(), IMAGES)
    for call in (lambda: sim.retarget("tensorrt"), lambda: sim.round_scales(torch.float16)):
        with pytest.raises(qsim.NoEncodingError, match="have no encoding"):
            call()
    with pytest.raises(TypeError, match=r"qsim\.quantize: got data of type int"):
        qsim.quantize(network(), IMAGES, 3, lambda sim, data: 1.0)
    sim.calibrate([IMAGES], progress=False)


def test_a_batch_without_tensors_is_not_verified(tmp_path):
    sim = qsim.QuantSim(nn.Linear(3, 2), torch.zeros(4, 3))
    sim.calibrate([torch.randn(4, 3)], progress=False)
    with pytest.raises(ValueError, match=r"got a batch of verify= with 0 tensors for the model, NoneType; the file, which stays, takes 1"):
        sim.export(tmp_path / "model.onnx", verify=[None])


@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize(("layer", "x"), [(nn.Linear(6, 4), torch.randn(8, 6)), (nn.Conv1d(6, 4, 1), torch.randn(8, 6, 6))])
def test_layers_that_are_restored_refuse_it_themselves(layer, x, at):
    """Also where the batch is held back, or the first: what a layer reads is looked at before the layer runs."""
    sim = qsim.QuantSim(nn.Sequential(layer, nn.ReLU()).eval(), x)
    sim.calibrate([x], progress=False)
    batches = [x, x, x, x]
    batches[at] = x[:, :5]
    before = {name: t.clone() for name, t in sim.state_dict().items()}
    with pytest.raises(ValueError, match=r"QuantSim: the model does not run on the batch: .*; the example inputs had"):
        sim.restore(batches, progress=False)
    assert all(torch.equal(t, before[name]) for name, t in sim.state_dict().items())
