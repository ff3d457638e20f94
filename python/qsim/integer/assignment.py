"""Which operations of a traced simulation ONNX Runtime runs on integers, and why it does not run the others so.

It looks at one operation at a time: all that it reads dequantized, and what it makes quantized at once, by a ReLU or a Clip between
them only if the grid of the result clips as they do. Its kernels: `qsim.operations.onnxruntime`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch.fx import Graph, Node

from qsim.graph.execute.marks import BIAS, QUANTIZED, ROUNDED
from qsim.integer.averages import is_computed, is_whole, operation_of
from qsim.integer.kernels.pairs import INT16_MAX
from qsim.numbers.encoding import Encoding
from qsim.numbers.float_format import FLOAT_FORMATS
from qsim.operations.onnx_types import onnx_type
from qsim.operations.onnxruntime import INTEGER_KERNELS
from qsim.trace.fx_nodes import arguments, function, is_float, is_leaf, module, shape
from qsim.trace.integer_forms import NUMBER, SCALED, number, scaled
from qsim.trace.marks_before_rectifiers import absorbs, limits_of
from qsim.trace.marks_behind_moves import is_moving, key_of, readers_of
from qsim.trace.token_scales import OF_SCALES

Encodings = Mapping[str, Encoding]
_MARKS = (QUANTIZED, BIAS, ROUNDED, SCALED, NUMBER)


@dataclass(frozen=True)
class Kernel:
    """How ONNX Runtime runs one operation.

    Attributes
    ----------
    node : Node
        The operation.
    name : str
        What the quantizer of its result is called, without its role; else its module and function.
    module : str
        Path of the module that it belongs to.
    op : str
        Its ONNX type.
    kernel : str or None
        The integer kernel that runs it; None: it runs in float, between DequantizeLinear and QuantizeLinear.
    reason : str
        Why there is no integer kernel, as a sentence that names the operation; "" where there is one.
    result : str or None
        The quantizer on whose grid the kernel leaves its result; None: the result is float.
    rectifier : Node or None
        The ReLU or Clip behind the operation that the kernel takes over.
    pair : int or None
        The largest sum of two products that uint8 activations could make with the weight (`qsim.integer.kernels.pairs`); None where it
        multiplies no such types.

    Examples
    --------
    >>> sim = qsim.QuantSim(torch.nn.Linear(3, 2), torch.zeros(1, 3), qsim.int8(target="onnxruntime"))
    >>> report = sim.calibrate([torch.randn(64, 3)], progress=False)
    >>> sim.kernels()[0].kernel
    'QGemm'
    """

    node: Node
    name: str
    module: str
    op: str
    kernel: str | None
    reason: str = ""
    result: str | None = None
    rectifier: Node | None = None
    pair: int | None = None

    @property
    def saturates(self) -> bool:
        """Whether x86 CPUs without VNNI could compute something else: such a sum leaves 16 bits."""
        return self.pair is not None and self.pair > INT16_MAX


_WRITTEN_OTHERWISE = {"Attention": "; as matmul, softmax and matmul it has them"}


class _Float(Exception):
    """Why an operation runs in float."""


def classify(graph: Graph, encodings: Encodings) -> list[Kernel]:
    """How ONNX Runtime runs each operation of the model that computes, in the order of the graph.

    Parameters
    ----------
    graph : Graph
        A traced simulation, with marks behind what moves values and in front of rectifiers (`qsim.trace.marks_behind_moves`,
        `qsim.trace.marks_before_rectifiers`), without marks of quantizers that are off.
    encodings : mapping of str to Encoding
        Of all marks, by key. Integers of up to eight bits are stored as int8 or uint8.

    Returns
    -------
    list of Kernel
        One for each operation; those that only move values, and the rectifiers behind others, have none.
    """
    return [_classified(node, encodings) for node in graph.nodes if _computes(node)]


def _computes(node: Node) -> bool:
    if node.op != "call_function" or node.target in _MARKS or not is_float(node) or is_moving(node) or OF_SCALES in node.meta:
        return False
    return limits_of(node) is None or key_of(node.args[0]) is not None


def _classified(node: Node, encodings: Encodings) -> Kernel:
    op, name = onnx_type(function(node)), _name(node) if limits_of(node) is None else _place(node)
    try:
        rule = _RULES.get(function(node))
        if rule is None:
            raise _Float(f"ONNX Runtime has no integer kernel for {op}{_WRITTEN_OTHERWISE.get(op, '')}")
        kernel, end = rule(node, encodings)
    except _Float as reason:
        return Kernel(node, name, module(node), op, None, f"'{name}' runs in float: {reason}")
    return Kernel(node, name, module(node), op, kernel, result=end.key, rectifier=end.rectifier)


def _name(node: Node) -> str:
    """What the quantizer behind an operation is called, without its role; else the operation's module and type. Behind another operation it
    is called so only if it is the quantizer of both, which goes by the first."""
    reader, place, is_own = node, _place(node), True
    while len(reader.users) == 1:
        reader = next(iter(reader.users))
        if (key := key_of(reader)) is not None:
            name = key.rpartition(".")[0] or key
            return name if is_own or name.startswith(place) else place
        is_own = is_own and (is_moving(reader) or limits_of(reader) is not None)
    return place


def _place(node: Node) -> str:
    """The module of an operation, and the function unless the module is that."""
    return module(node) if is_leaf(node) else ".".join(filter(None, (module(node), function(node))))


def weight_of(kernel: Kernel, encodings: Encodings) -> tuple[Node, int] | None:
    """The mark of the signed weight that a kernel multiplies with unsigned activations, and its axis of output channels."""
    if kernel.kernel is None or (found := _WEIGHTS.get(function(kernel.node))) is None:
        return None
    given = arguments(kernel.node)
    (x, weight), channels = (given[name] for name in found[:2]), found[2]
    grids = _operand(x, encodings, "input"), _operand(weight, encodings, "weight")
    return (weight, channels) if grids[0].quant_min >= 0 > grids[1].quant_min else None


_WEIGHTS = {
    **{f"conv{n}d": ("input", "weight", 0) for n in (1, 2, 3)},
    **dict.fromkeys(("mm", "bmm"), ("self", "mat2", -1)),
    "matmul": ("self", "other", -1),
    "linear": ("input", "weight", 0),
    "addmm": ("mat1", "mat2", -1),
}


# What is read, and what is made.


def _operand(value: object, encodings: Encodings, position: str) -> Encoding:
    """The grid of an operand, integers of at most eight bits."""
    if isinstance(value, Node) and value.target in (SCALED, NUMBER):
        _, key, factor = value.args
        return scaled(encodings[key], factor) if value.target is SCALED else number(factor, encodings[key])[1]  # type: ignore[index, arg-type]
    key = key_of(value)
    if key is None:
        source = f", made by '{_name(value)}'," if isinstance(value, Node) and value.op == "call_function" else ""
        raise _Float(f"its {position}{source} is not quantized")
    return _integers(key, encodings)


def _integers(key: str, encodings: Encodings) -> Encoding:
    encoding = encodings[key]
    if encoding.dtype in FLOAT_FORMATS or max(-encoding.quant_min, encoding.quant_max) > 255:
        raise _Float(f"'{key}' is {encoding.dtype}; integer kernels take at most 8 bits")
    return encoding


def _activation(value: object, encodings: Encodings, position: str = "input") -> Encoding:
    """The grid of an activation, with one scale."""
    return _single(str(key_of(value)), _operand(value, encodings, position))


def _single(key: str, encoding: Encoding) -> Encoding:
    if encoding.axis is not None:
        raise _Float(f"'{key}' has a scale for each channel; integer kernels take activations with one")
    return encoding


def _whole(key: str, encoding: Encoding) -> Encoding:
    """The grid of a result: all integers of int8 or uint8."""
    if (encoding.quant_min, encoding.quant_max) not in ((-128, 127), (0, 255)):
        raise _Float(f"'{key}' uses [{encoding.quant_min}, {encoding.quant_max}]; integer kernels clip to all of int8 or uint8")
    return encoding


def _weight(value: object, encodings: Encodings, x: Encoding, channels: int) -> Encoding:
    """The grid of a weight that is multiplied with activations on the grid `x`; `channels`: its axis of output channels."""
    encoding, key = _operand(value, encodings, "weight"), key_of(value)
    if encoding.block_size is not None:
        raise _Float(f"'{key}' has a scale for each block; integer kernels take one for each output channel")
    if encoding.axis not in (None, channels):
        raise _Float(
            f"'{key}' has scales along axis {encoding.axis}; integer kernels take them along that of the output channels, {channels}"
        )
    if x.quant_min < 0 and encoding.quant_min >= 0:
        raise _Float(f"'{key}' is unsigned and its input signed; integer kernels multiply signed integers with signed ones")
    if not bool((encoding.zero_point == encoding.zero_point.reshape(-1)[0]).all()):
        raise _Float(f"'{key}' has different zero points; integer kernels take one")
    return encoding


@dataclass(frozen=True)
class _End:
    """Where the result of an operation is quantized: by which quantizer, behind which rectifier."""

    key: str | None = None
    rectifier: Node | None = None


def _end(node: Node, encodings: Encodings, x: Encoding) -> _End:
    """Where a kernel that reads activations on the grid `x` leaves its result."""
    end = _quantized_at(node, encodings)
    if end.key is None:
        raise _Float(f"its result is read by {_readers(node)}, not quantized")
    y = _whole(end.key, _single(end.key, _integers(end.key, encodings)))
    if (y.quant_min < 0) != (x.quant_min < 0):
        raise _Float(f"its input and its result, '{end.key}', are not both signed or both unsigned")
    return end


def _quantized_at(node: Node, encodings: Encodings) -> _End:
    """The one quantizer that reads a node, or the rectifier that does; no key where the result goes on in float."""
    readers = readers_of(node)
    rectifier = readers[0] if len(readers) == 1 else None
    if rectifier is None or rectifier.op != "call_function" or limits_of(rectifier) is None:
        return _End(_read_by(node, encodings))
    if (key := _read_by(rectifier, encodings)) is None:
        raise _Float(f"the {onnx_type(function(rectifier))} behind it is not quantized")
    _check_absorbed(rectifier, key, encodings)
    return _End(key, rectifier)


def _read_by(node: Node, encodings: Encodings) -> str | None:
    """The quantizer that all readers of a node are marks of."""
    keys = {key_of(reader) for reader in readers_of(node)}
    key = keys.pop() if len(keys) == 1 else None
    return key if key in encodings else None


def _readers(node: Node) -> str:
    names = [f"'{_name(user)}'" if user.op == "call_function" else "the caller of the model" for user in node.users if key_of(user) is None]
    return " and ".join(names)


def _check_absorbed(rectifier: Node, key: str, encodings: Encodings) -> None:
    """A ReLU is part of a kernel whose result has its zero point at the end of the grid, a Clip if it clips no more than the grid."""
    encoding, limits = _integers(key, encodings), limits_of(rectifier)
    if absorbs(encoding, rectifier):
        return
    if function(rectifier) == "relu":
        found = f"the zero point of '{key}' is {int(encoding.zero_point)}, not {encoding.quant_min}"
        raise _Float(f"the ReLU behind it is no part of it: {found}")
    assert limits is not None
    raise _Float(f"the Clip behind it, to [{limits[0]:g}, {limits[1]:g}], clips more than the grid of '{key}'")


# The rules: the kernel's name and where its result is quantized, or an exception that says why there is none.

_Rule = Callable[[Node, Encodings], tuple[str, _End]]


def _conv(node: Node, encodings: Encodings) -> tuple[str, _End]:
    given = arguments(node)
    x = _activation(given["input"], encodings)
    _weight(given["weight"], encodings, x, 0)
    return INTEGER_KERNELS["Conv"].name, _end(node, encodings, x)


def _linear(node: Node, encodings: Encodings) -> tuple[str, _End]:
    given = arguments(node)
    return _gemm(node, encodings, given["input"], given["weight"], given["bias"], 0)


def _addmm(node: Node, encodings: Encodings) -> tuple[str, _End]:
    given = arguments(node)
    if given["alpha"] != 1 or given["beta"] != 1:
        raise _Float("its factors alpha and beta are not 1")
    return _gemm(node, encodings, given["mat1"], given["mat2"], given["self"], 1)


def _gemm(node: Node, encodings: Encodings, input: object, weight: object, bias: object, channels: int) -> tuple[str, _End]:
    x = _activation(input, encodings)
    _weight(weight, encodings, x, channels)
    if (key := key_of(bias)) is not None:
        raise _Float(f"its bias has a quantizer of its own, '{key}'; the kernel adds integers on the grid of its products")
    sizes = shape(input)  # type: ignore[arg-type]
    unknown = sum(not isinstance(n, int) for n in sizes)
    if len(sizes) > 2 and unknown > 1:
        raise _Float(f"{unknown} sizes of its input are unknown, and as rows of one matrix it has one")
    end = _product_end(node, encodings, x)
    if len(sizes) != 2 and end.rectifier is not None:
        end = _End()  # rows are reshaped before and behind QGemm, and the ReLU comes after that
    if end.key is None and bias is not None and not (isinstance(bias, Node) and bias.target is BIAS):
        raise _Float("its bias is in float, and its result not quantized")
    return INTEGER_KERNELS["Gemm"].name, end


def _product_end(node: Node, encodings: Encodings, x: Encoding) -> _End:
    """Products with matrices have kernels with a float result too, for one that no quantizer reads."""
    if any(key_of(user) in encodings for user in node.users) or _quantized_at(node, encodings).rectifier:
        return _end(node, encodings, x)
    return _End()


def _matmul(node: Node, encodings: Encodings) -> tuple[str, _End]:
    left, right = node.args[:2]
    x = _activation(left, encodings, "left operand")
    _weight(right, encodings, x, 1)
    end = _product_end(node, encodings, x)
    return ("MatMulIntegerToFloat" if end.key is None else INTEGER_KERNELS["MatMul"].name), end


def _binary(op: str) -> _Rule:
    def rule(node: Node, encodings: Encodings) -> tuple[str, _End]:
        given = arguments(node)
        if given.get("alpha", 1) != 1:
            raise _Float(f"its second operand is multiplied with {given['alpha']}")
        a, b = (_activation(given[name], encodings, f"{which} operand") for name, which in (("self", "first"), ("other", "second")))
        if (a.quant_min < 0) != (b.quant_min < 0):
            raise _Float("its operands are not both signed or both unsigned")
        return INTEGER_KERNELS[op].name, _end(node, encodings, a)

    return rule


def _unary(op: str) -> _Rule:
    def rule(node: Node, encodings: Encodings) -> tuple[str, _End]:
        return INTEGER_KERNELS[op].name, _end(node, encodings, _activation(arguments(node)["self"], encodings))

    return rule


def _concat(node: Node, encodings: Encodings) -> tuple[str, _End]:
    tensors = arguments(node)["tensors"]
    grids = [_activation(t, encodings, f"operand {i}") for i, t in enumerate(tensors)]
    if len({grid.quant_min for grid in grids}) > 1:
        raise _Float("its operands are not all signed or all unsigned")
    return INTEGER_KERNELS["Concat"].name, _end(node, encodings, grids[0])


def _average(node: Node, encodings: Encodings) -> tuple[str, _End]:
    op, refused = operation_of(node)
    if refused:
        raise _Float(refused)
    kernel, end = _unary(op)(node, encodings)
    x, y = _activation(arguments(node)["self"], encodings), encodings[str(end.key)]
    if is_whole(node, op) and not is_computed(float(x.scale), float(y.scale), shape(arguments(node)["self"])[2:]):
        raise _Float(f"the grid of '{end.key}' is too fine or too coarse beside that of what it averages: means that are all nearly zero")
    return kernel, end


_RULES: dict[str, _Rule] = {
    **{f"conv{n}d": _conv for n in (1, 2, 3)},
    **{f"{name}{n}d": _average for name in ("avg_pool", "adaptive_avg_pool") for n in (1, 2, 3)},
    **dict.fromkeys(("matmul", "mm", "bmm"), _matmul),
    **dict.fromkeys(("cat", "concat", "concatenate"), _concat),
    "linear": _linear,
    "addmm": _addmm,
    "add": _binary("Add"),
    "mul": _binary("Mul"),
    "mean": _average,
    "sigmoid": _unary("Sigmoid"),
    "leaky_relu": _unary("LeakyRelu"),
    "softmax": _unary("Softmax"),
    "where": _binary("Where"),
}
