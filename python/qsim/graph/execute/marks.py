"""Marks: what stands in a traced graph where the simulation quantizes.

A mark names its quantizer and holds no scale, so a graph stays valid when encodings change. Marks cannot be run: an evaluator or an
exporter puts arithmetic in their place.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

_SCHEMAS = {
    "quantized": "(Tensor x, str key) -> Tensor",
    "bias": "(Tensor b, str input, str weight) -> Tensor",
    "rounded": "(Tensor x, str format, bool enters) -> Tensor",
}


def _of_constants(x: Tensor, *_: str | bool) -> Tensor:
    """While it traces or decomposes, torch computes with constants, to know what `item` would give: numbers that forward made
    (``torch.tensor(0.1)``), tensors that a module holds as plain attributes. These of several elements without the dispatch to Python,
    which is on for whoever runs a graph.
    """
    if x.numel() != 1 and not torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.Python):
        raise NotImplementedError("qsim_graph: a mark is no operator; an evaluator or an exporter puts arithmetic in its place")
    return x.clone()


def _mapped(info: Any, in_dims: tuple[int | None, ...], x: Tensor, *rest: str | bool, mark: Any) -> tuple[Tensor, int | None]:
    """Under `torch.vmap`, of all samples at once: along the first axis, which leaves axes that count from the last what they are."""
    if in_dims[0] is None:
        return mark(x, *rest), None
    return mark(x.movedim(in_dims[0], 0), *rest), 0


for _name, _schema in _SCHEMAS.items():
    torch.library.define(f"qsim_graph::{_name}", _schema)
    torch.library.register_fake(f"qsim_graph::{_name}", lambda x, *_: torch.empty_like(x))
    torch.library.impl(f"qsim_graph::{_name}", ("cpu", "cuda"), _of_constants)
    torch.library.register_vmap(f"qsim_graph::{_name}", partial(_mapped, mark=getattr(torch.ops.qsim_graph, _name).default))

QUANTIZED = torch.ops.qsim_graph.quantized.default
BIAS = torch.ops.qsim_graph.bias.default
ROUNDED = torch.ops.qsim_graph.rounded.default


class Mark:
    """In a quantizer's place while a model is traced: ``qsim_graph::quantized(x, key)``, with a key of `QuantSim.quantizers`."""

    def __init__(self, key: str) -> None:
        self.key = key

    def __call__(self, x: Tensor) -> Tensor:
        marked: Tensor = QUANTIZED(x, self.key)
        return marked


class BiasMark:
    """In the place of a `BiasQuantizer`: ``qsim_graph::bias(b, input, weight)``, with the keys of the operands that are multiplied."""

    def __init__(self, input: str, weight: str) -> None:
        self.input, self.weight = input, weight

    def __call__(self, bias: Tensor) -> Tensor:
        marked: Tensor = BIAS(bias, self.input, self.weight)
        return marked


class RoundingMark:
    """Where a tensor enters or leaves an operation that falls back: ``qsim_graph::rounded(x, format, enters)``.

    Between marks that enter and marks that leave, a runtime computes in `format`: "float16" or "bfloat16". `in_place`: whoever else knows
    the tensor gets what is marked too.
    """

    def __init__(self, format: str, enters: bool, in_place: bool = False) -> None:
        self.format, self.enters, self.in_place = format, enters, in_place

    def __call__(self, x: Tensor) -> Tensor:
        marked: Tensor = ROUNDED(x, self.format, self.enters)
        return x.copy_(marked) if self.in_place else marked
