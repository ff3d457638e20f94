"""Parts of an output that a concatenation put together: on one grid, small numbers beside large ones are lost."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import onnx_ir as ir

Array = np.ndarray[Any, Any]
_PASSED = ("DequantizeLinear", "QuantizeLinear", "Identity", "Cast", "Clip")


@dataclass(frozen=True)
class Part:
    """One operand of a concatenation, as it lies in the output.

    Attributes
    ----------
    axis, start, stop : int
    """

    axis: int
    start: int
    stop: int

    def __str__(self) -> str:
        return f"[{':, ' * self.axis}{self.start}:{self.stop}]"

    def of(self, array: Array) -> Array:
        """Its elements in an output."""
        return array[(slice(None),) * self.axis + (slice(self.start, self.stop),)]


@dataclass(frozen=True)
class ConcatenatedOutput:
    """An output that a concatenation made.

    Attributes
    ----------
    parts : list of Part
    quantizer : str
        That of the concatenation's result; "" where each part has its own.
    """

    parts: list[Part]
    quantizer: str = ""


def concatenated(output: ir.Value) -> ConcatenatedOutput | None:
    """What an output was put together from, behind quantizers and permutations of axes; None if it was not, or of unknown sizes."""
    node, quantizer, orders = output.producer(), "", list[list[int]]()
    while node is not None and node.op_type in (*_PASSED, "Transpose"):
        if node.op_type == "QuantizeLinear":
            quantizer = quantizer or str(node.outputs[0].name).removesuffix("_quantized")
        elif node.op_type == "Transpose":
            orders.append(list(node.attributes["perm"].as_ints()))
        node = None if node.inputs[0] is None else node.inputs[0].producer()
    if node is None or node.op_type != "Concat":
        return None
    shapes = [None if x is None or x.shape is None else list(x.shape) for x in node.inputs]
    axis = node.attributes["axis"].as_int()
    lengths = [None if shape is None else shape[axis] for shape in shapes]
    if len(lengths) < 2 or not all(isinstance(length, int) for length in lengths):
        return None
    axis %= len(shapes[0] or ())
    for order in reversed(orders):
        axis = order.index(axis)
    ends = accumulate(lengths, initial=0)  # type: ignore[arg-type]
    return ConcatenatedOutput([Part(axis, start, stop) for start, stop in pairwise(ends)], quantizer)  # type: ignore[arg-type]
