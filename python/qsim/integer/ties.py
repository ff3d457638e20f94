"""Which of equal elements a function chooses, as ONNX has it: the first. On a grid of integers many are equal; torch takes any of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Tensor, Tensor]:
    """`torch.topk`, of equal elements those that come first (ONNX operators, TopK).

    Examples
    --------
    >>> topk(torch.tensor([1.0, 2.0, 2.0, 2.0, 0.0]), 2)[1]
    tensor([1, 2])
    """
    values, indices = sort(x, dim, largest)
    return (values, indices) if x.dim() == 0 else (values.narrow(dim, 0, k), indices.narrow(dim, 0, k))


def sort(x: Tensor, dim: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
    """`torch.sort`, which is stable on the CPU alone."""
    values, indices = torch.sort(x, stable=True, dim=dim, descending=descending)
    return values, indices


def argsort(x: Tensor, dim: int = -1, descending: bool = False) -> Tensor:
    """`torch.argsort`, likewise."""
    return sort(x, dim, descending)[1]


_aten = torch.ops.aten
FIRST_OF_EQUALS: dict[Any, Callable[..., Any]] = {_aten.topk.default: topk, _aten.sort.default: sort, _aten.argsort.default: argsort}


class FirstOfEquals(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within the context torch chooses as ONNX does.

    >>> with FirstOfEquals():
    ...     torch.tensor([1.0, 2.0, 2.0, 2.0, 0.0]).topk(2).indices
    tensor([1, 2])
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        return FIRST_OF_EQUALS.get(func, func)(*args, **(kwargs or {}))
