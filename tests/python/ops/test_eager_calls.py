"""Calls through `qsim._C` and nodes of the backward graph: what torch.ops and torch's own machinery give, wherever the call is made."""

import ast
from pathlib import Path

import pytest
import torch
import torch._dynamo.compiled_autograd
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

import qsim
from qsim import _C, ops

SCALE, ZERO_POINT = torch.tensor(0.3), torch.tensor(1, dtype=torch.int32)
GRID = SCALE, ZERO_POINT, -8, 7
OPERATORS = [name for name in dir(_C) if name.islower() and not name.startswith("__")]  # classes are none


def error_of(call, *args, **kwargs):
    with pytest.raises((TypeError, ValueError, RuntimeError, IndexError)) as raised:
        call(*args, **kwargs)
    return type(raised.value), str(raised.value)


@pytest.mark.parametrize("name", OPERATORS)
def test_stub_names_the_parameters_of_the_schema(name):
    stub = Path(qsim.__file__).with_name("_C.pyi").read_text()
    (function,) = (node for node in ast.parse(stub).body if isinstance(node, ast.FunctionDef) and node.name == name)
    packet, overload = getattr(torch.ops.qsim, name.removesuffix("_out")), "out" if name.endswith("_out") else "default"
    assert [a.arg for a in function.args.args] == [a.name for a in getattr(packet, overload)._schema.arguments]


class Counting(TorchFunctionMode):
    def __init__(self):
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_modes_and_subclasses_see_the_operator():
    class Subclass(torch.Tensor):
        pass

    with Counting() as mode:
        y = ops.fake_quantize(torch.ones(3), *GRID, rounding="reciprocal")
    assert torch.ops.qsim.fake_quantize.default in mode.seen
    assert torch.equal(y, ops.fake_quantize(torch.ones(3), *GRID, rounding="reciprocal"))
    assert type(ops.fake_quantize(torch.ones(3).as_subclass(Subclass), *GRID)) is Subclass
    assert type(ops.round_to_format(torch.ones(3).as_subclass(Subclass), "float16")) is Subclass


def test_in_place_and_out_return_what_was_given():
    x, parameter = torch.ones(3), torch.nn.Parameter(torch.ones(3))
    assert ops.fake_quantize_(x, *GRID) is x
    assert ops.round_to_format_(x, "float16") is x
    out = torch.empty(3)
    assert ops.fake_quantize(x, *GRID, out=out) is out
    assert type(ops.fake_quantize(parameter, *GRID)) is torch.Tensor


@pytest.mark.parametrize(
    "args",
    [
        (None, *GRID),
        (torch.ones(3, dtype=torch.int32), *GRID),
        (torch.ones(3), SCALE, ZERO_POINT, 7, -8),
        (torch.ones(3), SCALE, ZERO_POINT, 0.5, 1),
    ],
    ids=["None", "dtype", "grid", "float"],
)
def test_errors_are_those_of_the_operator(args):
    assert error_of(_C.fake_quantize, *args) == error_of(torch.ops.qsim.fake_quantize.default, *args)


def test_an_option_by_position_or_by_name_is_the_same():
    x, scale = torch.randn(4, 3), torch.tensor([0.1, 0.2, 0.3])
    grid = scale, torch.zeros(3, dtype=torch.int32), -8, 7
    expected = torch.ops.qsim.fake_quantize(x, *grid, axis=1, rounding="reciprocal")
    assert torch.equal(_C.fake_quantize(x, *grid, 1, None, "reciprocal", 1.0), expected)
    assert torch.equal(_C.fake_quantize(x, *grid, axis=1, rounding="reciprocal"), expected)
    with pytest.raises(RuntimeError, match="Unknown keyword argument 'scales'"):
        _C.fake_quantize(x, *grid, scales=scale)


def test_traces_hold_the_operator():
    traced = torch.jit.trace(lambda x: ops.fake_quantize(x, *GRID), (torch.randn(3),))
    assert "qsim::fake_quantize" in str(traced.graph)
    graph = make_fx(lambda x: ops.fake_quantize(x, *GRID))(torch.randn(3)).graph
    assert torch.ops.qsim.fake_quantize.default in [node.target for node in graph.nodes]


def _leaf(w, scale):
    return ops.fake_quantize(w, scale, ZERO_POINT, -8, 7)


def _activation(w, scale):
    return ops.fake_quantize(w * 1.5, scale, ZERO_POINT, -8, 7)


def _in_place(w, scale):
    return ops.fake_quantize_(w * 1.5, scale, ZERO_POINT, -8, 7)


def _view(w, scale):
    x = w * 1.5
    ops.fake_quantize_(x.t()[1:], scale, ZERO_POINT, -8, 7)
    return x


def _format(w, scale):
    return ops.round_to_format_(ops.round_to_format(w * 1e5, "float16") * 1e-5, "float8_e5m2")


def _observed(w, scale):
    on, state = torch.tensor(True), [torch.tensor(torch.inf), torch.tensor(-torch.inf), torch.zeros(4, dtype=torch.int64)]
    return ops.observe_fake_quantize(w * 1.5, on, on, *state, torch.tensor(torch.nan), ZERO_POINT.clone(), -8, 7)


PROGRAMS = [_leaf, _activation, _in_place, _view, _format, _observed]


def _gradients(program, learned):
    torch.manual_seed(0)
    w, scale = torch.randn(6, 5, requires_grad=True), SCALE.clone().requires_grad_(learned)
    (program(w, scale) ** 2).sum().backward()
    return [x.grad for x in (w, scale) if x.grad is not None]


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("program", PROGRAMS)
def test_compiled_autograd(program, learned):
    expected = _gradients(program, learned)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        found = _gradients(program, learned)
    assert len(found) == len(expected) > 0
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_graph_is_freed_and_refuses_a_second_backward(program):
    w = torch.randn(6, 5, requires_grad=True)
    loss = program(w, SCALE).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("program", [_leaf, _activation])
def test_double_backward(program):
    w = torch.linspace(-2, 2, 10, requires_grad=True)
    (first,) = torch.autograd.grad((program(w, SCALE) ** 3).sum(), w, create_graph=True)
    y, passes = program(w, SCALE).detach(), first.detach() != 0
    (second,) = torch.autograd.grad(first.sum(), w)
    factor = 1.5 if program is _activation else 1.0
    torch.testing.assert_close(second, torch.where(passes, 6 * y * factor**2, 0.0))


def test_saved_tensors_go_through_hooks():
    packed = []
    w = torch.randn(16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.dtype) or t, lambda t: t):
        y = ops.fake_quantize(w * 1.0, *GRID)
    assert torch.uint8 in packed  # one bit per element
    y.sum().backward()
    assert "FakeQuantize" in y.grad_fn.name()
