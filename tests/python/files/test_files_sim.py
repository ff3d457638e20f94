"""A simulation writes its encodings and reads them back, in every format."""

import pytest
import torch
from models import ConvNet, Perceptron, seeded
from torch import nn

import qsim
from qsim.config.profile import PROFILES
from qsim.files import FORMATS, Entry

X = torch.randn(4, 1, 16, 16, generator=torch.Generator().manual_seed(1))


def made(target="default", config=None, calibrated=True, model=ConvNet, x=X):
    sim = qsim.QuantSim(seeded(model), x, qsim.int8(target=target) if config is None else config)
    if calibrated:
        sim.calibrate([x], progress=False)
    return sim


def perceptron(config=None, calibrated=True):
    return made(config=config, calibrated=calibrated, model=Perceptron, x=torch.randn(3, 6, generator=torch.Generator().manual_seed(2)))


@pytest.mark.parametrize("target", PROFILES)
def test_what_is_loaded_computes_the_same_bits(tmp_path, target):
    sim, other = made(target), made(target, calibrated=False)
    made(target, x=3 * X).save_encodings(tmp_path / "wrong")
    for format in FORMATS:
        if format == "tensorrt-cache" and target not in ("tensorrt", "coreml"):
            with pytest.raises(qsim.FileFormatError, match="target='tensorrt'"):
                sim.save_encodings(tmp_path / "file", format)
            continue
        sim.save_encodings(tmp_path / "file", format)
        other.load_encodings(tmp_path / "wrong")
        assert other.encodings() != sim.encodings()
        assert other.load_encodings(tmp_path / "file") == ([], [])
        assert other.encodings() == sim.encodings()
        assert torch.equal(other(X), sim(X))


CONFIGS = {
    "4-bit weights": qsim.w4a8(),
    "16 bits": qsim.int16(),
    "float8": qsim.fp8(),
    "float16 beside int8": qsim.int8().override("fc1", dtype="float16"),
    "narrow": qsim.int8().override("*", weight={"narrow": True}),
    "blocks": qsim.int8().override("*", weight={"bits": 4, "axis": 1, "block_size": 3}),
    "negative axis": qsim.int8().override("*", weight={"axis": -2}),
}
CANNOT = {
    "float8": {"aimet-0.6.1", "aimet-1.0.0"},
    "narrow": {"aimet-1.0.0", "aimet-2.0.0", "aimet-2.1.0"},
    "blocks": {"aimet-0.6.1"},
}


@pytest.mark.parametrize("case", CONFIGS)
def test_other_grids(tmp_path, case):
    sim = perceptron(CONFIGS[case])
    for format in FORMATS[:-1]:
        if format in CANNOT.get(case, ()):
            with pytest.raises(qsim.FileFormatError, match=r"entry 'fc1\.weight'|entry 'input'"):
                sim.save_encodings(tmp_path / "file", format)
            continue
        sim.save_encodings(tmp_path / "file", format)
        other = perceptron(CONFIGS[case], calibrated=False)
        assert other.load_encodings(tmp_path / "file") == ([], []), format
        assert other.encodings() == sim.encodings()


def test_unsigned_files_fit_signed_simulations(tmp_path):
    perceptron(qsim.int8(target="openvino")).save_encodings(tmp_path / "file")
    signed = perceptron(qsim.int8(), calibrated=False)
    signed.load_encodings(tmp_path / "file", strict=False)
    unsigned = qsim.load_encodings(tmp_path / "file").encodings["input"]
    found = signed.encodings()["input"]
    assert (unsigned.dtype, found.dtype) == ("uint8", "int8")
    assert torch.equal(unsigned.scale, found.scale)
    assert torch.equal(unsigned.min, found.min)


