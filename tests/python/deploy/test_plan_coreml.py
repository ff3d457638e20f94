"""Core ML's selector on programs of MIL: what only moves values between kept operations stays in float32."""

import enum

import pytest

from qsim.deploy.engine_plan import Plan


class Source(enum.Enum):  # as coremltools.converters.mil.mil.scope has them
    TORCHSCRIPT_MODULE_TYPE = 0
    TORCHSCRIPT_MODULE_NAME = 1


class Var:
    """A value of MIL, as far as the selector asks."""

    def __init__(self, op=None, dtype="fp32"):
        self.op, self.dtype, self.child_ops, self.consuming_blocks = op, dtype, [], []

    def is_tensor_or_scalar_of(self, dtype):
        return dtype == self.dtype


class Op:
    def __init__(self, op_type, function=None, *inputs, path=(), dtype="fp32"):
        self.op_type, self.name, self.outputs = op_type, op_type, [Var(self, dtype)]
        self.scopes = {Source.TORCHSCRIPT_MODULE_TYPE: [*path, function], Source.TORCHSCRIPT_MODULE_NAME: [*path, "1"]} if function else {}
        self.inputs = dict(zip("abcdef", [i.outputs[0] if isinstance(i, Op) else i for i in inputs], strict=False))
        for value in self.inputs.values():
            for each in value if isinstance(value, tuple) else (value,):
                each.child_ops.append(self)


def selected(op, *keep):
    return Plan(keep, "float16").op_selector()(op)


@pytest.mark.parametrize("move", ["slice_by_index", "reshape", "transpose", "concat", "expand_dims", "pad", "split", "tile"])
def test_between_two_that_are_kept(move):
    first = Op("cumsum", "cumsum", Var())
    moved = Op(move, move, first)
    again = Op("reshape", "view", moved)
    Op("sub", "sub", again)
    assert not selected(moved, "cumsum", "sub")
    assert not selected(again, "cumsum", "sub")
    assert selected(moved, "cumsum")  # cast there, or behind it
    assert selected(moved, "sub")  # what it moves is in float16


def test_a_mask_between_scores_and_softmax():
    scores, lowest = Op("matmul", "matmul", Var()), Op("const", "where")
    condition = Op("equal", "eq", Var(), dtype="bool")
    masked = Op("select", "where", condition, lowest, scores)
    Op("softmax", "softmax", masked)
    assert not selected(masked, "matmul", "softmax")
    assert selected(masked, "softmax")  # rounded with the scores, as in the simulation


def test_inputs_and_constants_reach_a_kept_operation_unrounded():
    moved = Op("reshape", "view", Var())
    spread = Op("tile", "expand", Op("const", "expand"))
    Op("mul", "mul", moved, spread)
    assert not selected(moved, "mul")
    assert not selected(spread, "mul")
    assert selected(moved)


def test_results_of_the_program():
    moved = Op("transpose", "transpose", Op("cumsum", "cumsum", Var()))
    assert selected(moved, "cumsum")
    moved.outputs[0].consuming_blocks.append("main")
    assert not selected(moved, "cumsum")


def test_operations_before_have_their_casts_already():
    half = Op("mul", "mul", Op("cast", None, Var(), dtype="fp16"), dtype="fp16")
    kept = Op("cumsum", "cumsum", Op("cast", None, half))
    joined = Op("concat", "stack", Var())
    joined.inputs["b"] = (Op("cast", None, half).outputs[0], kept.outputs[0])
    kept.outputs[0].child_ops.append(joined)
    Op("sub", "sub", joined)
    assert not selected(joined, "cumsum", "sub")
    assert selected(Op("reshape", "view", Op("cast", None, half)), "cumsum", "sub")
