"""Average pooling and means as ONNX Runtime runs them on integers: which operation each is there, and which its kernels refuse."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch.fx import Node

from qsim.trace.fx_nodes import arguments, function, shape

# MLAS throws when a session runs, where scale / (scale of the result * elements) is outside of these (qlgavgpool.cpp).
_LOWEST, _HIGHEST = 2.0**-32, 256.0
_MOST = 2**24  # elements


def operation_of(node: Node) -> tuple[str, str]:
    """The operation of ONNX that an average is, and why no integer kernel has it, "" if one does."""
    given, name = arguments(node), function(node)
    lengths = list(shape(given["self"]))
    if name.startswith("adaptive"):
        sizes, results = lengths[-len(given["output_size"]) :], given["output_size"]
        if any(not isinstance(n, int) or n % r for n, r in zip(sizes, results, strict=True)):
            return "AveragePool", f"windows of {tuple(results)} results over {tuple(sizes)} elements differ in size"
        return "GlobalAveragePool" if set(results) == {1} else "AveragePool", ""
    if name.startswith("avg_pool"):
        return "AveragePool", "" if given.get("divisor_override") is None else "ONNX has no divisor_override"
    axes = sorted(axis % len(lengths) for axis in given.get("dim") or range(len(lengths)))
    fits = axes == list(range(2, len(lengths)))
    return "GlobalAveragePool", "" if fits else "ONNX Runtime has an integer kernel for means over all axes behind the second alone"


def is_whole(node: Node, op: str) -> bool:
    """Whether one window takes all elements: the kernel for means runs then."""
    given = arguments(node)
    sizes = list(shape(given["self"]))[2:]
    kernel, padding = (_each(given.get(name, 0), len(sizes)) for name in ("kernel_size", "padding"))
    return op == "GlobalAveragePool" or (kernel == sizes and not any(padding))


def is_computed(scale: float, result: float, lengths: Sequence[object]) -> bool:
    """Whether ONNX Runtime's kernel takes a mean over `lengths`, of elements on a grid of `scale` onto one of `result`: it refuses one that
    is far finer or coarser. Lengths that are open are taken for 1, which asks most of the finer one."""
    quotient = scale / (result * prod(n for n in lengths if isinstance(n, int)))
    return _LOWEST * (1 if all(isinstance(n, int) for n in lengths) else _MOST) <= quotient < _HIGHEST


def _each(value: int | Sequence[int], count: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * count if len(values) == 1 else values