def test_axes_count_from_either_end(tmp_path):
    sim = perceptron()
    sim.save_encodings(tmp_path / "file", "aimet-2.0.0")
    other = perceptron(CONFIGS["negative axis"], calibrated=False)
    other.load_encodings(tmp_path / "file")
    assert other.encodings()["fc1.weight"].axis == -2
    assert torch.equal(other.encodings()["fc1.weight"].scale, sim.encodings()["fc1.weight"].scale)
    other.save_encodings(tmp_path / "file", "aimet-2.0.0")
    assert sim.load_encodings(tmp_path / "file") == ([], [])
    with pytest.raises(ValueError, match=r"'fc1\.weight': the file has axis=0, .* the quantizer axis=1"):
        perceptron(qsim.int8().override("fc1", weight={"axis": 1}), calibrated=False).load_encodings(saved(sim, tmp_path))


def test_biases_of_aimet_2_are_products_of_scales(tmp_path):
    sim = perceptron()
    sim.save_encodings(tmp_path / "file", "aimet-2.0.0", names={"fc1.bias": "B", "fc1.weight": "W"})
    found = qsim.load_encodings(tmp_path / "file").encodings
    assert found["B"].dtype == "int32"
    assert torch.equal(found["B"].scale, found["input"].scale * found["W"].scale)
    assert not found["B"].zero_point.any()


def test_names_map_both_ways(tmp_path):
    sim = perceptron()
    names = {key: f"/onnx/{i}" for i, key in enumerate(sim.quantizers())}
    sim.save_encodings(tmp_path / "file", "aimet-1.0.0", names=names)
    assert list(qsim.load_encodings(tmp_path / "file").activations) == [names[key] for key in names if not key.endswith("weight")]
    other = perceptron(calibrated=False)
    with pytest.raises(ValueError, match="missing in the file"):
        other.load_encodings(tmp_path / "file")
    other.load_encodings(tmp_path / "file", names=names)
    assert other.encodings() == sim.encodings()
    with pytest.raises(ValueError, match=r"'fc1\.outputs', which is no quantizer; close to it: 'fc1\.output'"):
        sim.save_encodings(tmp_path / "file", names={"fc1.outputs": "x"})
    with pytest.raises(ValueError, match="two quantizers are called 'x'"):
        sim.save_encodings(tmp_path / "file", names={"fc1.output": "x", "fc2.output": "x"})


def test_one_error_lists_everything_and_changes_nothing(tmp_path):
    sim = perceptron()
    file = qsim.load_encodings(saved(sim, tmp_path))
    entries = dict(file.entries)
    entries["fc1.outputs"] = entries.pop("fc1.output")
    entries["fc2.weight"] = Entry(qsim.Encoding(torch.ones(2), torch.zeros(2, dtype=torch.int32), -128, 127, 0), "parameter")
    entries["input"] = Entry(qsim.Encoding(torch.tensor(1.0), torch.tensor(0, dtype=torch.int32), -8, 7, dtype="int4"), "activation")
    entries["fc2.output"] = Entry(None, note="float32: it is not quantized")
    qsim.save_encodings(qsim.EncodingFile(entries), tmp_path / "file", "aimet-1.0.0")
    before = sim.encodings()
    with pytest.raises(ValueError, match="does not fit this simulation") as caught:
        sim.load_encodings(tmp_path / "file")
    lines = str(caught.value).splitlines()
    assert "missing in the file: 'fc1.output' (close to it: 'fc1.outputs')" in lines
    assert "unknown to the simulation: 'fc1.outputs' (close to it: 'fc1.output')" in lines
    rest = "\n".join(lines[3:])
    assert "'input': the file has int4 on [-8, 7], the quantizer int8 on [-128, 127]" in rest
    assert (
        "'fc2.weight': the file has axis=0, block_size=None and scales of shape (2,), the quantizer axis=0, block_size=None and (3,)"
        in rest
    )
    assert "'fc2.output': the file says float32" in rest
    assert len(lines) == 6
    with pytest.raises(ValueError, match="'input': the file has int4"):
        sim.load_encodings(tmp_path / "file", strict=False)
    assert sim.encodings() == before


def saved(sim, tmp_path, format="qsim"):
    sim.save_encodings(tmp_path / "saved", format)
    return tmp_path / "saved"


