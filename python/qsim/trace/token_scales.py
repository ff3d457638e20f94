"""Activations whose scale comes from each token, in operations that every runtime has.

A token divided by its scale lies on the grid whose scale is 1. So ``linear(quantized(x))`` is ``linear(quantized(x / s)) * s`` with a
quantizer that is known before: the product runs in the integer kernel of fixed scales, and what its scale is multiplied by comes behind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from qsim import ops
from qsim.graph.execute.marks import QUANTIZED
from qsim.numbers.encoding import Encoding
from qsim.numbers.spec import TensorSpec
from qsim.quantizers.quantizer import Quantizer
from qsim.trace.marks_behind_moves import shared_meta

_aten = torch.ops.aten
_TINY, _MAX = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
_MATMULS = (_aten.mm.default, _aten.matmul.default, _aten.bmm.default)


class ScaleOne(Quantizer):
    """In the place of a quantizer that takes scales from each tensor: of what was divided by its scale."""

    def __init__(self, of: Quantizer) -> None:
        spec = TensorSpec(bits=8 if of.spec.narrow else of.spec.bits, symmetric=True, method="minmax")  # nothing leaves a narrow grid
        super().__init__(spec)
        one, zero = torch.tensor(1.0), torch.tensor(0, dtype=torch.int32)
        self.set_encoding(Encoding(one, zero, spec.quant_min, spec.quant_max, dtype=spec.encoding_dtype))
        self.enabled = of.enabled
        self.to(of.scale.device)


def has_scale_behind(spec: TensorSpec) -> bool:
    """Whether what is quantized so can be divided by its scale first, and the product be multiplied by it: an integer grid around 0, with
    a scale for each token or for the tensor. Two bits clip half of their range."""
    whole = spec.symmetric and spec.block_size is None and spec.axis in (None, -1) and spec.rounding == "divide"
    return spec.is_dynamic and not spec.is_float and spec.scale_format is None and whole and 2 < spec.bits <= 8


def with_scale_one(quantizers: Mapping[str, Quantizer]) -> dict[str, Quantizer]:
    """The quantizers that stand in a graph behind `put_scales_behind`."""
    return {key: ScaleOne(q) if has_scale_behind(q.spec) else q for key, q in quantizers.items()}


def put_scales_behind(graph: Graph, quantizers: Mapping[str, Quantizer]) -> None:
    """Divide what these quantizers get by its scale, and multiply what reads it. Those that are off, or whose scales cannot be put behind,
    stay as they are.

    The numbers are those of `qsim.ops.fake_quantize_dynamic` (docs/numerics.md, section 9) for finite tensors: a quotient of two float32
    numbers is rounded alike in float32 and in float64.
    """
    scales: dict[tuple[Any, ...], Node] = {}
    for mark in [node for node in graph.nodes if node.target is QUANTIZED]:
        x, key = mark.args
        quantizer = quantizers[key]
        if not quantizer.enabled or not has_scale_behind(quantizer.spec):
            continue
        spec = quantizer.spec
        known = (x, spec.axis, *_ends(spec), spec.min_scale)
        with graph.inserting_before(mark):
            if known not in scales:
                scales[known] = _scale(graph, mark, x, spec)
            mark.args = (_call(graph, mark, _aten.div.Tensor, _in_float32(graph, mark, x), scales[known]), key)
        mark.meta = {**mark.meta, "val": mark.args[0].meta["val"]}  # type: ignore[union-attr]
        _multiply_behind(graph, mark, scales[known], x.meta["val"].dtype)


def _scale(graph: Graph, mark: Node, x: Node, spec: TensorSpec) -> Node:
    """The nodes that compute scales: the larger of what the ends of a range ask for."""
    x = _in_float32(graph, mark, x)
    axes, keeps = ([-1], True) if spec.axis is not None and x.meta["val"].dim() else (list(range(x.meta["val"].dim())), False)
    high, low = (_call(graph, mark, reduce, x, axes, keeps) for reduce in (_aten.amax.default, _aten.amin.default))
    asked = [_call(graph, mark, _aten.div.Tensor, end, steps) for end, steps in zip((low, high), _ends(spec), strict=True)]
    widest = torch.tensor(-_MAX), torch.tensor(_MAX)
    largest, _ = ops.choose_qparams(*widest, spec.quant_min, spec.quant_max, symmetric=True)
    limits = max(spec.min_scale, _TINY), largest.item()
    return _call(graph, mark, _aten.clamp.default, _call(graph, mark, _aten.maximum.default, *asked), *limits)


def _ends(spec: TensorSpec) -> tuple[float, float]:
    """Steps from zero to the ends of the grid: unsigned integers lie around their middle."""
    middle = 0 if spec.quant_min < 0 else 1 << (spec.bits - 1)
    return float(spec.quant_min - middle), float(spec.quant_max - middle)


def _multiply_behind(graph: Graph, mark: Node, scale: Node, dtype: torch.dtype) -> None:
    """Multiply the products of what is marked, or where it is no product that reads it, what is marked."""
    readers = list(mark.users)
    products = [reader for reader in readers if dtype is torch.float32 and _is_product(reader, mark)]
    others = [reader for reader in readers if reader not in products]
    if others:
        steps = [(_aten.mul.Tensor, scale), *([(_aten.to.dtype, dtype)] if dtype is not torch.float32 else [])]
        _put_behind(graph, mark, others, steps)
    for product in products:
        readers, bias = list(product.users), _without_bias(product)
        _put_behind(graph, product, readers, [(_aten.mul.Tensor, scale), *([(_aten.add.Tensor, bias)] if bias is not None else [])])


def _put_behind(graph: Graph, node: Node, readers: list[Node], steps: list[tuple[Any, Any]]) -> None:
    """Have readers of a node read what operators with one more operand make of it, under its name: the signature calls results by name."""
    name, result = node.name, node
    node._rename(f"{name}_unscaled")
    for operator, operand in steps:
        with graph.inserting_after(result):
            result = _call(graph, node, operator, result, operand)
    result.name = name
    for reader in readers:
        reader.replace_input_with(node, result)


def _is_product(node: Node, mark: Node) -> bool:
    """Whether a node sums, over the last axis of what is marked, products with something else."""
    if node.op != "call_function" or node.kwargs or node.args.count(mark) != 1:
        return False
    if node.target in (_aten.linear.default, *_MATMULS):
        return node.args[0] is mark and node.args[1].meta["val"].dim() > 1  # type: ignore[union-attr]
    return node.target is _aten.addmm.default and node.args[1] is mark


def _without_bias(product: Node) -> Node | None:
    """Take the bias of a product out of it."""
    bias = None
    if product.target is _aten.addmm.default:
        bias, *operands = product.args
        product.target, product.args = _aten.mm.default, tuple(operands)
    elif product.target is _aten.linear.default:
        x, weight, *rest = product.args
        bias, product.args = next(iter(rest), None), (x, weight)
    assert bias is None or isinstance(bias, Node)
    return bias


def _in_float32(graph: Graph, like: Node, x: Node) -> Node:
    return x if x.meta["val"].dtype is torch.float32 else _call(graph, like, _aten.to.dtype, x, torch.float32)


def _call(graph: Graph, like: Node, operator: Any, *args: Any) -> Node:
    """A new node, said to be of the module of another one."""
    node = graph.call_function(operator, args)
    held = [arg.meta["val"] if isinstance(arg, Node) else arg for arg in args]
    value: Tensor = operator(*held)
    node.meta = {**shared_meta(like), "val": value}
    return node
