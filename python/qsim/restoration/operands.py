"""Operations that multiply with a weight, as matrices: ``result[g] = weight[g] @ columns[g]`` for each group of channels.

Everything that solves for weights sees weights as ``[groups, rows, K]``, rows being output channels, and inputs as ``[groups, K, N]``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qsim.graph.execute.tapped import WeightedCall
from qsim.graph.record.tape import Slot

_CONVOLUTION = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
_PARAMETERS = {
    "linear": ("input", "weight", "bias"),
    **{f"conv{n}d": _CONVOLUTION for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": _TRANSPOSED for n in (1, 2, 3)},
    **dict.fromkeys(("matmul", "mm"), ("input", "weight")),
    "addmm": ("bias", "input", "weight"),
}
_NAMES_OF_MATRICES = {"matmul": {"tensor1": "input", "other": "weight", "tensor2": "weight"}, "mm": {"mat2": "weight"}}
_NAMES_OF_MATRICES["addmm"] = {"mat1": "input", "mat2": "weight", "input": "bias"}


@dataclass(frozen=True)
class WeightProduct:
    """One call of an operation that multiplies with a weight.

    Attributes
    ----------
    input : Tensor
        What the weight is multiplied with.
    shape : torch.Size
        Of the weight.
    groups : int
    bias : int or str, optional
        Where the bias is among the arguments of the call, None if there is none.
    to_rows, from_rows : callable
        Between the weight's layout and ``[groups, rows, K]``; each is the other's inverse.
    columns : callable
        ``columns(n, generator)``: ``[groups, K, n]``, float32, at so many places of the input: all in order where there are no more.
    places : int
        How many there are.
    """

    input: Tensor
    shape: torch.Size
    groups: int
    bias: Slot | None
    to_rows: Callable[[Tensor], Tensor]
    from_rows: Callable[[Tensor], Tensor]
    columns: Callable[[int, torch.Generator], Tensor]
    places: int


def product_of(call: WeightedCall) -> WeightProduct | str:
    """The call as a product, or why it is none."""
    names = _PARAMETERS.get(call.name)
    if names is None:
        return f"{call.name} is no product of matrices with a weight" if call.name != "embedding" else "an embedding looks up rows of it"
    given = _by_name(call, names)
    weight, x, bias = given["weight"], given["input"], given.get("bias")
    slot = call.slot
    if (names.index("weight") if isinstance(slot, int) else "weight") != (slot if isinstance(slot, int) else _renamed(call.name, slot)):
        return f"the weight is the first operand of {call.name}"
    if not isinstance(x, Tensor) or x.is_complex() or x.is_nested:
        return f"the other operand of {call.name} is {type(x).__name__}, no dense tensor of real numbers"
    where: Slot | None = None
    if isinstance(bias, Tensor) and bias.dim() == 1:
        where = names.index("bias") if len(call.args) > names.index("bias") else "bias"
    if call.name == "linear":
        return _linear(x, weight.shape, where, transposed=False)
    if call.name in ("matmul", "mm", "addmm"):
        if weight.dim() != 2:
            return f"the weight of {call.name} has {weight.dim()} dimensions"
        return _linear(x, weight.shape, where, transposed=True)
    dims, groups = weight.dim() - 2, int(given.get("groups", 1))
    x = x if x.dim() == weight.dim() else x[None]
    stride, dilation = (_each(given.get(name, 1), dims) for name in ("stride", "dilation"))
    if call.name.startswith("conv_transpose"):
        padding, extra = (_each(given.get(name, 0), dims) for name in ("padding", "output_padding"))
        return _transposed(x, weight.shape, where, groups, stride, padding, extra, dilation)
    return _convolution(x, weight.shape, where, groups, stride, _padding(given.get("padding", 0), weight.shape[2:], dilation), dilation)


def _by_name(call: WeightedCall, names: tuple[str, ...]) -> dict[str, Any]:
    return dict(zip(names, call.args, strict=False)) | {_renamed(call.name, name): value for name, value in call.kwargs.items()}


def _renamed(function: str, name: Any) -> Any:
    return _NAMES_OF_MATRICES.get(function, {}).get(name, name)


def _each(value: Any, dims: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * dims if len(values) == 1 else values


def _padding(padding: Any, kernel: torch.Size, dilation: tuple[int, ...]) -> list[tuple[int, int]]:
    """Zeros before and behind, by axis."""
    if padding == "valid":
        padding = 0
    if padding == "same":  # PyTorch puts the odd one behind
        totals = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    return [(p, p) for p in _each(padding, len(kernel))]


def _linear(x: Tensor, shape: torch.Size, bias: Slot | None, *, transposed: bool) -> WeightProduct:
    flat = x.reshape(-1, x.shape[-1])

    def turn(w: Tensor) -> Tensor:
        return w.T if transposed else w

    def columns(n: int, generator: torch.Generator) -> Tensor:
        return _chosen(flat, n, generator).float().T[None]

    return WeightProduct(x, shape, 1, bias, lambda w: turn(w)[None], lambda rows: turn(rows[0]), columns, flat.shape[0])


def _convolution(
    x: Tensor,
    shape: torch.Size,
    bias: Slot | None,
    groups: int,
    stride: tuple[int, ...],
    padding: list[tuple[int, int]],
    dilation: tuple[int, ...],
) -> WeightProduct:
    sizes = zip(x.shape[2:], padding, dilation, shape[2:], stride, strict=True)
    places = (x.shape[0], *((n + sum(p) - d * (k - 1) - 1) // s + 1 for n, p, d, k, s in sizes))

    def patches() -> Tensor:
        """A view: ``[*places, channels, *kernel]``."""
        padded = F.pad(x, [end for pair in reversed(padding) for end in pair])
        first, channel, *steps = padded.stride()
        moved = [step * s for step, s in zip(steps, stride, strict=True)]
        inside = [step * d for step, d in zip(steps, dilation, strict=True)]
        return padded.as_strided((*places, padded.shape[1], *shape[2:]), (first, *moved, channel, *inside), padded.storage_offset())

    def columns(n: int, generator: torch.Generator) -> Tensor:
        found = patches()[_places(places, n, generator, x.device)].float()
        return found.reshape(found.shape[0], groups, -1).permute(1, 2, 0)

    def to_rows(w: Tensor) -> Tensor:
        return w.reshape(groups, shape[0] // groups, -1)

    def from_rows(rows: Tensor) -> Tensor:
        return rows.reshape(shape)

    return WeightProduct(x, shape, groups, bias, to_rows, from_rows, columns, math.prod(places))


def _transposed(
    x: Tensor,
    shape: torch.Size,
    bias: Slot | None,
    groups: int,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    extra: tuple[int, ...],
    dilation: tuple[int, ...],
) -> WeightProduct:
    """A convolution of the input with zeros between its elements, with the kernel turned round."""
    kernel, axes = shape[2:], list(range(2, len(shape)))
    spread = x.new_zeros(*x.shape[:2], *((n - 1) * s + 1 for n, s in zip(x.shape[2:], stride, strict=True)))
    spread[tuple([slice(None)] * 2 + [slice(None, None, s) for s in stride])] = x
    around = [(d * (k - 1) - p, d * (k - 1) - p + e) for d, k, p, e in zip(dilation, kernel, padding, extra, strict=True)]
    turned = torch.Size((shape[1] * groups, shape[0] // groups, *kernel))
    inner = _convolution(spread, turned, bias, groups, (1,) * len(kernel), around, dilation)

    def to_rows(w: Tensor) -> Tensor:
        each = w.flip(axes).reshape(groups, shape[0] // groups, shape[1], *kernel)
        return each.transpose(1, 2).reshape(groups, shape[1], -1)

    def from_rows(rows: Tensor) -> Tensor:
        each = rows.reshape(groups, shape[1], shape[0] // groups, *kernel).transpose(1, 2)
        return each.reshape(shape).flip(axes)

    return WeightProduct(x, shape, groups, bias, to_rows, from_rows, inner.columns, inner.places)


def _places(shape: tuple[int, ...], n: int, generator: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    """Indices of `n` of the places of a tensor; of all in order where there are no more."""
    count = math.prod(shape)
    chosen = torch.arange(count) if n >= count else torch.randperm(count, generator=generator)[:n]
    return tuple(index.to(device) for index in torch.unravel_index(chosen, shape))


def _chosen(rows: Tensor, n: int, generator: torch.Generator) -> Tensor:
    if n >= rows.shape[0]:
        return rows
    return rows[torch.randperm(rows.shape[0], generator=generator)[:n].to(rows.device)]


def argument(call: WeightedCall, slot: Slot) -> Any:
    """What a call has in a slot."""
    return call.args[slot] if isinstance(slot, int) else call.kwargs[str(slot)]


def with_arguments(call: WeightedCall, values: Mapping[Slot, Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with other values in these slots."""
    args = tuple(values.get(i, value) for i, value in enumerate(call.args))
    return args, {name: values.get(name, value) for name, value in call.kwargs.items()}
