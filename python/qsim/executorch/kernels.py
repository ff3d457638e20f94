"""What ExecuTorch's XNNPACK backend computes on integers, as its partitioner finds it in a graph (ExecuTorch 1.5)."""

from __future__ import annotations

import torch
from torch.fx import Node

from qsim.numbers.encoding import Encoding
from qsim.trace.fx_nodes import arguments, function

_PRODUCTS = ("conv1d", "conv2d", "conv_transpose1d", "conv_transpose2d", "linear")
_FUSED = ("relu", "relu6", "hardtanh")  # behind a product, before its quantizer
_LARGEST = torch.finfo(torch.float32).max
INT8 = torch.iinfo(torch.int8)


def is_product(node: Node) -> bool:
    """Whether XNNPACK has an integer kernel for what multiplies with weights here."""
    return function(node) in _PRODUCTS


def end_of_product(node: Node) -> Node:
    """The last operation of the kernel that computes `node`: the rectifier that alone reads it, or itself."""
    readers = list(node.users)
    return readers[0] if len(readers) == 1 and function(readers[0]) in _FUSED else node


def refused_weight(product: Node, encoding: Encoding) -> str | None:
    """Why the kernel of `product` does not take a weight on this grid; None if it does."""
    given = arguments(product)
    transposed = function(product).startswith("conv_transpose")
    if bool((encoding.zero_point != 0).any()):
        return "its weight has a zero point"
    if encoding.axis is None:
        return None
    if encoding.block_size is not None or not isinstance(encoding.axis, int):
        return "its weight has a scale for each block"
    if transposed and given["groups"] > 1:
        return "the weight of a transposed convolution in groups has a scale for each channel"
    if encoding.axis != (1 if transposed else 0):
        return f"its weight has its scales along axis {encoding.axis}"
    return None


def as_rectifier(node: Node) -> tuple[float, float] | None:
    """The ends of a clamp between numbers: a ``hardtanh`` between them is fused, a clamp is not. None for others."""
    if function(node) not in ("clamp", "clamp_min", "clamp_max"):
        return None
    given = arguments(node)
    low, high = given.get("min"), given.get("max")
    if not all(end is None or isinstance(end, (int, float)) for end in (low, high)):
        return None
    return -_LARGEST if low is None else float(low), _LARGEST if high is None else float(high)


def as_int8(encoding: Encoding) -> tuple[float, int]:
    """Scale and zero point of an activation as int8: of unsigned integers 128 lower."""
    return float(encoding.scale), int(encoding.zero_point) - (encoding.quant_min - INT8.min)
