"""Lowering to XNNPACK, and what of a program it leaves to other kernels."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from qsim.errors import ExportError
from qsim.trace.marks_behind_moves import operation

_HANDS_OVER = ("executorch_call_delegate", "getitem")


@dataclass(frozen=True)
class ProgramFile:
    """A program for ExecuTorch.

    Attributes
    ----------
    contents : bytes
        Of a ``.pte`` file.
    outside : dict of str to int
        The operations that XNNPACK did not take, which ExecuTorch's portable kernels run, one element at a time.
    """

    contents: bytes
    outside: dict[str, int]


def lower(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any = None) -> ProgramFile:
    """A model as a program for XNNPACK, for the sizes of a call's tensors, or those that `dynamic_shapes` leaves open.

    Raises
    ------
    ExportError
        ExecuTorch cannot lower it: the message holds its reason.
    """
    with _quietly():
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import to_edge_transform_and_lower

        try:
            exported = torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)
            edge = to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()])
            outside = Counter(name for name in _operations(edge.exported_program()) if name not in _HANDS_OVER)
            return ProgramFile(bytes(edge.to_executorch().buffer), dict(outside))
        except Exception as error:  # whatever its passes raise
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise ExportError(
                f"QuantSim.export: ExecuTorch cannot lower the model: {reason}. Simulate the part that it can, or leave out what it names"
            ) from error


def _operations(program: ExportedProgram) -> Iterator[str]:
    for node in program.graph.nodes:
        if node.op == "call_function":
            yield operation(node) or str(node.target)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """ExecuTorch warns and logs of what is its own."""
    was = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(was)
