"""Which version of ONNX's operators a model needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from qsim.errors import ExportError
from qsim.onnx.tensors import ONNX_TYPES
from qsim.options import shown
from qsim.trace.runtimes import Runtime
from qsim.trace.storages import Storages

# What came with which opset: blocks here, types in `ONNX_TYPES`. The exporter's own minimum is 18; float scales and float8 are 19.
SMALLEST_OPSET = 19
_BLOCKS = 21
_GELU = 20  # one operation; before, five, each of which would read a DequantizeLinear of its own
_BFLOAT16_GRAPH = 22  # Conv, pooling and others take bfloat16


def needed(storages: Storages, blocks: Iterable[str], bfloat16: bool) -> Iterator[tuple[int, str]]:
    """Opsets that are needed, and what for.

    Parameters
    ----------
    storages : Storages
    blocks : iterable of str
        Quantizers with one scale per block.
    bfloat16 : bool
        Whether the model computes in bfloat16.
    """
    yield SMALLEST_OPSET, "a Q/DQ model as qsim writes it"
    for key, storage in [*storages.constants.items(), *storages.activations.items()]:
        if (since := ONNX_TYPES[storage].since) > SMALLEST_OPSET:
            yield since, f"'{key}' ({storage})"
    yield from ((_BLOCKS, f"'{key}' (blocks)") for key in blocks)
    if bfloat16:
        yield _BFLOAT16_GRAPH, "operations on bfloat16"


def preferred(target: Runtime, functions: Iterable[str]) -> int:
    """The opset that makes a faster model of what calls these functions."""
    return _GELU if target.one_gelu and "gelu" in functions else SMALLEST_OPSET


def chosen(wanted: int | None, demands: Sequence[tuple[int, str]], largest: int, best: int = SMALLEST_OPSET) -> int:
    """The opset to write: the smallest that meets all demands, `best` or more; or the one that is asked for.

    Raises
    ------
    ExportError
        `wanted` is too small, or larger than what the installed onnx knows: the message names the tensors.
    """
    smallest = max(opset for opset, _ in demands)
    if wanted is None:
        return max(smallest, best)
    if isinstance(wanted, bool) or not isinstance(wanted, int):
        raise TypeError(f"QuantSim.export: got opset={shown(wanted)}; expected an integer from {SMALLEST_OPSET} to {largest}, or None")
    if wanted > largest:
        raise ExportError(f"QuantSim.export: got opset={wanted}; the installed onnx knows opsets up to {largest}")
    unmet = [f"{what} needs {opset}" for opset, what in demands if opset > wanted]
    if unmet:
        listed = "; ".join(unmet[:8]) + (f"; and {len(unmet) - 8} more" if len(unmet) > 8 else "")
        cure = f"Leave opset out, or write opset={smallest}"
        if any(opset > SMALLEST_OPSET for opset, _ in demands):
            cure += "; tensors of 8 bits need no more than 19"
        raise ExportError(f"QuantSim.export: got opset={wanted}, and {listed}. {cure}: ONNX Runtime 1.15 (2023) and later read 19.")
    return wanted
