"""Activations whose scale comes from each token, in operations that every runtime has.

A token divided by its scale lies on the grid whose scale is 1. So ``linear(quantized(x))`` is ``linear(quantized(x / s)) * s`` with a
quantizer that is known before: the product runs in the integer kernel of fixed scales, and what its scale is multiplied by comes behind.
A zero point ``z`` is added to the integers, and ``z`` times the sums of the weight's rows is taken from the product.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

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
OF_SCALES = "of scales of tokens"  # in the `meta` of what is inserted: no operation of the model's
Step = tuple[Any, ...]  # an operator, and its operands behind the first


class ScaleOne(Quantizer):
    """In the place of a quantizer that takes scales from each tensor: of what was divided by its scale, its zero point added."""

    def __init__(self, of: Quantizer) -> None:
        given = of.spec
        if given.symmetric:  # nothing leaves a narrow grid
            spec = TensorSpec(bits=8 if given.narrow else given.bits, symmetric=True, method="minmax")
        else:
            spec = TensorSpec(bits=given.bits, signed=given.signed, narrow=given.narrow, method="minmax")
        super().__init__(spec)
        one, zero = torch.tensor(1.0), torch.tensor(0, dtype=torch.int32)
        self.set_encoding(Encoding(one, zero, spec.quant_min, spec.quant_max, dtype=spec.encoding_dtype))
        self.enabled = of.enabled
        self.to(of.scale.device)


def has_scale_behind(spec: TensorSpec) -> bool:
    """Whether what is quantized so can be divided by its scale first, and be multiplied by it later: an integer grid of a byte, with a
    scale for each line along an axis (a token) or for the tensor."""
    whole = spec.block_size is None and spec.rounding == "divide"
    return spec.is_dynamic and not spec.is_float and spec.scale_format is None and whole and spec.bits <= 8


def with_scale_one(quantizers: Mapping[str, Quantizer]) -> dict[str, Quantizer]:
    """The quantizers that stand in a graph behind `put_scales_behind`."""
    return {key: ScaleOne(q) if has_scale_behind(q.spec) else q for key, q in quantizers.items()}


class Scale(NamedTuple):
    """The nodes that hold scales and zero points; None where a zero point is 0."""

    scale: Node
    zero_point: Node | None


def put_scales_behind(graph: Graph, quantizers: Mapping[str, Quantizer]) -> None:
    """Divide what these quantizers get by its scale, and multiply what reads it. Those that are off, or whose scales cannot be put behind,
    stay as they are.

    The numbers are those of `qsim.ops.fake_quantize_dynamic` (docs/numerics.md, section 9) for finite tensors: a quotient of two float32
    numbers is rounded alike in float32 and in float64.
    """
    scales: dict[Step, Scale] = {}
    for mark in [node for node in graph.nodes if node.target is QUANTIZED]:
        x, key = mark.args
        quantizer = quantizers[key]
        if not quantizer.enabled or not has_scale_behind(quantizer.spec):
            continue
        spec = quantizer.spec
        known = (x, spec.axis, spec.symmetric, spec.quant_min, spec.quant_max, spec.min_scale)
        with graph.inserting_before(mark):
            inserted = _Inserted(graph, mark)
            values = inserted.in_float32(x)
            if known not in scales:
                scales[known] = (_around_zero if spec.symmetric else _with_zero_point)(inserted, values, spec)
            scale, zero_point = scales[known]
            steps = inserted.call(_aten.div.Tensor, values, scale)
            if zero_point is not None:
                steps = inserted.call(_aten.add.Tensor, inserted.call(_aten.round.default, steps), zero_point)
            mark.args = (steps, key)
        mark.meta = {**mark.meta, "val": steps.meta["val"]}
        _put_behind_readers(graph, mark, scales[known], spec.axis, x.meta["val"].dtype)


class _Inserted:
    """Calls put into a graph where it inserts, said to be of the module of another node."""

    def __init__(self, graph: Graph, like: Node) -> None:
        self._graph, self._like = graph, like

    def call(self, operator: Any, *args: Any, **kwargs: Any) -> Node:
        node = self._graph.call_function(operator, args, kwargs)
        value: Tensor = operator(*(arg.meta["val"] if isinstance(arg, Node) else arg for arg in args), **kwargs)
        node.meta = {**shared_meta(self._like), "val": value, OF_SCALES: True}
        return node

    def cast(self, x: Node, dtype: torch.dtype) -> Node:
        return x if x.meta["val"].dtype is dtype else self.call(_aten.to.dtype, x, dtype)

    def in_float32(self, x: Node) -> Node:
        return self.cast(x, torch.float32)

    def range(self, x: Node, axis: int | tuple[int, ...] | None) -> tuple[Node, Node]:
        """Lowest and highest of what shares a scale."""
        dims = x.meta["val"].dim()
        axes, keeps = ([axis], True) if axis is not None and dims else (list(range(dims)), False)
        return self.call(_aten.amin.default, x, axes, keeps), self.call(_aten.amax.default, x, axes, keeps)


def _around_zero(inserted: _Inserted, x: Node, spec: TensorSpec) -> Scale:
    """The larger of what the ends of a range ask for. Steps from zero to the ends of the grid: unsigned integers lie around their middle;
    of two bits the top is clipped, so that all levels are used."""
    middle = 0 if spec.quant_min < 0 else 1 << (spec.bits - 1)
    below, above = middle - spec.quant_min, spec.quant_max - middle
    ends = zip(inserted.range(x, spec.axis), (-below, below if 2 * above <= below else above), strict=True)
    asked = [inserted.call(_aten.div.Tensor, end, float(steps)) for end, steps in ends]
    limits = max(spec.min_scale, _TINY), _largest_scale(below, above)
    return Scale(inserted.call(_aten.clamp.default, inserted.call(_aten.maximum.default, *asked), *limits), None)


def _with_zero_point(inserted: _Inserted, x: Node, spec: TensorSpec) -> Scale:
    """As `qsim.ops.choose_qparams` has them, in float64: of each token a few numbers alone are computed so."""
    ends = [inserted.cast(end, torch.float64) for end in inserted.range(x, spec.axis)]
    low, high = inserted.call(_aten.clamp.default, ends[0], None, 0.0), inserted.call(_aten.clamp.default, ends[1], 0.0)
    width = inserted.call(_aten.sub.Tensor, high, low)
    exact = inserted.call(_aten.div.Tensor, width, float(spec.quant_max - spec.quant_min))
    exact = inserted.call(_aten.clamp.default, exact, max(spec.min_scale, _TINY))
    below = inserted.call(_aten.neg.default, inserted.call(_aten.div.Tensor, low, exact))
    zero_point = inserted.call(_aten.round.default, inserted.call(_aten.add.Tensor, below, float(spec.quant_min)))
    scale = inserted.call(_aten.minimum.default, inserted.in_float32(exact), _ceiling(inserted, zero_point, spec))
    return Scale(scale, inserted.in_float32(zero_point))


def _ceiling(inserted: _Inserted, zero_point: Node, spec: TensorSpec) -> Node:
    """The largest scale with which both ends of a grid are finite: the largest float32 over the steps to the farther end, rounded down.

    A grid of `n` steps has at least `n / 2` to that end, so all these quotients lie between the same powers of two. They are fractions of
    less than 256, so half a unit in their last place, less a little, turns rounding to the nearest into rounding down.
    """
    middle = (spec.quant_min + spec.quant_max) / 2
    from_middle = inserted.call(_aten.abs.default, inserted.call(_aten.sub.Tensor, zero_point, middle))
    steps = inserted.call(_aten.add.Tensor, from_middle, spec.quant_max - middle)
    quotient = inserted.call(_aten.mul.Tensor, inserted.call(_aten.reciprocal.default, steps), _MAX)
    half = 2.0 ** (128 - spec.bits - 24)
    return inserted.in_float32(inserted.call(_aten.sub.Tensor, quotient, half * (1 - 2**-9)))


def _largest_scale(below: int, above: int) -> float:
    """The largest scale of a grid with these steps to its ends."""
    widest = torch.tensor(-_MAX), torch.tensor(_MAX)
    return ops.choose_qparams(*widest, -below, above, symmetric=True)[0].item()


def _put_behind_readers(graph: Graph, mark: Node, scale: Scale, axis: Any, dtype: torch.dtype) -> None:
    """Multiply the products of what is marked, or where it is no product that reads it, what is marked."""
    readers = list(mark.users)
    last = axis is None or axis in (-1, mark.meta["val"].dim() - 1)
    products = [reader for reader in readers if dtype is torch.float32 and last and _is_product(reader, mark)]
    others = [reader for reader in readers if reader not in products]
    multiplied = (_aten.mul.Tensor, scale.scale)
    if others:
        centred = [] if scale.zero_point is None else [(_aten.sub.Tensor, scale.zero_point)]
        _put_behind(graph, mark, others, [*centred, multiplied, *([(_aten.to.dtype, dtype)] if dtype is not torch.float32 else [])])
    for product in products:
        readers, bias = list(product.users), _without_bias(product)
        centred = [] if scale.zero_point is None else [(_aten.sub.Tensor, _of_zero_points(graph, product, scale.zero_point))]
        _put_behind(graph, product, readers, [*centred, multiplied, *([(_aten.add.Tensor, bias)] if bias is not None else [])])


def _of_zero_points(graph: Graph, product: Node, zero_point: Node) -> Node:
    """What a product has of the zero points alone: the sums of the weight, once for each."""
    x, weight = product.args[:2]
    assert isinstance(x, Node)
    assert isinstance(weight, Node)
    rows = product.target is _aten.linear.default
    with graph.inserting_before(product):
        inserted = _Inserted(graph, product)
        exact = inserted.cast(weight, torch.float64)
        summed = inserted.call(_aten.sum.dim_IntList, exact, [-1 if rows else -2], not rows and x.meta["val"].dim() > 1)
        return inserted.call(_aten.mul.Tensor, inserted.in_float32(summed), zero_point)


def _put_behind(graph: Graph, node: Node, readers: list[Node], steps: list[Step]) -> None:
    """Have readers of a node read what operators with one more operand make of it, under its name: the signature calls results by name."""
    name, result = node.name, node
    node._rename(f"{name}_unscaled")
    for operator, operand in steps:
        with graph.inserting_after(result):
            result = _Inserted(graph, node).call(operator, result, operand)
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
