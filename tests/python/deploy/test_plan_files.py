"""What a plan writes: beside NumPy's float16 (ONNX's reference evaluator), ONNX Runtime, and the formats that the tools document."""

import enum
import json
import re
import runpy
import warnings
from fnmatch import fnmatchcase
from types import SimpleNamespace

import onnx
import onnx_ir as ir
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch import nn

import qsim
from qsim.analysis.evidence import Evidence
from qsim.analysis.search import search
from qsim.clinic.cure import cure, plan_of
from qsim.clinic.examination import Examination
from qsim.clinic.examined_model import ExaminedModel
from qsim.clinic.flow import Flow
from qsim.clinic.shadow import Shadow
from qsim.clinic.survey import survey
from qsim.clinic.targets import TARGETS
from qsim.config.float_plan import Ordinal
from qsim.deploy.engine_plan import Plan
from qsim.errors import ExportError
from qsim.onnx.half_casts import to_half


class Block(nn.Module):
    """Called twice: its second product and the sum over it leave float16, and what follows brings them back."""

    def __init__(self):
        super().__init__()
        self.fc, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x):
        y = self.norm(self.fc(x)) * 0.5
        total = ((y * 500) * (y * 700)).cumsum(-1)
        return total * 1e-6 + x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.head = Block(), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x):
        return self.head(self.block(self.block(x))) + x.mean(-1, keepdim=True)


KEPT = ("block.mul_4", "block.cumsum", "block.mul_5")
X = 2 * torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Model().eval()


@pytest.fixture(scope="module")
def plan(model):
    subject = ExaminedModel(model, (X,))
    shadow = Shadow(subject, TARGETS["tensorrt-fp16"], [X])
    found = search(Evidence(list(subject.sites)), shadow.probe)
    return plan_of(found, subject, format="float16", target="tensorrt-fp16")


