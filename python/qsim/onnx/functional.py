"""A traced graph without operations in place, so that the exporter need not trace it once more.

PyTorch's exporter begins with `ExportedProgram.run_decompositions`, which runs every operation on symbolic shapes: two thirds of an export.
It takes operations apart that it has no translation for, and replaces those in place. Where there are none of the first, and the second
can be replaced one by one, nothing is left to do.

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
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.export import ExportedProgram
from torch.fx import Node

from qsim.trace.idle_nodes import CASTS


class Functional:
    """An exported program whose decomposition is skipped where it changes nothing but operations in place.

    Parameters
    ----------
    exported : ExportedProgram
        Changed in place where it is skipped.
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
        if options or table is None or not _replace_in_place(self._exported, table):
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
        simpler = _REPLACED.get(node.target)
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
    sizes = _sizes(node.meta["val"].shape)
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


def _rsub(node: Node) -> Any:
    """A number less integers, which the exporter finds no type for: less what they are in the type of the result."""
    x: Any = node.args[0]
    dtype = node.meta["val"].dtype
    if x.meta["val"].dtype is dtype:
        return None
    with node.graph.inserting_before(node):
        cast = node.graph.call_function(_aten._to_copy.default, (x,), {"dtype": dtype})
    cast.meta = {"val": x.meta["val"].to(dtype)}
    return node.target, (cast, *node.args[1:]), node.kwargs


def _attention(node: Node) -> Any:
    """Attention of operands that have other than four dimensions, by that of four: [batch, heads, tokens, channels]. What lies between
    the batch and the tokens counts as heads."""
    operands: list[Any] = list(node.args[:3])
    mask: Any = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
    shapes = [_shape(operand) for operand in operands]
    rank, heads = len(shapes[0]), shapes[0][1:-2]
    if rank == 4 or any(len(shape) != rank for shape in shapes):
        return None
    if rank > 4 and (
        any(shape[:-2] != shapes[0][:-2] for shape in shapes) or _sizes(_shape(node)) is None or node.kwargs.get("enable_gqa")
    ):
        return None

    def made(target: Any, *arguments: Any) -> Node:
        with node.graph.inserting_before(node):
            new = node.graph.call_function(target, arguments)
        new.meta["val"] = target(*(each.meta["val"] if isinstance(each, Node) else each for each in arguments))
        return new

    def of_four(x: Any) -> Node:
        for _ in range(len(_shape(x)), 4):
            x = made(_aten.unsqueeze.default, x, -3)
        sizes = _sizes([_shape(x)[0], math.prod(heads), *_shape(x)[-2:]])
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
        return _aten.reshape.default, (attended, _sizes(_shape(node))), {}
    return _aten.squeeze.dim, (attended if rank == 3 else made(_aten.squeeze.dim, attended, -3), -3), {}


def _shape(node: Any) -> list[Any]:
    return list(node.meta["val"].shape)


def _called(function: Any) -> Callable[[Node], Any]:
    return lambda node: (function, node.args, node.kwargs)


def _sizes(shape: Any) -> list[int] | None:
    """A shape as a reshape takes it, -1 for a length that is open; None if there are several of these."""
    sizes = [n if isinstance(n, int) else -1 for n in shape]
    return sizes if sizes.count(-1) <= 1 and 0 not in sizes else None


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
    _aten.dropout.default: _dropout,
    _aten.feature_dropout.default: _dropout,
    _aten.chunk.default: _chunk,
    _aten.rsub.Scalar: _rsub,
    _aten.scaled_dot_product_attention.default: _attention,
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


def _replace_in_place(exported: ExportedProgram, table: Container[Any]) -> bool:
    """Replace operations in place by those that return a new tensor; False, and nothing is changed, if more is to do."""
    graph = exported.graph
    position = {node: i for i, node in enumerate(graph.nodes)}
    aliases: dict[Node, list[Node]] = {}  # one list for all that share memory, so far
    replacements: dict[Node, Any] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            aliases[node] = [node]
            continue
        if node.op != "call_function":
            return False
        if not isinstance(node.target, torch._ops.OpOverload):
            aliases[node] = aliases[node.args[0]] if node.args and isinstance(node.args[0], Node) else [node]  # getitem, sizes
            aliases[node].append(node)
            continue
        function = _functional(node)
        if function is None or function in table or (_is_always_taken_apart(function) and not _KEPT.get(function, _never)(node)):
            return False
        if function is not node.target:
            if not _is_last_use(node, aliases[node.args[0]], position):  # type: ignore[index]
                return False
            replacements[node] = function
        sharing = _shares_memory(node, function)
        aliases[node] = aliases[node.all_input_nodes[0]] if sharing and node.all_input_nodes else []
        aliases[node].append(node)
    for node, function in replacements.items():
        node.target = function
    exported.graph_module.recompile()
    return True


def _functional(node: Node) -> Any:
    """The operation that computes the same and changes nothing: its own where it does so; None where there is none."""
    target: Any = node.target
    if not target._schema.is_mutable:
        return target
    name = target.overloadpacket.__name__
    packet = getattr(torch.ops.aten, name[:-1], None) if target.namespace == "aten" and name.endswith("_") else None
    function = getattr(packet, target._overloadname, None)
    if function is None or function._schema.is_mutable or not isinstance(node.args[0], Node):
        return None
    own, other = ([(a.name, str(a.type)) for a in one._schema.arguments] for one in (target, function))
    dtypes = [operand.meta["val"].dtype for operand in node.all_input_nodes if isinstance(operand.meta.get("val"), Tensor)]
    if functools.reduce(torch.promote_types, dtypes) is not dtypes[0]:
        return None  # in place the type stays, otherwise it is promoted
    return function if own == other else None


def _is_last_use(node: Node, shared: list[Node], position: dict[Node, int]) -> bool:
    """Whether nothing looks, after `node` has changed it, at what shares the memory under another name than that of its result."""
    return all(
        member.op == "call_function" and all(user is node or position[user] < position[node] for user in member.users) for member in shared
    )


def _shares_memory(node: Node, function: Any) -> bool:
    """Whether the result may be the operand, or a view of it."""
    returns_view = any(value.alias_info is not None for value in function._schema.returns)
    return returns_view or function is not node.target
