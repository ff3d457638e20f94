"""Models in which operations fall back, for TensorRT: types, casts, trtexec's flags. Oracle: ONNX Runtime, one node at a time."""

import json
import shlex

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from models import Branches, ConvNet, Forward, seeded
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import qsim
from qsim.deploy.export_report import ExportReport
from qsim.deploy.tensorrt import precision_flags
from qsim.errors import ExportError

X = torch.randn(5, 2, 6, 6, generator=torch.Generator().manual_seed(1))

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
IMAGES = torch.randn(4, 1, 12, 12, generator=torch.Generator().manual_seed(2))


def simulated(model: nn.Module, x: torch.Tensor, target: str, *patterns: str, to: str = "fp16") -> qsim.QuantSim:
    sim = qsim.QuantSim(model, x, qsim.int8(target=target))
    sim.calibrate([x], progress=False)
    sim.fallback(patterns, to)
    return sim


def types(model: onnx.ModelProto) -> dict[str, int]:
    """Element types of all tensors, as `onnx.shape_inference` finds them."""
    graph = onnx.shape_inference.infer_shapes(model, strict_mode=True).graph
    found = {value.name: value.type.tensor_type.elem_type for value in (*graph.input, *graph.output, *graph.value_info)}
    return found | {tensor.name: tensor.data_type for tensor in graph.initializer}


