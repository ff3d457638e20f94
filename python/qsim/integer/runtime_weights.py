"""Weights and biases that a model has in float, and ONNX Runtime's optimiser makes integers (`WeightBiasQuantization`, onnxruntime 1.32).

It does so to Conv, ConvTranspose and Gemm that read a quantized tensor, where rectifiers alone stand between them and the quantizer of
their result, whether a kernel takes them or not: weights become int8 with one scale, biases int32. What is Gemm in the file, and where
quantizers stand in it, is what `qsim.trace.linear_forms` and the passes say that the exporter runs too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeGuard

import torch
from torch import Tensor
from torch.fx import Graph, Node

from qsim.graph.execute.marks import BIAS
from qsim.integer.kernels.products import Bias
from qsim.numbers.encoding import Encoding, grid_of
from qsim.numbers.float_format import FLOAT_FORMATS
from qsim.trace.constants import constant_values
from qsim.trace.fx_nodes import arguments, function, shape
from qsim.trace.linear_forms import LinearForm, noted_form
from qsim.trace.marks_before_rectifiers import limits_of
from qsim.trace.marks_behind_moves import key_of, marked, readers_of

Encodings = Mapping[str, Encoding]


def weights_made_integers(graph: Graph, encodings: Encodings, held: Mapping[Node, Tensor]) -> dict[str, Encoding]:
    """Mark each such weight in `graph`; returns their encodings, by the keys of the marks. `held`: what placeholders stand for, where no
    run changes it. What is computed from these alone is constant too."""
    found = {node: operands for node in graph.nodes if (operands := _operands(node, encodings)) is not None}
    values = constant_values(graph, held, {operand for _, *operands in found.values() for operand in operands if operand is not None})
    made: dict[str, Encoding] = {}
    for node, (x, weight, bias) in found.items():
        weights = values.get(weight)
        if weights is None or weights.dtype is not torch.float32 or not (bias is None or (_is_float(bias) and bias in values)):
            continue
        grid = one_scale(weights)
        if bias is not None and Bias.is_held(values[bias], encodings[str(key_of(x))], grid):
            continue  # of a bias on a grid of its own it leaves the weight in float too
        key = f"{node.name}.weight (quantized by ONNX Runtime)"
        made[key] = grid
        with graph.inserting_before(node):
            node.replace_input_with(weight, marked(graph, weight, key))
    return made


def fused_into_weights(graph: Graph, encodings: Encodings, held: Mapping[Node, Tensor]) -> list[str]:
    """Convolutions whose weight in float gets the factor, sum or BatchNorm behind them (``ConvMulFusion`` and its like) before it becomes
    integers: what those are is not mirrored."""
    found = []
    for node in graph.nodes:
        readers = readers_of(node)
        if not function(node).startswith("conv") or len(readers) != 1 or function(readers[0]) not in ("mul", "add", "batch_norm"):
            continue
        given, (reader,) = arguments(node), readers
        grid = encodings.get(str(key_of(given["input"])))
        operands = {given["weight"], *reader.all_input_nodes} - {node}
        is_constant = constant_values(graph, held, operands).keys() == operands
        if _is_integer(grid) and grid.axis is None and is_constant and _is_between(reader, encodings):
            found.append(node.name)
    return found


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
    if not _is_integer(grid) or grid.axis is not None or noted_form(node) is LinearForm.MATMUL or not _is_between(node, encodings):
        return None
    return x, weight, bias


def _is_integer(grid: Encoding | None) -> TypeGuard[Encoding]:
    """Whether a tensor lies on a grid of integers: what float formats round is left alone."""
    return grid is not None and grid.dtype not in FLOAT_FORMATS


def _names(node: Node) -> tuple[str, str, str]:
    return ("mat1", "mat2", "self") if function(node) == "addmm" else ("input", "weight", "bias")


def _is_float(bias: Node) -> bool:
    """Whether a bias is a vector in float."""
    return bias.target is not BIAS and key_of(bias) is None and len(shape(bias)) == 1


def _is_between(node: Node, encodings: Encodings) -> bool:
    """Whether what a node makes goes to one quantizer of integers alone, through rectifiers at most."""
    is_reshaped = noted_form(node) is LinearForm.ROWS  # before a rectifier, and behind a quantizer that has one scale
    while True:
        readers = readers_of(node)
        keys = {key_of(reader) for reader in readers}
        key = keys.pop() if len(keys) == 1 else None
        if key is not None:
            grid = encodings.get(key)
            if not _is_integer(grid) or grid.axis is None:
                return _is_integer(grid)
            return not is_reshaped and grid_of(grid.dtype) == (grid.quant_min, grid.quant_max)  # else Max and Min clip to it
        if is_reshaped or len(readers) != 1 or readers[0].op != "call_function" or limits_of(readers[0]) is None:
            return False
        (node,) = readers


def one_scale(weight: Tensor) -> Encoding:
    """The encoding that it chooses: from minimum to maximum, 0 among them, in float32."""
    low, high = weight.min().clamp(max=0.0), weight.max().clamp(min=0.0)
    scale = torch.where(high == low, torch.ones_like(low), (high - low) / 255.0)
    zero_point = (-128.0 - low / scale).clamp(-128.0, 127.0).round().to(torch.int32)
    return Encoding(scale, zero_point, -128, 127)
