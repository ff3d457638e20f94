"""qsim verify."""

import io
import json
import zipfile

import numpy as np
import onnx
import pytest
import torch
from command import refused, run
from float_onnx import cache, images, network, steps
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import qsim
from qsim.onnx.from_cache import onnx_from_cache


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A simulation, its model, and float outputs."""
    folder = tmp_path_factory.mktemp("verify")
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(64, 50)).eval()
    sim = qsim.QuantSim(net, torch.from_numpy(images()), qsim.int8(target="onnxruntime"))
    sim.calibrate([torch.from_numpy(images())], progress=False)
    sim.export(folder / "model.onnx", input_names=["x"])
    np.savez(folder / "batch.npz", x=images())
    return sim, folder


def ties(folder):
    """A step of the result is two of a product: every odd sum is a tie, which float sums miss by their rounding errors."""
    rng = np.random.default_rng(0)
    weight = rng.integers(-1, 2, (64, 64)).astype(np.int8)
    grid = [
        numpy_helper.from_array(v, n)
        for n, v in (("sx", np.float32(0.0311)), ("zx", np.int8(3)), ("sy", np.float32(0.0311) * np.float32(0.0434)), ("zy", np.int8(-5)))
    ]
    grid += [numpy_helper.from_array(weight, "w"), numpy_helper.from_array(np.float32(0.0217), "sw")]
    grid += [numpy_helper.from_array(np.int8(0), "zw")]
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "sx", "zx"], ["xq"]),
        helper.make_node("DequantizeLinear", ["xq", "sx", "zx"], ["xd"]),
        helper.make_node("DequantizeLinear", ["w", "sw", "zw"], ["wd"]),
        helper.make_node("MatMul", ["xd", "wd"], ["p"]),
        helper.make_node("QuantizeLinear", ["p", "sy", "zy"], ["yq"]),
        helper.make_node("DequantizeLinear", ["yq", "sy", "zy"], ["y"]),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 64]) for name in "xy"]
    graph = helper.make_graph(nodes, "test", ends[:1], ends[1:], grid)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9), folder / "product.onnx")
    return folder / "product.onnx"


def test_an_exported_model_is_fine(exported, capsys):
    _, folder = exported
    code, out, _ = run(capsys, "verify", folder / "model.onnx", "--data", folder / "batch.npz")
    assert code == 0
    assert "not optimised / optimised" in out
    found = json.loads(run(capsys, "verify", folder / "model.onnx", "--data", folder / "batch.npz", "--json")[1])
    (compared,) = found["differences"]
    assert (compared["elements"], compared["mismatching"], compared["top1"]) == (200, 0, 1.0)
    assert found["in_float"] == {}


def test_batches_and_several_files_are_counted_together(exported, capsys):
    _, folder = exported
    data = [folder / "batch.npz", folder / "batch.npz"]
    out = run(capsys, "verify", folder / "model.onnx", "--data", *data, "--batch-size", "3", "--json")[1]
    assert json.loads(out)["differences"][0]["elements"] == 400


def test_differences_are_an_exit_code(capsys, tmp_path):
    """ONNX Runtime itself says how many there are."""
    from qsim.onnx.sessions import session

    model = ties(tmp_path)
    x = np.random.default_rng(1).normal(size=(4000, 64)).astype(np.float32)
    a, b = (session(model, optimised=flag).run(None, {"x": x})[0] for flag in (False, True))
    assert (a != b).any(), "the two graphs agree: the test needs other numbers"
    np.savez(tmp_path / "x.npz", x)  # arr_0: by its place
    code, out, _ = run(capsys, "verify", model, "--data", tmp_path / "x.npz", "--json")
    assert code == 1
    (compared,) = json.loads(out)["differences"]
    assert (compared["mismatching"], compared["largest"]) == (int((a != b).sum()), 1.0)
    told = run(capsys, "verify", model, "--data", tmp_path / "x.npz")[1]
    assert (
        f"'y': {compared['mismatching']} of 256000 integers differ, not optimised to optimised, by up to 1 steps; --tolerance is 0" in told
    )
    assert run(capsys, "verify", model, "--data", tmp_path / "x.npz", "--tolerance", "1")[0] == 0


def test_a_reference_by_its_sqnr(capsys, tmp_path):
    model = network(tmp_path / "float.onnx")
    report = onnx_from_cache(qsim.load_encodings(cache(tmp_path / "c", steps(model))), model, tmp_path / "int8.onnx")
    np.savez(tmp_path / "x.npz", x=images())
    data = ["verify", report.path, "--data", tmp_path / "x.npz"]
    assert "give --reference" in run(capsys, *data)[1]  # a model for TensorRT, alone
    code, out, _ = run(capsys, *data, "--reference", model, "--json", "--sqnr", "10")
    assert code == 0
    (compared,) = json.loads(out)["differences"]
    from qsim.onnx.sessions import session

    y, z = (
        session(path, optimised=flag).run(None, {"x": images()})[0].astype(float) for path, flag in ((model, True), (report.path, False))
    )
    assert compared["sqnr"] == pytest.approx(10 * np.log10((y**2).sum() / ((y - z) ** 2).sum()))
    assert run(capsys, *data, "--reference", model, "--sqnr", "100")[0] == 1


def test_operations_in_float_are_told(capsys, tmp_path):
    sim = qsim.QuantSim(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)), torch.from_numpy(images()), qsim.int8(target="onnxruntime"))
    sim.calibrate([torch.from_numpy(images())], progress=False)
    sim.disable("0.output")
    sim.export(tmp_path / "m.onnx")
    np.savez(tmp_path / "x.npz", images())
    code, out, _ = run(capsys, "verify", tmp_path / "m.onnx", "--data", tmp_path / "x.npz", "--tolerance", "1")
    assert code == 0
    assert "2 operations run in float" in out
    assert "1.Conv: operand 0 (made by 0.Conv) is not quantized" in out


def test_data_that_do_not_fit(exported, capsys, tmp_path):
    _, folder = exported
    model, path = folder / "model.onnx", tmp_path / "x.npz"
    for arrays, expected in (
        ({"x": images()[:, :2]}, "is float32 of the shape (4, 2, 8, 8); the model takes float32 of (batch, 3, 8, 8)"),
        ({"x": images().astype(np.float64)}, "is float64"),
        ({"x": images()[:0]}, "has no samples: its shape is (0, 3, 8, 8)"),
        ({"x": images(), "z": images()}, "holds the arrays x, z; the model takes x"),
        ({}, "holds no arrays"),
        ({"x": np.array([object()])}, "expected numbers"),
        ({"x": np.array(["text"])}, "expected numbers"),
    ):
        np.savez(path, **arrays)
        assert expected in refused(capsys, "verify", model, "--data", path)
    np.savez(path, x=images())
    path.write_bytes(path.read_bytes()[:-100])
    assert "is no .npz file of arrays" in refused(capsys, "verify", model, "--data", path)
    path.write_bytes(b"nothing")
    assert "is no .npz file of arrays" in refused(capsys, "verify", model, "--data", path)
    assert "expected --reference" in refused(capsys, "verify", model, "--data", path, "--sqnr", "3")
    assert "cannot be cut into batches of 0" in refused(capsys, "verify", model, "--data", folder / "batch.npz", "--batch-size", "0")


def test_a_shape_that_the_file_has_no_bytes_for(exported, capsys, tmp_path):
    """NumPy would ask for the memory first."""
    _, folder = exported
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "<f4", "fortran_order": False, "shape": (1 << 40,)})
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("x.npy", stream.getvalue())
    assert "and holds 0. Is the file complete?" in refused(capsys, "verify", folder / "model.onnx", "--data", tmp_path / "x.npz")


def test_models_that_are_none(exported, capsys, tmp_path):
    _, folder = exported
    (tmp_path / "m.onnx").write_bytes(b"nothing")
    assert "is no ONNX model" in refused(capsys, "verify", tmp_path / "m.onnx", "--data", folder / "batch.npz")
    assert "No such file" in refused(capsys, "verify", tmp_path / "n.onnx", "--data", folder / "batch.npz")


def test_no_number_is_no_tolerance(exported, capsys):
    _, folder = exported
    for arguments in (("verify", folder / "model.onnx", "--data", folder / "batch.npz"), ("compare", *[folder / "model.onnx"] * 2)):
        for given in ("nan", "much"):
            assert f"--tolerance: got '{given}'; expected a number" in refused(capsys, *arguments, "--tolerance", given)