def node_by_node(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """What the model computes if each operation gives its result in its own type: ONNX Runtime leaves casts between them out."""
    kinds, known = types(model), {t.name: numpy_helper.to_array(t) for t in model.graph.initializer} | feeds
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    for node in model.graph.node:
        ends = [
            [helper.make_tensor_value_info(name, kinds[name], None) for name in names if name]
            for names in (dict.fromkeys(node.input), node.output)
        ]
        alone = helper.make_model(helper.make_graph([node], "one", *ends), opset_imports=model.opset_import, ir_version=model.ir_version)
        run = onnxruntime.InferenceSession(alone.SerializeToString(), options, providers=["CPUExecutionProvider"])
        known |= dict(zip(node.output, run.run(None, {value.name: known[value.name] for value in ends[0]}), strict=True))
    return [known[value.name] for value in model.graph.output]


CASES = [
    ("tensorrt", Branches, X, ("left",)),
    ("onnxruntime", Branches, X, ("stem", "left", "add")),
    ("tensorrt", Branches, X, ("cat", "head")),
    ("onnxruntime", Branches, X, ("*",)),
    ("tensorrt", ConvNet, IMAGES, ("layer1.*", "branch", "cat")),
    ("onnxruntime", ConvNet, IMAGES, ("layer1.1.*", "fc")),
]


@pytest.mark.parametrize(("target", "model", "x", "patterns"), CASES)
def test_the_file_is_strongly_typed_and_computes_what_the_simulation_does(tmp_path, target, model, x, patterns):
    sim = simulated(seeded(model), x, target, *patterns)
    report = sim.export(tmp_path / "model.onnx", verify=[x])
    written = onnx.load(tmp_path / "model.onnx")
    _check_types(written, report)
    with torch.no_grad():
        expected = sim(x).numpy()
    (got,) = node_by_node(written, {written.graph.input[0].name: x.numpy()})
    step = expected.max() / 1000  # an ulp of float16, where sums in float32 are added in another order, now and then
    assert (np.abs(got - expected) > 1e-6).mean() < 0.02
    assert np.abs(got - expected).max() <= max(step, *(float(e.scale.max()) for e in sim.encodings().values()))
    # the whole model in ONNX Runtime, which computes float16 in float32 on a CPU
    (whole,) = report.verification.differences["simulation", "not optimised"].values()
    assert whole.largest <= (1.0 if whole.step is not None else 0.02 * np.abs(expected).max())


def _check_types(written: onnx.ModelProto, report: ExportReport) -> None:
    """What falls back has operands and results in float16 alone, all else in float32 alone; casts stand between them, and nowhere else."""
    onnx.checker.check_model(written, full_check=True)
    kinds = types(written)
    made_by_casts = {name for node in written.graph.node if node.op_type == "Cast" for name in node.output}
    for node in written.graph.node:
        floats = {kinds[name] for name in (*node.input, *node.output) if kinds[name] in (TensorProto.FLOAT, TensorProto.FLOAT16)}
        if node.op_type == "Cast":
            assert floats == {TensorProto.FLOAT, TensorProto.FLOAT16}
            assert node.input[0] not in made_by_casts
        else:
            assert floats == {TensorProto.FLOAT16 if node.name in report.fallback else TensorProto.FLOAT}
    assert set(report.fallback.values()) == {"float16"}
    assert json.loads({p.key: p.value for p in written.metadata_props}["qsim.fallback"]) == report.fallback


def test_what_only_moves_values_between_two_of_a_region_is_in_it(tmp_path):
    torch.manual_seed(0)
    modules = {"a": nn.Conv2d(1, 4, 3), "pool": nn.MaxPool2d(2), "b": nn.Linear(100, 3), "c": nn.Linear(3, 2)}
    model = Forward(lambda m, x: m.c(m.b(F.relu(m.pool(m.a(x))).flatten(1))), **modules).eval()
    sim = simulated(model, IMAGES, "tensorrt", "a", "relu", "b")
    report = sim.export(tmp_path / "model.onnx")
    written = onnx.load(tmp_path / "model.onnx")
    assert [node.op_type for node in written.graph.node if node.name in report.fallback] == ["Conv", "MaxPool", "Relu", "Reshape", "Gemm"]
    assert sum(node.op_type == "Cast" for node in written.graph.node) == 2
    (got,) = node_by_node(written, {written.graph.input[0].name: IMAGES.numpy()})
    with torch.no_grad():
        np.testing.assert_allclose(got, sim(IMAGES).numpy(), atol=float(sim.encodings()["c.input[0]"].scale))


def test_float32_needs_no_cast_and_the_integers_around_it_stay_exact(tmp_path):
    sim = simulated(seeded(Branches), X, "onnxruntime", "left", "cat", to="float32")
    report = sim.export(tmp_path / "model.onnx", verify=[X])
    assert "Cast" not in {node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node}
    assert report.fallback == {}
    (difference,) = report.verification.differences["simulation", "not optimised"].values()
    assert difference.largest <= 1e-6


def test_bfloat16_takes_the_opset_that_has_it_and_coreml_does_not_take_it(tmp_path):
    report = simulated(seeded(Branches), X, "tensorrt", "left", to="bf16").export(tmp_path / "model.onnx")
    assert report.opset >= 22
    assert set(report.fallback.values()) == {"bfloat16"}
    with pytest.raises(ExportError, match="bfloat16, which coreml does not take"):
        simulated(seeded(Branches), X, "coreml", "left", to="bf16").export(tmp_path / "other.onnx")
    assert not (tmp_path / "other.onnx").exists()


def test_an_uncalibrated_tensor_stops_the_export_and_nothing_is_written(tmp_path):
    sim = qsim.QuantSim(seeded(Branches), X, qsim.int8(target="tensorrt"))
    with pytest.raises(qsim.NoEncodingError, match="no batch was calibrated"):
        sim.export(tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


def test_the_cache_holds_all_tensors_whatever_falls_back(tmp_path):
    sim = simulated(seeded(ConvNet), IMAGES, "tensorrt")
    sim.save_encodings(tmp_path / "before.cache", "tensorrt-cache")
    for patterns in (["layer1.*"], ["cat", "fc"], "*"):
        sim.fallback(patterns)
        sim.save_encodings(tmp_path / "after.cache", "tensorrt-cache")
        assert (tmp_path / "after.cache").read_bytes() == (tmp_path / "before.cache").read_bytes()
        sim.save_encodings(tmp_path / "after.json")
        assert set(qsim.load_encodings(tmp_path / "after.json").entries) >= set(sim.quantizers())


def parsed(flag: str) -> dict[str, str]:
    """As trtexec reads ``--layerPrecisions``: pairs at commas; a name in quotation marks, or what comes before the last colon."""
    pairs = [pair.rpartition(":") for pair in flag.partition("=")[2].split(",")]
    return {name.replace("'", ""): kind for name, _, kind in pairs}


def test_the_flags_name_the_nodes_of_the_file(tmp_path):
    report = simulated(seeded(ConvNet), IMAGES, "tensorrt", "layer1.*", "cat").export(tmp_path / "model.onnx")
    assert tmp_path / "model.onnx.trtexec" in report.files
    strong, weak = (shlex.split(line) for line in (tmp_path / "model.onnx.trtexec").read_text().splitlines() if line[0] != "#")
    assert strong[0] == weak[0] == "trtexec"
    assert "--stronglyTyped" in strong
    assert {"--int8", "--fp16", "--precisionConstraints=obey", "--onnx=model.onnx"} <= set(weak)
    nodes = {node.name for node in onnx.load(tmp_path / "model.onnx").graph.node}
    for flag in weak[-2:]:
        assert set(parsed(flag)) == set(report.fallback) <= nodes
        assert set(parsed(flag).values()) == {"fp16"}
    assert [flag.partition("=")[0] for flag in weak[-2:]] == ["--layerPrecisions", "--layerOutputTypes"]


def test_names_in_flags():
    names = {"a:b": "float16", "layer 1/Conv": "float32", "x.y": "bfloat16"}
    flags = precision_flags(names)
    assert flags[:3] == ["--fp16", "--bf16", "--precisionConstraints=obey"]
    assert parsed(flags[3]) == {"a:b": "fp16", "layer 1/Conv": "fp32", "x.y": "bf16"}
    assert shlex.split(shlex.join(flags)) == flags
    assert precision_flags({}) == []
    for bad in ("a,b", "it's", "all*"):
        with pytest.raises(ExportError, match="in its name"):
            precision_flags({bad: "float16"})
    with pytest.raises(ExportError, match="got the format 'fp16'"):
        precision_flags({"a": "fp16"})


@pytest.mark.parametrize("patterns", [("left",), ("cat", "head"), ("stem", "left", "add")])
def test_integer_evaluation_computes_the_regions_in_their_format(patterns):
    sim = simulated(seeded(Branches), X, "onnxruntime", *patterns)
    with torch.no_grad():
        expected = sim(X)
        with sim.integer():
            got = sim(X)
    assert (got - expected).abs().max() <= 2 * sim.encodings()["cat.output"].scale
    sim.fallback(None)
    with torch.no_grad(), sim.integer():  # traced anew
        assert not torch.equal(sim(X), got)