@pytest.fixture(scope="module")
def exported(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("onnx") / "model.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (X,), path, dynamo=True, opset_version=20, optimize=False, verbose=False, external_data=False)
    return path


def run(path_or_bytes):
    """NumPy computes float16 as float16."""
    proto = onnx.load(path_or_bytes) if not isinstance(path_or_bytes, bytes) else onnx.load_from_string(path_or_bytes)
    evaluator = ReferenceEvaluator(proto)
    return torch.from_numpy(evaluator.run(None, {evaluator.input_names[0]: X.numpy()})[0])


def types_of(path):
    graph = onnx.shape_inference.infer_shapes(onnx.load(path), strict_mode=True).graph
    types = {value.name: value.type.tensor_type.elem_type for value in (*graph.value_info, *graph.output)}
    return {node.name: types[node.output[0]] for node in graph.node}


def test_the_plan_of_a_search(model, plan):
    assert plan.keep == KEPT
    assert plan.irreducible
    assert plan.sqnr > 30
    assert plan.ordinals == {"block.mul_4": Ordinal(3, 5), "block.cumsum": Ordinal(0, 1), "block.mul_5": Ordinal(4, 5)}
    sim = qsim.QuantSim(model, X, qsim.fp16().with_plan(plan))
    torch.testing.assert_close(sim(X), model(X), rtol=2e-2, atol=2e-2)
    assert not qsim.QuantSim(model, X, qsim.fp16())(X).isfinite().all()


def test_the_plan_of_an_examination_uses_the_survey(model):
    target, subject = TARGETS["tensorrt-fp16"], ExaminedModel(model, (X,))
    shadow = Shadow(subject, target, [X])
    exam = Examination(subject, target, [X], None, None, survey(subject, target, [X]), Flow(subject), shadow)
    found = cure(exam)
    assert found.keep == KEPT
    assert found.irreducible
    assert found.probes == 5  # none, the island, and each of its three left out
    exam.probes = shadow.probes + 2
    short = cure(exam)
    assert (short.keep, short.irreducible) == (KEPT, False)
    exam.probes = shadow.probes
    spent = cure(exam)
    assert (spent.keep, spent.irreducible, spent.note) == ((), False, "the budget was spent before the search")


def test_the_plan_of_a_diagnosis(model):
    diagnosis = qsim.doctor(model, [X], target="onnxruntime-fp16", progress=False)
    assert diagnosis.plan.keep == KEPT
    assert (diagnosis.plan.format, diagnosis.plan.target) == ("float16", "onnxruntime-fp16")
    assert "plan: keep 3 operations in float32" in str(diagnosis)
    assert json.loads(diagnosis.to_json())["plan"]["keep"] == list(KEPT)
    assert Plan.from_json(json.dumps(json.loads(diagnosis.to_json())["plan"])) == diagnosis.plan
    healthy = qsim.doctor(model, [X * 0.01], target="tensorrt-fp16", progress=False)
    assert (healthy.plan.keep, healthy.plan.irreducible) == ((), True)
    assert "plan: " not in str(healthy)
    assert qsim.doctor(model, [X], target="float32", progress=False).plan == Plan((), "float32", "float32", irreducible=True)
    integers = qsim.doctor(model, [X], target="tensorrt-int8", progress=False).plan
    assert (integers.keep, integers.format) == ((), "int8")
    assert "QuantSim.float_plan" in integers.note


def test_the_page_of_a_diagnosis_has_the_plan(model, tmp_path):
    qsim.doctor(model, [X], target="tensorrt-fp16", progress=False).save(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "keep 3 operations in float32" in text
    assert "block.<wbr>cumsum" in text


def test_json(plan):
    assert Plan.from_json(plan.to_json()) == plan
    spent = Plan(("a",), "int8", "onnxruntime-int8", sqnr=float("inf"), note="the budget of 3 probes is spent")
    assert Plan.from_json(spent.to_json()) == spent
    assert json.loads(spent.to_json())["sqnr"] == "inf"
    for text in ("[]", "{", '{"keep": [], "format": "float16"}', plan.to_json().replace('"probes"', '"guesses"')):
        with pytest.raises(ValueError, match="Plan: "):
            Plan.from_json(text)


def test_what_a_plan_says():
    assert str(Plan((), "float16", irreducible=True)) == "all of it can run in float16"
    assert str(Plan((), "float16", note="12 results are NaN")) == "none: 12 results are NaN"
    text = str(Plan(("a", "b"), "float16", irreducible=True, probes=7, sqnr=41.27))
    assert (
        text.splitlines()[0]
        == "keep 2 operations in float32, the rest in float16, reaching 41.27; irreducible: wrong with any one of them left out; 7 probes"
    )
    assert "not shown to be irreducible (spent)" in str(Plan(("a",), "float16", note="spent"))
    with pytest.raises(TypeError, match="expected a tuple of names"):
        Plan("block.mul", "float16")
    with pytest.raises(ValueError, match="expected one of 'float32'"):
        Plan(("a",), "fp16")


def test_nodes_by_module_and_ordinal(plan, exported):
    found = plan.nodes(exported)
    graph = onnx.load(exported).graph
    inputs = {node.name: node for node in graph.node}
    assert list(found) == list(KEPT)
    assert [len(names) for names in found.values()] == [2, 2, 2]  # two calls of the block
    made = {name: node for node in graph.node for name in node.output}
    for product, total, scaled in zip(*found.values(), strict=True):
        assert {made[name].op_type for name in inputs[product].input} == {"Mul"}
        assert made[inputs[total].input[0]].name == product
        assert made[inputs[scaled].input[0]].name == total


def test_a_whole_module_and_the_batch_norm_that_was_folded_into_it(exported):
    found = Plan(("block.fc", "head.2"), "float16", folded={"block.norm": "block.fc"}).nodes(exported)
    types = {node.name: node.op_type for node in onnx.load(exported).graph.node}
    assert [types[name] for name in found["block.fc"]].count("BatchNormalization") == 2
    assert {types[name] for name in found["head.2"]} <= {"Gemm", "Transpose", "MatMul", "Add"}


def test_more_is_kept_where_operations_cannot_be_told_apart(exported):
    types = {node.name: node.op_type for node in onnx.load(exported).graph.node}
    without = Plan(("block.mul_4",), "float16").nodes(exported)["block.mul_4"]
    other_count = Plan(("block.mul_4",), "float16", ordinals={"block.mul_4": Ordinal(3, 4)}).nodes(exported)["block.mul_4"]
    assert without == other_count == [name for name, kind in types.items() if kind == "Mul"]
    unknown = Plan(("block.erfinv",), "float16", ordinals={"block.erfinv": Ordinal(0, 1)}).nodes(exported)["block.erfinv"]
    assert {"Mul", "CumSum", "Add"} <= {types[name] for name in unknown}
    assert "Gemm" not in {types[name] for name in unknown}


def test_names_of_the_older_exporter_and_of_qsim(tmp_path):
    def saved(*nodes):
        made = [onnx.helper.make_node(op, ["x"], [f"y{i}"], name=name) for i, (op, name) in enumerate(nodes)]
        ends = [onnx.helper.make_tensor_value_info(name, 1, [2]) for name in ("x", f"y{len(nodes) - 1}")]
        onnx.save(onnx.helper.make_model(onnx.helper.make_graph(made, "g", ends[:1], ends[1:])), tmp_path / "m.onnx")
        return tmp_path / "m.onnx"

    plan = Plan(("layer1.0.sqrt_2", "layer1.0.act"), "float16", ordinals={"layer1.0.sqrt_2": Ordinal(1, 2)})
    older = saved(("Relu", "/layer1/layer1.0/act/Relu"), ("Sqrt", "/layer1/layer1.0/Sqrt"), ("Sqrt", "/layer1/layer1.0/Sqrt_1"))
    assert plan.nodes(older) == {"layer1.0.sqrt_2": ["/layer1/layer1.0/Sqrt_1"], "layer1.0.act": ["/layer1/layer1.0/act/Relu"]}
    ours = saved(("Sqrt", "layer1.0.Sqrt"), ("Relu", "layer1.0.act.Relu"), ("Sqrt", "layer1.0.Sqrt_1"))
    assert plan.nodes(ours) == {"layer1.0.sqrt_2": ["layer1.0.Sqrt_1"], "layer1.0.act": ["layer1.0.act.Relu"]}
    with pytest.raises(ExportError, match="nothing of 'layer2'"):
        Plan(("layer2",), "float16").nodes(ours)
    with pytest.raises(ExportError, match=r"no node of .* tells which module"):
        plan.nodes(saved(("Relu", "n0"), ("Sqrt", "n1")))


@pytest.mark.parametrize("format", ["float16", "bfloat16"])
def test_the_model_with_casts(model, plan, exported, tmp_path, format):
    nodes = [name for found in plan.nodes(exported).values() for name in found]
    written = Plan.from_json(plan.to_json().replace("float16", format)).write(tmp_path, exported)
    (path,) = [file for file in written if file.suffix == ".onnx"]
    assert path.name == f"model.{'fp16' if format == 'float16' else 'bf16'}.onnx"
    onnx.checker.check_model(str(path), full_check=True)
    types = types_of(path)
    kind = onnx.TensorProto.FLOAT16 if format == "float16" else onnx.TensorProto.BFLOAT16
    assert {types[name] for name in nodes} == {onnx.TensorProto.FLOAT}
    computing = [node.name for node in onnx.load(path).graph.node if node.op_type in ("Gemm", "Mul", "Add", "Relu", "BatchNormalization")]
    assert {types[name] for name in computing if name not in nodes} == {kind}
    assert [(value.name, value.type.tensor_type.elem_type) for value in onnx.load(path).graph.input] == [("x", 1)]
    if format == "float16":
        torch.testing.assert_close(run(path), model(X), rtol=2e-2, atol=2e-2)


def test_without_the_plan_the_model_with_casts_overflows(plan, exported, tmp_path):
    for left_out in range(len(KEPT)):
        nodes = [name for key, found in plan.nodes(exported).items() if key != KEPT[left_out] for name in found]
        halved = ir.load(exported)
        to_half(halved, nodes)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # NumPy: overflow in cast
            assert not run(ir.to_proto(halved).SerializeToString()).isfinite().all()


def test_casts_between_what_onnx_lets_be_half_and_what_not():
    text = """<ir_version: 10, opset_import: ["" : 20]>
    agraph (float[1,1,4,4] x, int64[2] n) => (float[1,1,8,8] y, float[2] m, int64[2] k)
    <float[4] scales = {1, 1, 2, 2}> {
        h = Neg(x)
        y = Resize(h, , scales)
        f = Cast<to=1>(n)
        m = Abs(f)
        g = Floor(f)
        k = Cast<to=7>(g)
    }"""
    halved = ir.from_proto(onnx.parser.parse_model(text))
    to_half(halved, [])
    proto = ir.to_proto(halved)
    onnx.checker.check_model(proto, full_check=True)
    resize = next(node for node in halved.graph if node.op_type == "Resize")
    assert [value.dtype for value in resize.inputs if value] == [ir.DataType.FLOAT16, ir.DataType.FLOAT]  # scales are float32 by definition
    assert [value.name for value in halved.graph.outputs] == ["y", "m", "k"]
    assert [value.dtype for value in halved.graph.outputs] == [ir.DataType.FLOAT, ir.DataType.FLOAT, ir.DataType.INT64]
    with pytest.raises(ExportError, match="no node 'nowhere'"):
        to_half(halved, ["nowhere"])


def test_the_files(plan, exported, tmp_path):
    written = plan.write(tmp_path / "new", exported)
    names = ["plan.json", "coreml_op_selector.py", "node_block_list.json", "trtexec.txt", "modelopt.json", "model.fp16.onnx"]
    assert sorted(path.name for path in written) == sorted(names)
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted(names)
    assert Plan.from_json((tmp_path / "new" / "plan.json").read_text()) == plan
    every = [node.name for node in onnx.load(exported).graph.node]
    nodes = sorted((name for found in plan.nodes(exported).values() for name in found), key=every.index)
    assert json.loads((tmp_path / "new" / "node_block_list.json").read_text()) == nodes
    line = (tmp_path / "new" / "trtexec.txt").read_text()
    flags = dict(flag.split("=", 1) for flag in line.split() if "=" in flag)
    assert line.split()[0] == "trtexec"
    assert flags["--onnx"] == "model.onnx"
    assert "--fp16" in line.split()
    assert flags["--precisionConstraints"] == "obey"
    assert flags["--layerPrecisions"] == flags["--layerOutputTypes"] == ",".join(f"{name}:fp32" for name in nodes)
    modelopt = json.loads((tmp_path / "new" / "modelopt.json").read_text())
    assert modelopt["quant_cfg"] == []  # no module among what is kept
    assert [name for name in every if any(re.match(pattern, name) for pattern in modelopt["nodes_to_exclude"])] == nodes
    # without a model, what names no nodes; for integers, nothing for half precision
    assert [path.name for path in plan.write(tmp_path / "bare")] == ["plan.json", "coreml_op_selector.py", "modelopt.json"]
    integer = Plan(("head.2",), "int8").write(tmp_path / "int8", exported)
    assert [path.name for path in integer] == ["plan.json", "node_block_list.json", "trtexec.txt", "modelopt.json"]
    (entry,) = json.loads((tmp_path / "int8" / "modelopt.json").read_text())["quant_cfg"]
    assert entry["enable"] is False
    assert fnmatchcase("head.2.weight_quantizer", entry["quantizer_name"])
    assert not fnmatchcase("head.20.weight_quantizer", entry["quantizer_name"])


def test_nothing_is_written_if_anything_fails(exported, tmp_path):
    with pytest.raises(ExportError, match="nothing of 'tail'"):
        Plan(("tail",), "float16").write(tmp_path / "new", exported)
    assert not (tmp_path / "new").exists()


class Source(enum.Enum):  # as coremltools.converters.mil.mil.scope has them
    TORCHSCRIPT_MODULE_TYPE = 0
    TORCHSCRIPT_MODULE_NAME = 1
    EXIR_STACK_TRACE = 2


def mil(op_type, modules, function, value="1"):
    scopes = {Source.TORCHSCRIPT_MODULE_TYPE: [*("M" for _ in modules), function], Source.TORCHSCRIPT_MODULE_NAME: [*modules, value]}
    return SimpleNamespace(op_type=op_type, name=value, scopes=scopes, inputs={}, outputs=[])


def test_the_selector_of_core_ml(plan, tmp_path):
    plan.write(tmp_path)
    for select in (runpy.run_path(str(tmp_path / "coreml_op_selector.py"))["op_selector"], plan.op_selector()):
        assert not select(mil("cumsum", ["block"], "cumsum"))
        assert not select(mil("mul", ["block"], "mul"))
        assert not select(mil("layer_norm", ["block"], "add"))  # made of several, those that are kept maybe among them
        assert select(mil("add", ["block"], "add"))
        assert select(mil("linear", ["block", "fc"], "linear"))
        assert select(mil("mul", ["blocks"], "mul"))
        assert select(mil("mul", [], "mul"))
        assert select(SimpleNamespace(op_type="cast", name="c", scopes={}, outputs=[]))
        with pytest.raises(ValueError, match=r"torch\.jit\.trace"):
            select(SimpleNamespace(op_type="mul", name="c", scopes={Source.EXIR_STACK_TRACE: ["File ..."]}))
    modules = Plan(("head.2", "rtruediv"), "float16").op_selector()
    assert not modules(mil("linear", ["head", "2"], "linear"))
    assert modules(mil("linear", ["head", "20"], "linear"))
    assert not modules(mil("add", ["head", "2"], "add_"))
    assert not modules(mil("inverse", [], "reciprocal"))


@pytest.mark.parametrize("name", ["it's", "a,b", 'x"y', "layer:0"])
def test_odd_names_are_text_in_the_source(name):
    plan = Plan((f"{name}.conv",), "float16")
    assert not plan.op_selector()(mil("conv", [*name.split("."), "conv"], "_convolution"))
