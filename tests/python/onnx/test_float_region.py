"""What stays in float32 for the sake of others, and the model with Cast that has it so: beside float32 and NumPy's float16."""

import onnx
import onnx_ir as ir
import pytest
import torch
from onnx.reference import ReferenceEvaluator

from qsim.errors import ExportError
from qsim.onnx.float_region import float_region
from qsim.onnx.half_casts import to_half

# Each: what lies between "big", whose results leave float16, and "small", which brings them back; and which of it has to stay.
BETWEEN = {
    "Slice": ("t = Slice(b, i0, i2)", {"t"}),
    "Reshape and Transpose": ("u = Reshape(b, shape) t = Transpose<perm=[1,0]>(u)", {"u", "t"}),
    "Expand": ("t = Expand(b, wide)", {"t"}),
    "Concat": ("u, v = Split<axis=1, num_outputs=2>(b) t = Concat<axis=1>(v, u)", {"u", "t"}),
    "Where, with a mask of what was half": ("m = Greater(x, one) t = Where(m, b, lowest)", {"t"}),
    "Where of a result in half precision": ("h = Neg(x) m = Greater(x, one) t = Where(m, h, b)", {"t"}),
    "Pad": ("t = Pad(b, pads)", {"t"}),
    "Gather": ("t = Gather(b, i0)", {"t"}),
    "Resize": ('u = Unsqueeze(b, i02) v = Resize<mode="nearest">(u, , scales) t = Squeeze(v, i02)', {"u", "v", "t"}),
    "MaxPool": ("u = Unsqueeze(b, i02) v = MaxPool<kernel_shape=[1,2]>(u) t = Squeeze(v, i02)", {"u", "v", "t"}),
}


def model_of(between):
    """Square, divided by its size again: `big` and `small` are kept, and it is named what a node makes."""
    text = f"""<ir_version: 10, opset_import: ["" : 20]>
    agraph (float[4,6] x) => (float[M,N] y)
    <float one = {{1}}, float lowest = {{-3.4e38}}, int64[1] i0 = {{0}}, int64[1] i2 = {{2}}, int64[2] shape = {{6, 4}},
     float c = {{0.00001}},
     int64[2] wide = {{4, 6}}, int64[4] pads = {{1, 0, 0, 1}}, int64[2] i02 = {{0, 1}}, float[4] scales = {{1, 1, 2, 1}}> {{
        b = Mul(x, x)
        {between}
        s = Mul(t, c)
        y = Tanh(s)
    }}"""
    model = ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text)))
    for node in model.graph:
        node.name = node.outputs[0].name
    return model


def run(model, x):
    return ReferenceEvaluator(ir.to_proto(model)).run(None, {"x": x.numpy()})[0]


@pytest.mark.parametrize("name", BETWEEN)
def test_what_moves_values_between_kept_nodes_stays(name):
    between, expected = BETWEEN[name]
    model, x = model_of(between), 900 * torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    assert set(float_region(model.graph, ["b", "s"])) == {"b", "s", *expected}
    right = run(model, x)
    to_half(model, ["b", "s"])
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    assert torch.tensor(run(model, x)).isfinite().all()
    torch.testing.assert_close(torch.tensor(run(model, x)), torch.tensor(right), rtol=2e-3, atol=2e-3)


def test_what_moves_other_values_is_left_to_half_precision():
    def region(between, keep):
        return float_region(model_of(between).graph, keep)

    assert region("t = Slice(b, i0, i2)", ["b"]) == ["b"]  # read in half precision: cast there, or behind the Slice
    assert region("t = Slice(b, i0, i2)", ["s"]) == ["s"]  # what it moves has been in half precision
    assert region("u = Neg(b) t = Slice(u, i0, i2)", ["b", "s"]) == ["b", "s"]
    assert region("u = Slice(x, i0, i2) t = Neg(u)", ["t"]) == ["u", "t"]  # an input of the model, which no one has rounded
    assert region("u = Expand(lowest, wide) t = Add(b, u)", ["t"]) == ["u", "t"]  # nor a constant
    assert region("u = Expand(lowest, wide) m = Greater(x, one) t = Where(m, b, u)", ["s"]) == [
        "s"
    ]  # in the simulation it is rounded with b


def test_what_is_returned_in_float32_stays():
    text = """<ir_version: 10, opset_import: ["" : 20]>
    agraph (float[4,6] x) => (float[6,4] y) { b = Mul(x, x) y = Transpose<perm=[1,0]>(b) }"""
    model = ir.from_proto(onnx.parser.parse_model(text))
    for node in model.graph:
        node.name = node.outputs[0].name
    to_half(model, ["b"])
    x = torch.full((4, 6), 1e4)
    assert (torch.tensor(run(model, x)) == 1e8).all()


def test_a_node_without_a_name():
    model = model_of("t = Slice(b, i0, i2)")
    next(node for node in model.graph if node.op_type == "Slice").name = ""
    with pytest.raises(ExportError, match="the Slice that makes 't' has to stay in float32, and has no name"):
        float_region(model.graph, ["b", "s"])


def test_a_model_without_types_of_its_values():
    model = model_of("t = Slice(b, i0, i2)")
    for node in model.graph:
        if node.op_type != "Tanh":
            node.outputs[0].type = None
    to_half(model, ["b", "s"])
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
