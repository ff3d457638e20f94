"""PyTorch's decomposition of a traced graph, left out where it would change nothing.

Its exporter begins with `ExportedProgram.run_decompositions`, which runs every operation on symbolic shapes: two thirds of an export. It
takes operations apart that it has no translation for. Where there are none, once a few are written as others, nothing is left to do.

What PyTorch always takes apart (``CompositeImplicitAutograd`` without a place in `torch.export.default_decompositions`) stays only if it is
in `_REPLACED` or `_KEPT`: the exporter's own translations of the others were never run.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Container
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.export import ExportedProgram
from torch.fx import Node

from qsim.trace.fx_nodes import reshape_sizes
from qsim.trace.idle_nodes import CASTS
from qsim.trace.in_place import DROPOUT_OPERATORS, writes


class Decomposition:
    """Of an exported program.

    Parameters
    ----------
    exported : ExportedProgram
        Without operations in place. Changed where the decomposition is skipped.
    """

    def __init__(self, exported: ExportedProgram) -> None:
        self._exported = exported
        self.skipped = False

    def program(self) -> ExportedProgram:
        """For `torch.onnx.export`."""
        made = copy.copy(self._exported)
        made.run_decompositions = self._decomposed  # type: ignore[method-assign]
        return made

    def _decomposed(self, table: dict[Any, Any] | None = None, **options: Any) -> ExportedProgram:
        _simplify(self._exported)
        _forget_pending(self._exported)
        if options or table is None or not _is_whole(self._exported, table):
            decomposed: ExportedProgram = self._exported.run_decompositions(table, **options)
            return decomposed
        self.skipped = True
        return self._exported


def _forget_pending(exported: ExportedProgram) -> None:
    """An earlier translation of the program leaves symbols for sizes that it made on the way (PyTorch's type promotion)."""
    mode = detect_fake_mode([node.meta.get("val") for node in exported.graph.nodes])
    if mode is not None and mode.shape_env is not None:
        mode.shape_env.pending_fresh_unbacked_symbols.clear()


def _simplify(exported: ExportedProgram) -> None:
    """Write what PyTorch takes apart by sizes, or by flags, as the one operation that it becomes."""
    named = {getattr(spec.arg, "name", None) for spec in exported.graph_signature.output_specs}
    for node in list(exported.graph.nodes):
        simpler = _REPLACED.get(node.target) or _REPLACED.get(str(node.target))
        found = simpler(node) if simpler is not None else None
        if isinstance(found, Node) and node.name in named:
            found = _aten.clone.default, (found,), {}
        if isinstance(found, Node):
            node.replace_all_uses_with(found)
            exported.graph.erase_node(node)
        elif found is not None:
            node.target, node.args, node.kwargs = found  # type: ignore[misc]
    exported.graph_module.recompile()


def _reshaped(node: Node) -> Any:
    sizes = reshape_sizes(node.meta["val"].shape)
    return None if sizes is None else (_aten.reshape.default, (node.args[0], sizes), {})


def _expand_as(node: Node) -> Any:
    own, sizes = node.args[0].meta["val"].shape, list(node.meta["val"].shape)  # type: ignore[union-attr]
    own = [1] * (len(sizes) - len(own)) + list(own)
    wanted = [n if isinstance(n, int) else -1 if n == m else None for n, m in zip(sizes, own, strict=True)]
    return None if None in wanted else (_aten.expand.default, (node.args[0], wanted), {})


def _dropout(node: Node) -> Any:
    """The operand itself, in evaluation."""
    return node.args[0] if node.args[-1] is False else None


def _chunk(node: Node) -> Any:
    x, chunks, dim = (*node.args, 0)[:3]
    length = x.meta["val"].shape[dim]  # type: ignore[union-attr, index]
    fits = isinstance(length, int) and length > 0
    return (_aten.split.Tensor, (x, -(-length // chunks), dim), {}) if fits else None  # type: ignore[operator]


def _squeezed(node: Node) -> Any:
    """Without the axes that torch leaves as they are, since they are longer than 1: ONNX refuses those."""
    x, dims = node.args
    shape = x.meta["val"].shape  # type: ignore[union-attr]
    given = list(dims) if isinstance(dims, (list, tuple)) else [dims]
    wanted = [dim for dim in given if not shape or not isinstance(shape[dim], int) or shape[dim] == 1]  # type: ignore[index]
    if len(wanted) == len(given):
        return None
    return (_aten.squeeze.dims, (x, wanted), {}) if wanted else x


def _resize(node: Node) -> Any:
    """With sizes and factors as arguments of their own, as the exporter knows it."""
    x, _, *options, factors = node.args
    sizes = list(node.meta["val"].shape[2:])
    if not all(isinstance(n, int) for n in sizes) or len(node.args) != len(node.target._schema.arguments):  # type: ignore[union-attr]
        return None
    each = [None] * len(sizes) if factors is None else list(factors)  # type: ignore[arg-type]
    return node.target.overloadpacket.default, (x, sizes, *options, *each), {}  # type: ignore[union-attr]


def _convert(node: Node) -> Any:
    """Only a type matters in ONNX, devices and layouts do not. A copy that was asked for stays one: it may be changed in place."""
    x: Any = node.args[0]
    dtype = node.meta["val"].dtype
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    if {**dict(zip(names, node.args, strict=False)), **node.kwargs}.get("copy"):
        return None
    return x if x.meta["val"].dtype is dtype else (_aten._to_copy.default, (x,), {"dtype": dtype})


def _divided(node: Node) -> Any:
    """Average pooling by a divisor of its own, which the exporter leaves out without a word: a mean, and a product."""
    x, kernel, *options = node.args
    if len(options) < 5 or options[4] is None or options[2]:
        return None
    mean = _made(node, node.target, x, kernel, *options[:3], True)
    return _aten.mul.Tensor, (mean, math.prod(kernel) / options[4]), {}  # type: ignore[arg-type, operator]


def _rsub(node: Node) -> Any:
    """A number less integers, which the exporter finds no type for: less what they are in the type of the result."""
    x: Any = node.args[0]
    dtype = node.meta["val"].dtype
    if x.meta["val"].dtype is dtype:
        return None
    return node.target, (_made(node, _aten._to_copy.default, x, dtype=dtype), *node.args[1:]), node.kwargs


def _attention(node: Node) -> Any:
    """Attention of operands that have other than four dimensions, by that of four: [batch, heads, tokens, channels]. What lies between
    the batch and the tokens counts as heads."""
    operands: list[Any] = list(node.args[:3])
    mask: Any = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
    shapes = [_shape(operand) for operand in operands]
    rank, heads = len(shapes[0]), shapes[0][1:-2]
    if rank == 4 or any(len(shape) != rank for shape in shapes):
        return None
    alike = all(shape[:-2] == shapes[0][:-2] for shape in shapes) and not node.kwargs.get("enable_gqa")
    if rank > 4 and (not alike or reshape_sizes(_shape(node)) is None):
        return None

    made = functools.partial(_made, node)

    def of_four(x: Any) -> Node:
        for _ in range(len(_shape(x)), 4):
            x = made(_aten.unsqueeze.default, x, -3)
        sizes = reshape_sizes([_shape(x)[0], math.prod(heads), *_shape(x)[-2:]])
        return x if rank < 4 or sizes is None else made(_aten.reshape.default, x, sizes)

    if mask is not None and rank == 3 and len(_shape(mask)) == 3:
        mask = made(_aten.unsqueeze.default, mask, 1)
    elif mask is not None and rank > 4 and len(_shape(mask)) > 2:
        for _ in range(len(_shape(mask)), rank):
            mask = made(_aten.unsqueeze.default, mask, 0)
        mask = of_four(made(_aten.expand.default, mask, [-1, *heads, -1, -1]))
    flags = {"dropout_p": 0.0, "is_causal": False, **dict(zip(("dropout_p", "is_causal"), node.args[4:], strict=False)), **node.kwargs}
    attended = made(_aten.scaled_dot_product_attention.default, *map(of_four, operands), mask)
    attended.kwargs = {key: value for key, value in flags.items() if key != "attn_mask"}
    if rank > 4:
        return _aten.reshape.default, (attended, reshape_sizes(_shape(node))), {}
    return _aten.squeeze.dim, (attended if rank == 3 else made(_aten.squeeze.dim, attended, -3), -3), {}


def _grouped_product(node: Node) -> Any:
    """A product of rows that are sorted by experts, of each with the matrix that is gathered for it. Arguments: rows, matrices, and where
    the rows of each expert end."""
    x, matrices, ends = node.args[:3]
    if len(_shape(x)) != 2 or len(_shape(matrices)) != 3 or any(option is not None for option in node.args[3:]):
        return None
    made = functools.partial(_made, node)
    ones = made(_aten.ones_like.default, made(_aten.select.int, x, 1, 0), dtype=torch.int64)
    behind = made(_aten.gt.Tensor, made(_aten.unsqueeze.default, made(_aten.cumsum.default, ones, 0), 1), ends)
    chosen = made(_aten.index_select.default, matrices, 0, made(_aten.sum.dim_IntList, behind, [1]))
    return _aten.squeeze.dim, (made(_aten.matmul.default, made(_aten.unsqueeze.default, x, 1), chosen), 1), {}


def _made(beside: Node, target: Any, *arguments: Any, **options: Any) -> Node:
    """A new node before another, of the same module."""
    with beside.graph.inserting_before(beside):
        new = beside.graph.call_function(target, arguments, options)
    value = target(*(each.meta["val"] if isinstance(each, Node) else each for each in arguments), **options)
    new.meta = {**beside.meta, "val": value}
    return new


def _shape(node: Any) -> list[Any]:
    return list(node.meta["val"].shape)


def _called(function: Any) -> Callable[[Node], Any]:
    return lambda node: (function, node.args, node.kwargs)


_aten = torch.ops.aten
_REPLACED = {
    _aten.reshape_as.default: _reshaped,
    _aten.view_as.default: _reshaped,
    _aten.view.default: _called(_aten.reshape.default),  # decomposed operands have other strides
    _aten.min.other: _called(_aten.minimum.default),
    _aten.max.other: _called(_aten.maximum.default),
    _aten.__and__.Tensor: _called(_aten.bitwise_and.Tensor),
    _aten.__or__.Tensor: _called(_aten.bitwise_or.Tensor),
    _aten.flatten.using_ints: _reshaped,
    _aten.expand_as.default: _expand_as,
    **dict.fromkeys(DROPOUT_OPERATORS, _dropout),
    _aten.chunk.default: _chunk,
    **dict.fromkeys((_aten.squeeze.dim, _aten.squeeze.dims), _squeezed),
    _aten.rsub.Scalar: _rsub,
    **{getattr(_aten, f"avg_pool{n}d").default: _divided for n in (2, 3)},
    _aten.square.default: lambda node: (_aten.pow.Tensor_Scalar, (node.args[0], 2), {}),
    _aten.scaled_dot_product_attention.default: _attention,
    **dict.fromkeys((_aten._grouped_mm.default, "transformers.grouped_mm_fallback.default"), _grouped_product),
    **dict.fromkeys(CASTS, _convert),
    **{getattr(_aten, f"upsample_{kind}").vec: _resize for kind in ("nearest1d", "nearest2d", "nearest3d", "bilinear2d", "bicubic2d")},
}
_KEPT: dict[Any, Callable[[Node], bool]] = {
    _aten.reshape.default: lambda node: True,
    _aten.contiguous.default: lambda node: True,
    _aten.batch_norm.default: lambda node: node.args[5] is False,  # `translate` has it, with running statistics
}


def _never(node: Node) -> bool:
    return False


@functools.cache
def _is_always_taken_apart(target: Any) -> bool:
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    return bool(target.has_kernel_for_dispatch_key(composite)) and target not in _decompositions()


@functools.cache
def _decompositions() -> Any:
    return torch.export.default_decompositions()


def _is_whole(exported: ExportedProgram, table: Container[Any]) -> bool:
    """Whether PyTorch would take no operation apart."""
    for node in exported.graph.nodes:
        if node.op not in ("placeholder", "output", "call_function"):
            return False
        if isinstance(node.target, torch._ops.OpOverload):
            apart = _is_always_taken_apart(node.target) and not _KEPT.get(node.target, _never)(node)
            if node.target in table or apart or writes(node):
                return False
    return True
