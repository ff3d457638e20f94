"""Weights and biases that a model has in float, and ONNX Runtime's optimiser makes integers (`WeightBiasQuantization`, onnxruntime 1.31).

It does so to Conv, ConvTranspose and Gemm that read a quantized tensor, where rectifiers alone stand between them and the quantizer of
their result, whether a kernel takes them or not: weights become int8 with one scale, biases int32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeGuard

import torch
from torch import Tensor
from torch.fx import Graph, Node

from qsim.graph.execute.marks import BIAS
from qsim.numbers.encoding import Encoding
from qsim.numbers.float_format import FLOAT_FORMATS
from qsim.trace.fx_nodes import arguments, function, shape
from qsim.trace.marks_before_rectifiers import limits_of
from qsim.trace.marks_behind_moves import key_of, marked

Encodings = Mapping[str, Encoding]


def weights_made_integers(graph: Graph, encodings: Encodings, parameters: Mapping[Node, Tensor]) -> dict[str, Encoding]:
    """Mark each such weight in `graph`; returns their encodings, by the keys of the marks. `parameters`: what placeholders stand for."""
    made: dict[str, Encoding] = {}
    for node in list(graph.nodes):
        if (found := _operands(node, encodings)) is None:
            continue
        _, weight, bias = found
        values = parameters.get(weight)
        if values is None or values.dtype is not torch.float32 or not (bias is None or _is_float(bias)):
            continue
        key = f"{node.name} (weight quantized by ONNX Runtime)"
        made[key] = one_scale(values.detach())
        with graph.inserting_before(node):
            node.replace_input_with(weight, marked(graph, weight, key))
    return made


def bias_made_integers(node: Node, encodings: Encodings) -> str | None:
    """The argument of an operation that holds such a bias; None where there is none."""
    if (found := _operands(node, encodings)) is None:
        return None
    _, weight, bias = found
    grid = encodings.get(str(key_of(weight)))
    if bias is None or not _is_integer(grid) or grid.block_size is not None or not _is_float(bias):
        return None
    return _names(node)[2] if grid.scale.numel() in (1, shape(bias)[0]) else None


def _operands(node: Node, encodings: Encodings) -> tuple[Node, Node, Node | None] | None:
    """Input, weight and bias of a Conv, ConvTranspose or Gemm between quantizers."""
    name = function(node)
    if name != "addmm" and name != "linear" and not (name.startswith("conv") and name.endswith("d")):
        return None
    x, weight, bias = (arguments(node)[operand] for operand in _names(node))
    grid = encodings.get(str(key_of(x)))
    if not _is_integer(grid) or grid.axis is not None or not _is_between(node, encodings):
        return None
    if name == "linear" and len(shape(x)) != 2 and (bias is None or not key_of(next(iter(node.users)))):
        return None  # no Gemm, or one with a Reshape between it and a rectifier
    return x, weight, bias


def _is_integer(grid: Encoding | None) -> TypeGuard[Encoding]:
    """Whether a tensor lies on a grid of integers: what float formats round is left alone."""
    return grid is not None and grid.dtype not in FLOAT_FORMATS


def _names(node: Node) -> tuple[str, str, str]:
    return ("mat1", "mat2", "self") if function(node) == "addmm" else ("input", "weight", "bias")


def _is_float(bias: Node) -> bool:
    """Whether a bias is a vector in float."""
    return bias.target is not BIAS and len(shape(bias)) == 1


def _is_between(node: Node, encodings: Encodings) -> bool:
    """Whether what a node makes goes to a quantizer alone, through rectifiers at most."""
    while len(node.users) == 1:
        (node,) = node.users
        if key_of(node) is not None:
            return key_of(node) in encodings
        if node.op != "call_function" or limits_of(node) is None:
            return False
    return False


def one_scale(weight: Tensor) -> Encoding:
    """The encoding that it chooses: from minimum to maximum, 0 among them, in float32."""
    low, high = weight.min().clamp(max=0.0), weight.max().clamp(min=0.0)
    scale = torch.where(high == low, torch.ones_like(low), (high - low) / 255.0)
    zero_point = (-128.0 - low / scale).clamp(-128.0, 127.0).round().to(torch.int32)
    return Encoding(scale, zero_point, -128, 127)
