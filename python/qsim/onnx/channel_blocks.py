"""More channels, of zeros, where ONNX Runtime's kernels take whole blocks of channels and are two to three times slower for others.

Its fast convolutions of uint8 with int8 read four input channels at a time and make sixteen output channels; depthwise ones work on
sixteen channels (``MlasConvSymPackWSize``, onnxruntime 1.32, core/mlas/lib/convsym.cpp). Whatever does not fit takes a slower way: the
image's three channels, the 72 channels of a MobileNetV3. A channel that a filter of zeros makes, and that filters read with zeros,
changes no integer of the others.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from qsim.onnx.channel_pads import ChannelPads
from qsim.onnx.channel_spaces import WORTH, Convolution, Space, Spaces

_READ, _MADE = 4, 16  # channels in a block
_FEWEST = 3  # one or two channels would become as many again
_WORTH_PADS = 100  # multiply-accumulates at a position beyond whole blocks, which take as long as to copy the channels twice


def fill_channel_blocks(model: ir.Model) -> int:
    """Give tensors whole blocks of channels where that pays and nobody but the model's own operations sees them.

    Parameters
    ----------
    model : ir.Model
        Lowered, with shapes. Weights and biases of convolutions get zeros, in place. Where a tensor has to keep its channels, the model's
        image is padded, and operands of large depthwise filters are.

    Returns
    -------
    int
        How many quantized tensors have more channels than before.
    """
    if any(attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for n in model.graph for attribute in n.attributes.values()):
        return 0
    blocks = _Blocks(Spaces(model.graph))
    wider = [space for space in blocks.spaces if len(blocks.places(space)) > space.channels]
    for space in wider:
        places = blocks.places(space)
        for held, axis in space.held:
            held.spread(axis, places)
        for tensor in space.tensors:
            assert tensor.shape is not None
            tensor.shape = ir.Shape([length if i != 1 else len(places) for i, length in enumerate(tensor.shape)])
        for convolution in space.kept:
            convolution.node.attributes["group"] = ir.AttrInt64("group", len(places))
    pads = ChannelPads(model.graph)
    pads.before([c for space in blocks.spaces if space.fixed for c in space.read if _image(c)], _READ)
    pads.around([c for space in blocks.spaces if space.fixed for c in space.kept if _is_left_over(c)], _MADE)
    model.graph.sort()
    return len(pads) + sum(value.dtype in (ir.DataType.UINT8, ir.DataType.INT8) for space in wider for value in space.tensors)


class _Blocks:
    """Where each channel goes: the spaces of a graph, filled up."""

    def __init__(self, spaces: Spaces) -> None:
        self.of = spaces.of
        self.spaces = list(spaces)
        self._wholes: dict[Space, list[Space]] = {}
        for whole in self.spaces:
            for part in self._parts(whole):
                self._wholes.setdefault(part, []).append(whole)
        self._places: dict[Space, list[int]] = {}
        while not self._settled():
            pass

    def places(self, space: Space) -> list[int]:
        """The channel that stands at each place, -1 for none."""
        return self._places[space]

    def _settled(self) -> bool:
        """Try the spaces as they are; False where one turned out to be fixed."""
        self._places.clear()
        fixed = [space for space in self.spaces if space.fixed]
        while fixed:
            opened = [part for part in self._parts(fixed.pop()) if not part.fixed]
            for part in opened:
                part.fixed = True
            fixed += opened
        try:
            for space in self.spaces:
                self._place(space, ())
        except _Conflict as conflict:
            conflict.space.fixed = True
            return False
        return True

    def _place(self, space: Space, inside: tuple[Space, ...]) -> list[int]:
        if space in inside:
            raise _Conflict(space)
        if space not in self._places:
            places = list(range(space.channels))
            if not space.fixed:
                ways = [self._joined(operands, (*inside, space)) for operands in space.joined]
                if any(way != ways[0] for way in ways):
                    raise _Conflict(space)
                places = ways[0] if ways else places + [-1] * (-space.channels % self._block(space))
            self._places[space] = places
        return self._places[space]

    def _joined(self, operands: list[ir.Value], inside: tuple[Space, ...]) -> list[int]:
        places, first = list[int](), 0
        for space in map(self.of, operands):
            places += [channel if channel < 0 else first + channel for channel in self._place(space, inside)]
            first += space.channels
        return places

    def _parts(self, space: Space) -> list[Space]:
        return [self.of(operand) for operands in space.joined for operand in operands]

    def _block(self, space: Space) -> int:
        """How many channels should stand together: 1 where it does not matter."""
        return max(self._wanted(whole) for whole in (space, *self._wholes.get(space, ())) if not whole.fixed)

    def _wanted(self, space: Space) -> int:
        by_sixteen = [*space.kept, *(c for c in space.made if _MADE > space.channels >= _MADE // 2)]
        if space.channels % _MADE and any(c.work >= WORTH for c in by_sixteen):
            return _MADE
        reading = [c for c in space.read if c.work >= WORTH and (c.channels >= _MADE or not self.of(c.node.outputs[0]).fixed)]
        return _READ if reading and space.channels % _READ and space.channels >= _FEWEST else 1


class _Conflict(Exception):
    """A space that cannot be given places."""

    def __init__(self, space: Space) -> None:
        super().__init__()
        self.space = space


def _image(convolution: Convolution) -> bool:
    """Whether a convolution would be faster with more channels, and reads a quantized input of the model."""
    x = convolution.node.inputs[0]
    value: ir.Value | None = x
    for op in ("DequantizeLinear", "QuantizeLinear"):
        node = None if value is None else value.producer()
        if node is None or node.op_type != op:
            return False
        value = node.inputs[0]
    made = convolution.node.outputs[0].shape
    assert made is not None
    wide = convolution.inputs % _READ and convolution.inputs >= _FEWEST and isinstance(made[1], int) and made[1] >= _MADE
    return bool(wide) and value is not None and value.is_graph_input() and convolution.work >= WORTH


def _is_left_over(convolution: Convolution) -> bool:
    """Whether the channels of a depthwise convolution beyond whole blocks cost more than a Pad and a Slice."""
    filters = convolution.weight.values.shape
    assert filters is not None
    area = math.prod(filters.numpy()[2:])
    return convolution.channels % _MADE * area >= _WORTH_PADS and convolution.work >= WORTH
