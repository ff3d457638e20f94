"""Channels of zeros put beside integers, and cut off again, where a tensor itself has to keep its channels."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from qsim.onnx.channel_spaces import Convolution
from qsim.onnx.insert import NodeInserter

_RECTIFIERS = ("Relu", "Clip")


class ChannelPads:
    """Adds Pads and Slices to a graph; convolutions that read one tensor share its Pad.

    Parameters
    ----------
    graph : ir.Graph
        Lowered, with shapes.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self._graph, self._insert = graph, NodeInserter(graph)
        self._made: dict[tuple[ir.Value, int], ir.Value] = {}

    def __len__(self) -> int:
        return len(self._made)

    def before(self, convolutions: Iterable[Convolution], block: int) -> None:
        """Have convolutions read whole blocks of channels, with filters that are zero there."""
        for convolution in convolutions:
            more = -convolution.inputs % block
            if self._widened(convolution, more):
                convolution.weight.spread(1, [*range(convolution.inputs), *[-1] * more])

    def around(self, convolutions: Iterable[Convolution], block: int) -> None:
        """Have depthwise convolutions work on whole blocks of channels, and others see those of before."""
        for convolution in convolutions:
            more, node = -convolution.channels % block, convolution.node
            ends = _quantized_behind(node)
            if ends is None or not self._widened(convolution, more):
                continue
            for held in (convolution.weight, convolution.bias):
                if held is not None:
                    held.spread(0, [*range(convolution.channels), *[-1] * more])
            node.attributes["group"] = ir.AttrInt64("group", convolution.channels + more)
            self._cut(ends, convolution.channels, more)

    def _widened(self, convolution: Convolution, more: int) -> bool:
        """Whether the operand of a convolution could be given more channels."""
        x = convolution.node.inputs[0]
        dequantize = None if x is None else x.producer()
        if x is None or dequantize is None or dequantize.op_type != "DequantizeLinear" or len(dequantize.inputs) < 3:
            return False
        q, scale, zero = dequantize.inputs
        assert q is not None
        assert scale is not None
        assert zero is not None
        if q.const_value is not None or zero.const_value is None or zero.const_value.size != 1:
            return False
        if (q, more) not in self._made:
            assert q.dtype is not None
            shape = wider(q, more)
            padded = self._insert.node(dequantize, "Pad", [q, self._ints([0] * 5 + [more, 0, 0]), zero], f"{q.name}_padded", q.dtype, shape)
            read = self._insert.node(dequantize, "DequantizeLinear", [padded, scale, zero], f"{x.name}_padded", ir.DataType.FLOAT, shape)
            self._made[q, more] = read
        convolution.node.replace_input_with(0, self._made[q, more])
        return True

    def _cut(self, ends: list[ir.Value], channels: int, more: int) -> None:
        """Widen what a convolution makes, up to its integers, and cut these for all that read them."""
        q = ends[-1]
        assert q.dtype is not None
        readers, shape = list(q.uses()), q.shape
        where = [self._ints([n]) for n in (0, channels, 1)]
        cut = self._insert.node(readers[0].node, "Slice", [q, *where], f"{q.name}_cut", q.dtype, shape)
        for reader, position in readers:
            reader.replace_input_with(position, cut)
        for value in ends:
            value.shape = wider(value, more)

    def _ints(self, numbers: list[int]) -> ir.Value:
        value = ir.Value(name=self._insert.free("channels"), const_value=ir.tensor(numbers, dtype=ir.DataType.INT64))
        self._graph.register_initializer(value)
        return value


def wider(value: ir.Value, more: int) -> ir.Shape:
    """The shape of a tensor with more channels."""
    assert value.shape is not None
    return ir.Shape([n + more if i == 1 and isinstance(n, int) else n for i, n in enumerate(value.shape)])


def _quantized_behind(node: ir.Node) -> list[ir.Value] | None:
    """What a convolution makes, what the rectifier behind it does, and the integers; None where others read them before."""
    made = [node.outputs[0]]
    while len(made[-1].uses()) == 1 and not made[-1].is_graph_output():
        (reader,) = made[-1].consumers()
        made.append(reader.outputs[0])
        if reader.op_type == "QuantizeLinear":
            return made if made[-1].uses() and not made[-1].is_graph_output() else None
        if reader.op_type not in _RECTIFIERS:
            return None
    return None
