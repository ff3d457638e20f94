"""What an exhibit is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

FP16, COREML, INT8 = "tensorrt-fp16", "coreml-fp16", "onnxruntime-int8"


class Case(NamedTuple):
    """A model and its batches that show a fault, and a pair that does not. What is None is as in the faulty one."""

    model: nn.Module
    data: list[Any]
    healthy_model: nn.Module | None = None
    healthy_data: list[Any] | None = None
    options: dict[str, Any] = {}  # noqa: RUF012


class Exhibit(NamedTuple):
    """A reported failure: `code` and `op` (or module) are the first culprit."""

    name: str
    code: str
    op: str
    target: str
    make: Callable[[], Case]


EXHIBITS: dict[str, Exhibit] = {}


def exhibit(code: str, op: str, target: str = FP16) -> Callable[[Callable[[], Case]], Callable[[], Case]]:
    """Register a function that makes the `Case`."""

    def register(make: Callable[[], Case]) -> Callable[[], Case]:
        assert make.__doc__
        assert make.__name__ not in EXHIBITS
        EXHIBITS[make.__name__] = Exhibit(make.__name__, code, op, target, make)
        return make

    return register


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
