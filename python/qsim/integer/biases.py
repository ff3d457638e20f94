"""Biases that a model has in float, and ONNX Runtime's optimiser makes int32.

It does so to Conv, ConvTranspose and Gemm that read quantized tensors, where rectifiers alone stand between them and the quantizer of their
result, whether a kernel takes them or not. (`WeightBiasQuantization`, onnxruntime 1.31.)
"""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import Node

from qsim.deploy.carry import key_of
from qsim.encoding import Encoding
from qsim.graph.marks import BIAS
from qsim.integer.nodes import arguments, function, shape
from qsim.integer.regions import limits_of

Encodings = Mapping[str, Encoding]


def made_integer(node: Node, encodings: Encodings) -> str | None:
    """The argument of an operation that holds such a bias; None where there is none."""
    if not _is_between(node, encodings) or (names := _names(node)) is None:
        return None
    x, weight, bias = (arguments(node)[name] for name in names)
    grids = [encodings.get(str(key_of(operand))) for operand in (x, weight)]
    if not isinstance(bias, Node) or bias.target is BIAS or len(shape(bias)) != 1:
        return None
    lengths = [0 if grid is None or grid.block_size is not None else grid.scale.numel() for grid in grids]
    return names[2] if lengths[0] == 1 and lengths[1] in (1, shape(bias)[0]) else None


def _names(node: Node) -> tuple[str, str, str] | None:
    """What the arguments for input, weight and bias are called."""
    name = function(node)
    if name == "addmm":
        return "mat1", "mat2", "self"
    is_gemm = name == "linear" and len(shape(arguments(node)["input"])) == 2
    return ("input", "weight", "bias") if is_gemm or (name.startswith("conv") and name.endswith("d")) else None


def _is_between(node: Node, encodings: Encodings) -> bool:
    """Whether what a node makes goes to a quantizer alone, through rectifiers at most."""
    while len(node.users) == 1:
        (node,) = node.users
        if key_of(node) is not None:
            return key_of(node) in encodings
        if node.op != "call_function" or limits_of(node) is None:
            return False
    return False
