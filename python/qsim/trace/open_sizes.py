"""Sizes that a traced graph leaves open, as a caller asks for them in the way of `torch.export`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves, tree_map

from qsim.runs.arguments import Arguments


def open_axes(forward: Callable[..., Any], call: Arguments, dynamic_shapes: Any) -> list[dict[int, Any]]:
    """The open axes of each tensor of a call, in order, with what is asked for them: a `Dim`, or Dim.AUTO or Dim.DYNAMIC.

    Parameters
    ----------
    forward : callable
    call : Arguments
        Its positional and keyword arguments.
    dynamic_shapes
        As `torch.export.export` takes it; empty, it leaves nothing open.
    """
    if isinstance(dynamic_shapes, (Mapping, tuple, list)) and not dynamic_shapes:
        return [{} for t in tree_leaves(call) if isinstance(t, Tensor)]
    arguments = inspect.signature(forward).bind(*call[0], **call[1]).arguments
    shapes = dynamic_shapes if isinstance(dynamic_shapes, Mapping) else dict(zip(arguments, dynamic_shapes, strict=True))
    found: dict[int, dict[int, Any]] = {}

    def note(t: Any, asked: Any) -> None:
        axes = {} if asked is None else asked if isinstance(asked, Mapping) else dict(enumerate(asked))
        found[id(t)] = {axis: size for axis, size in axes.items() if not (size is None or isinstance(size, int) or size is Dim.STATIC)}

    tree_map(note, dict(arguments), dict(shapes))
    return [found[id(t)] for t in tree_leaves(call) if isinstance(t, Tensor)]


def doubled(call: Arguments, axes: list[dict[int, Any]]) -> Arguments:
    """A call whose open axes are longer than 1: those are always traced as 1."""
    wanted = iter(axes)

    def longer(t: Any) -> Any:
        for axis in next(wanted) if isinstance(t, Tensor) else ():
            t = torch.cat([t, t], axis) if t.shape[axis] == 1 else t
        return t

    made: Arguments = tree_map(longer, call)
    return made


def settle_sizes(exported: ExportedProgram) -> None:
    """Make numbers of sizes that were open when they were traced and that forward has fixed since, as `for part in x` and `x.unbind()` do:
    they are symbols that equal a number, of which PyTorch's ONNX exporter makes the name of an open axis."""

    def known(size: Any) -> Any:
        fixed = size.node.maybe_as_int() if isinstance(size, torch.SymInt) else None
        return size if fixed is None else fixed

    def settled(value: Any) -> Any:
        if not isinstance(value, FakeTensor) or value.layout is not torch.strided:
            return known(value)
        if all(known(size) is size for size in (*value.shape, *value.stride())):
            return value
        sizes, strides = ([known(size) for size in of] for of in (value.shape, value.stride()))
        with value.fake_mode:
            return torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device, requires_grad=value.requires_grad)

    for module in exported.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            if "val" in node.meta:
                node.meta["val"] = tree_map(settled, node.meta["val"])


def names_of_sizes(exported: ExportedProgram, axes: list[dict[int, Any]]) -> tuple[dict[str, str], tuple[str, ...]]:
    """What each symbol of a traced graph is called: by its `Dim`; "batch", or by input and axis, where it has none. And which sizes that
    should be open have none, because forward makes numbers of them."""
    inputs = set(exported.graph_signature.user_inputs)
    tensors = [node for node in exported.graph.nodes if node.name in inputs and isinstance(node.meta.get("val"), Tensor)]
    found: dict[str, str] = {}
    fixed = []
    for node, asked in zip(tensors, axes, strict=True):
        for axis, dim in asked.items():
            size = node.meta["val"].shape[axis]
            symbols = size.node.expr.free_symbols if isinstance(size, torch.SymInt) else ()
            fixed += [] if symbols else [f"axis {axis} of '{node.name}'"]
            named = getattr(dim, "root", dim)
            name = getattr(named, "__name__", "batch" if axis == 0 else f"{node.name}_{axis}")
            found |= {str(symbol): name for symbol in symbols if str(symbol) not in found}
    return found, tuple(fixed)
