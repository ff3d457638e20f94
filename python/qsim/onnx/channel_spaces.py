"""Which tensors of a Q/DQ model have the same channels, so that all of them can be given more, and which constants hold these channels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

WORTH = 30_000.0  # multiply-accumulates of a layer from which on another number of channels pays: a microsecond
_RANK = 4  # images: the channels are axis 1
_INTEGERS = (ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT32)


@dataclass(frozen=True)
class ChannelConstant:
    """A constant that one operation reads, through a DequantizeLinear or as it is.

    Attributes
    ----------
    read : ir.Value
        What the operation reads.
    values : ir.Value
        The initializer: integers, or numbers.
    grid : tuple of ir.Value
        Scale, and zero point if there is one.
    axis : int or None
        The axis along which the scale has an entry for each channel.
    """

    read: ir.Value
    values: ir.Value
    grid: tuple[ir.Value, ...] = ()
    axis: int | None = None

    @classmethod
    def of(cls, value: ir.Value) -> ChannelConstant | None:
        """None where several read it, or it is none of these."""
        if len(value.uses()) != 1 or value.is_graph_output():
            return None
        if value.const_value is not None:
            return cls(value, value)
        dequantize = value.producer()
        if dequantize is None or dequantize.op_type != "DequantizeLinear" or "block_size" in dequantize.attributes:
            return None
        inputs = [x for x in dequantize.inputs if x is not None]
        if any(x.const_value is None for x in inputs) or inputs[0].dtype not in _INTEGERS:
            return None
        axis = dequantize.attributes.get("axis")
        along = None if inputs[1].const_value.size == 1 else 1 if axis is None else axis.as_int()  # type: ignore[union-attr]
        alone = all(len(x.uses()) == 1 for x in (inputs[:1] if along is None else inputs))
        return cls(value, inputs[0], tuple(inputs[1:]), along) if alone else None

    def spread(self, axis: int, places: list[int]) -> None:
        """Channel `places[i]` becomes channel i along an axis; -1 stands for one that is zero."""
        zero = self.grid[1].const_value.numpy().reshape(-1)[:1] if len(self.grid) > 1 else 0  # type: ignore[union-attr]
        _set(self.values, _spread(self.values, axis, places, zero))
        for grid in self.grid if self.axis == axis else ():
            _set(grid, _spread(grid, 0, places, grid.const_value.numpy()[-1:]))  # type: ignore[union-attr]
        self.read.shape = self.values.shape


def _spread(value: ir.Value, axis: int, places: list[int], filler: object) -> np.ndarray:
    array: np.ndarray = value.const_value.numpy()  # type: ignore[union-attr]
    shape = [1 if i == axis else n for i, n in enumerate(array.shape)]
    return np.concatenate([array, np.broadcast_to(np.asarray(filler, array.dtype), shape)], axis).take(places, axis)


def _set(value: ir.Value, array: np.ndarray) -> None:
    value.const_value = ir.Tensor(np.ascontiguousarray(array), name=value.name)
    value.shape = ir.Shape(array.shape)


@dataclass(frozen=True)
class Convolution:
    """A Conv of quantized operands.

    Attributes
    ----------
    node : ir.Node
    weight, bias : ChannelConstant
    channels, inputs : int
        Of the result, and of the operand.
    depthwise : bool
        Whether each channel has a filter of its own.
    work : float
        Multiply-accumulates for an image; infinite where the image has no fixed size.
    """

    node: ir.Node
    weight: ChannelConstant
    bias: ChannelConstant | None
    channels: int
    inputs: int
    depthwise: bool
    work: float

    @classmethod
    def of(cls, node: ir.Node) -> Convolution | None:
        """None where its weight cannot be given more channels."""
        x, weight, bias = (*node.inputs, None)[:3]
        y = node.outputs[0]
        if x is None or weight is None or channels_of(x) is None or channels_of(y) is None:
            return None
        held, added = ChannelConstant.of(weight), None if bias is None else ChannelConstant.of(bias)
        if held is None or not held.grid or (bias is not None and added is None):
            return None
        channels, inputs = channels_of(y), channels_of(x)
        assert channels is not None
        assert inputs is not None
        groups = node.attributes["group"].as_int() if "group" in node.attributes else 1
        depthwise = groups == inputs == channels > 1
        if groups != 1 and not depthwise:
            return None
        filters = math.prod(held.values.const_value.shape.numpy())  # type: ignore[union-attr]
        sizes = [n if isinstance(n, int) else math.inf for n in y.shape[2:]]  # type: ignore[index]
        return cls(node, held, added, channels, inputs, depthwise, filters * math.prod(sizes))


def channels_of(value: ir.Value) -> int | None:
    """The length of axis 1 of a tensor of images; None for other tensors, and for constants."""
    if value.const_value is not None or value.shape is None or len(value.shape) != _RANK:
        return None
    length = value.shape[1]
    return length if isinstance(length, int) else None


@dataclass(eq=False)
class Space:
    """The channels of tensors that have the same ones.

    Attributes
    ----------
    channels : int
    tensors : list of ir.Value
    fixed : bool
        Whether they must stay as they are: somebody else sees them.
    made, read, kept : list of Convolution
        Convolutions whose result has them, whose operand has them, and those for which both do, channel by channel.
    joined : list of list of ir.Value
        What each Concat that makes such a tensor joins.
    held : list of (ChannelConstant, int)
        Constants with an entry for each channel, and the axis.
    """

    channels: int
    tensors: list[ir.Value] = field(default_factory=list)
    fixed: bool = False
    made: list[Convolution] = field(default_factory=list)
    read: list[Convolution] = field(default_factory=list)
    kept: list[Convolution] = field(default_factory=list)
    joined: list[list[ir.Value]] = field(default_factory=list)
    held: list[tuple[ChannelConstant, int]] = field(default_factory=list)


class Spaces:
    """The spaces of a graph.

    Parameters
    ----------
    graph : ir.Graph
        Lowered, sorted, with the shapes of its values.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self._of: dict[ir.Value, Space] = {}
        for node in graph:
            if not _RULES.get(node.op_type, _is_unknown)(self, node):
                self._fix(*(x for x in (*node.inputs, *node.outputs) if x is not None))
        self._fix(*graph.inputs, *graph.outputs)

    def __iter__(self) -> Iterator[Space]:
        return iter(dict.fromkeys(self._of.values()))

    def of(self, value: ir.Value) -> Space:
        """That of a tensor of images."""
        if value not in self._of:
            channels = channels_of(value)
            assert channels is not None
            self._of[value] = Space(channels, [value])
        return self._of[value]

    def _fix(self, *values: ir.Value) -> None:
        for value in values:
            if channels_of(value) is not None:
                self.of(value).fixed = True

    def _unite(self, *values: ir.Value) -> None:
        first, *others = dict.fromkeys(self.of(value) for value in values)
        for other in others:
            first.fixed = first.fixed or other.fixed
            for name in ("tensors", "made", "read", "kept", "joined", "held"):
                getattr(first, name).extend(getattr(other, name))
            self._of.update(dict.fromkeys(other.tensors, first))

    # What operations do with channels: whether they are known to do it.

    def _hands_on(self, node: ir.Node) -> bool:
        """One tensor goes in, and whatever else is a number."""
        x, *others = node.inputs
        y = node.outputs[0]
        if x is None or len(node.outputs) > 1 or channels_of(x) is None or channels_of(x) != channels_of(y):
            return False
        if any(other is not None and not _is_number(other) for other in others):
            return False
        self._unite(x, y)
        return True

    def _normalizes(self, node: ir.Node) -> bool:
        (x, *parameters), y = node.inputs, node.outputs[0]
        held = [None if value is None else ChannelConstant.of(value) for value in parameters]
        if x is None or len(node.outputs) > 1 or channels_of(x) is None or None in held:
            return False
        self._unite(x, y)
        self.of(x).held.extend((one, 0) for one in held if one is not None)
        return True

    def _combines(self, node: ir.Node) -> bool:
        """Tensors of the same channels, or of one, numbers, and constants with a number for each channel."""
        y = node.outputs[0]
        operands = [x for x in node.inputs if x is not None and not _is_number(x)]
        constants = [x for x in operands if channels_of(x) is None or _is_dequantized_constant(x)]
        tensors = [x for x in operands if x not in constants]
        held = [ChannelConstant.of(x) if _per_channel(x, channels_of(y)) else None for x in constants]
        if channels_of(y) is None or None in held or any(channels_of(x) not in (1, channels_of(y)) for x in tensors):
            return False
        self._fix(*(x for x in tensors if channels_of(x) != channels_of(y)))  # one channel, for all of them
        self._unite(y, *(x for x in tensors if channels_of(x) == channels_of(y)))
        self.of(y).held.extend((one, len(one.values.shape) - _RANK + 1) for one in held if one is not None and one.values.shape is not None)
        return True

    def _joins(self, node: ir.Node) -> bool:
        operands = [x for x in node.inputs if x is not None]
        if node.attributes["axis"].as_int() != 1 or any(channels_of(x) is None for x in (*operands, *node.outputs)):
            return False
        self.of(node.outputs[0]).joined.append(operands)
        return True

    def _convolves(self, node: ir.Node) -> bool:
        convolution = Convolution.of(node)
        if convolution is None:
            return False
        (x, *_), y = node.inputs, node.outputs[0]
        assert x is not None
        if convolution.depthwise:
            self._unite(x, y)
            self.of(x).kept.append(convolution)
        else:
            self.of(y).made.append(convolution)
            self.of(x).read.append(convolution)
            self.of(x).held.append((convolution.weight, 1))
        self.of(y).held += [(held, 0) for held in (convolution.weight, convolution.bias) if held is not None]
        return True