def test_what_both_have_is_loaded_if_not_strict(tmp_path):
    sim = perceptron()
    file = qsim.load_encodings(saved(sim, tmp_path))
    entries = {("other" if name == "input" else name): entry for name, entry in file.entries.items()}
    qsim.save_encodings(qsim.EncodingFile(entries), tmp_path / "file")
    other = perceptron(calibrated=False)
    with pytest.raises(ValueError, match="'other'"):
        other.load_encodings(tmp_path / "file")
    assert other.encodings() == {}
    assert other.load_encodings(tmp_path / "file", strict=False) == (["input"], ["other"])
    assert other.encodings() == {key: encoding for key, encoding in sim.encodings().items() if key != "input"}


def test_what_is_switched_off_is_saved_and_may_be_missing(tmp_path):
    sim = perceptron()
    expected = sim.encodings()
    sim.disable("fc1")
    assert qsim.load_encodings(saved(sim, tmp_path)).encodings == expected
    other = perceptron(calibrated=False)
    other.disable("fc1")
    qsim.save_encodings(qsim.load_encodings(tmp_path / "saved").without("fc1.*"), tmp_path / "file")
    assert other.load_encodings(tmp_path / "file") == ([], [])


def test_weights_that_a_cache_does_not_hold_come_from_their_values(tmp_path):
    sim = made("tensorrt")
    path = saved(sim, tmp_path, "tensorrt-cache")
    assert all(not name.endswith("weight") for name in qsim.load_encodings(path).entries)
    other = made("tensorrt", calibrated=False)
    other.load_encodings(path)
    assert other.encodings() == sim.encodings()
    sim.quantizers()["fc.weight"].set_encoding(qsim.Encoding(torch.ones(10), torch.zeros(10, dtype=torch.int32), -128, 127, 0))
    sim.load_encodings(path)
    assert sim.encodings()["fc.weight"].scale.eq(1).all()  # a weight that has an encoding keeps it


def test_before_calibration(tmp_path):
    with pytest.raises(qsim.NoEncodingError):
        perceptron(calibrated=False).save_encodings(tmp_path / "file")
    assert not list(tmp_path.iterdir())


def test_learned_and_running_ranges_go_on_from_the_file(tmp_path):
    for changes in ({"learnable": True}, {"method": "ema"}):
        sim = perceptron(qsim.int8().override("*", activation=changes))
        other = perceptron(qsim.int8().override("*", activation=changes), calibrated=False)
        other.load_encodings(saved(sim, tmp_path))
        assert other.encodings() == sim.encodings()
        other.train()
        other(torch.randn(3, 6)).sum().backward()


def test_one_output_channel(tmp_path):
    def one(calibrated):
        torch.manual_seed(0)
        sim = qsim.QuantSim(nn.Linear(3, 1).eval(), torch.zeros(1, 3))
        if calibrated:
            sim.calibrate([torch.ones(2, 3)], progress=False)
        return sim

    for format in FORMATS[:-1]:
        one(True).save_encodings(tmp_path / "file", format)
        other = one(False)
        other.load_encodings(tmp_path / "file")
        assert other.encodings() == one(True).encodings(), format


def test_a_hostile_number_of_unknown_names_does_not_take_long_to_list(tmp_path):
    entry = Entry(qsim.Encoding(torch.tensor(1.0), torch.tensor(0, dtype=torch.int32), -128, 127))
    qsim.save_encodings(qsim.EncodingFile({f"{'input' * 20}{i}": entry for i in range(5000)}), tmp_path / "file")
    with pytest.raises(ValueError, match="unknown to the simulation: 4900 more"):
        perceptron().load_encodings(tmp_path / "file")


@pytest.mark.parametrize("format", ["qsim", "aimet-1.0.0", "tensorrt-cache"])
def test_a_file_holds_all_tensors_whatever_falls_back(tmp_path, format):
    sim = made("tensorrt")
    before = qsim.load_encodings(saved(sim, tmp_path, format))
    sim.fallback("layer1.0.*", to="fp16")
    assert qsim.load_encodings(saved(sim, tmp_path, format)) == before
    assert sim.load_encodings(tmp_path / "saved") == ([], [])