def _is_dequantized_constant(value: ir.Value) -> bool:
    """Whether a value is a constant behind a DequantizeLinear."""
    producer = value.producer()
    return producer is not None and producer.op_type == "DequantizeLinear" and all(x is None or x.const_value for x in producer.inputs)


def _per_channel(value: ir.Value, channels: int | None) -> bool:
    """Whether a constant is broadcast with a number for each channel."""
    shape = [] if value.shape is None else list(value.shape)
    return len(shape) in (_RANK - 1, _RANK) and shape[-_RANK + 1] == channels and all(n == 1 for n in (*shape[: -_RANK + 1], *shape[-2:]))


def _is_number(value: ir.Value) -> bool:
    """Whether a value is a constant of one element, dequantized or not."""
    producer = value.producer()
    if producer is not None and producer.op_type == "DequantizeLinear" and producer.inputs[0] is not None:
        value = producer.inputs[0]
    return value.const_value is not None and value.const_value.size == 1


def _is_unknown(spaces: Spaces, node: ir.Node) -> bool:
    return False


_RULES: dict[str, Callable[[Spaces, ir.Node], bool]] = {
    **dict.fromkeys(("QuantizeLinear", "DequantizeLinear", "Relu", "Clip", "LeakyRelu", "Elu", "Tanh", "Gelu"), Spaces._hands_on),
    **dict.fromkeys(("Sigmoid", "HardSigmoid", "HardSwish", "MaxPool", "AveragePool", "GlobalAveragePool"), Spaces._hands_on),
    **dict.fromkeys(("Add", "Mul"), Spaces._combines),
    "BatchNormalization": Spaces._normalizes,
    "Concat": Spaces._joins,
    "Conv": Spaces._convolves,
}
