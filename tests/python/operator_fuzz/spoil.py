"""Odd arguments: the same values in other memory, other kinds of tensors, and numbers that nobody would pass."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

DTYPES = (
    *(torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.complex64, torch.complex128),
    *(torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.bool),
)
# Below -2**62 torch.SymInt has no integers: they never reach an operator.
INTEGERS = (0, 1, -1, 2, 7, -8, 255, 2**24, -(2**24) - 1, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**62, 2**63 - 1, -(2**62))
NUMBERS = (math.nan, math.inf, -math.inf, 0.0, -0.0, -1.0, 1e308, 5e-324, 0.5, 100.0, 1e-40)


def permuted(rng: random.Random, x: Tensor) -> Tensor:
    order = list(range(x.dim()))
    rng.shuffle(order)
    return x.permute(order).contiguous().permute([order.index(i) for i in range(x.dim())])


def with_gaps(rng: random.Random, x: Tensor) -> Tensor:
    if x.dim() == 0:
        return torch.stack([x, x])[1]
    axis = rng.randrange(x.dim())
    sizes = [2 * n + 1 if i == axis else n for i, n in enumerate(x.shape)]
    return x.new_zeros(sizes)[(slice(None),) * axis + (slice(1, None, 2),)].copy_(x)


def offset(rng: random.Random, x: Tensor) -> Tensor:
    start = rng.randrange(1, 9)
    return x.new_zeros(x.numel() + 9)[start : start + x.numel()].view(x.shape).copy_(x)


def expanded(rng: random.Random, x: Tensor) -> Tensor:
    if x.dim() == 0 or x.numel() == 0:
        return x
    axis = rng.randrange(x.dim())
    return x.narrow(axis, 0, 1).expand_as(x)


def overlapping(rng: random.Random, x: Tensor) -> Tensor:
    strides = [rng.choice([0, 1, 1, 2, 3, 5]) for _ in x.shape]
    length = 1 + sum(max(n - 1, 0) * s for n, s in zip(x.shape, strides, strict=True))
    return x.flatten()[torch.arange(length) % max(x.numel(), 1)].as_strided(x.shape, strides) if x.numel() else x


def negated(rng: random.Random, x: Tensor) -> Tensor:
    return torch._neg_view(-x) if x.is_floating_point() else x


def sparse(rng: random.Random, x: Tensor) -> Tensor:
    kinds: list[Callable[[], Tensor]] = [x.to_sparse]
    if x.dim() == 2 and x.numel() > 0:
        kinds.append(x.to_sparse_csr)
    if x.dtype == torch.float32 and x.numel() > 0:
        kinds += [x.to_mkldnn, lambda: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)]
    if x.dim() > 0:
        kinds.append(lambda: torch.nested.nested_tensor([x, x]))
    return rng.choice(kinds)()


def another_shape(rng: random.Random, x: Tensor) -> Tensor:
    kind = rng.randrange(5)
    if kind == 0:
        return x.unsqueeze(0)
    if kind == 1:
        return x.flatten()
    if kind == 2 and x.dim() > 0:
        axis = rng.randrange(x.dim())
        return torch.cat([x, x.narrow(axis, 0, min(1, x.shape[axis]))], axis)
    if kind == 3 and x.dim() > 0:
        axis = rng.randrange(x.dim())
        return x.narrow(axis, 0, max(x.shape[axis] - 1, 0)).clone()
    return x.new_zeros([rng.choice([0, 1, 3]) for _ in range(rng.randrange(3))])


def as_inference(rng: random.Random, x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.clone()


# Values stay what they are; only the memory is odd.
LAYOUTS: tuple[Callable[[random.Random, Tensor], Tensor], ...] = (permuted, with_gaps, offset, negated)
TENSORS: tuple[Callable[[random.Random, Tensor], Any], ...] = (
    *(LAYOUTS * 3),
    *(expanded, expanded, overlapping, overlapping),
    *(sparse, another_shape, another_shape, as_inference),
    lambda rng, x: x.to(rng.choice(DTYPES)),
    lambda rng, x: x.to(rng.choice(DTYPES)),
    lambda rng, x: x.to("meta"),
    lambda rng, x: None,
    lambda rng, x: torch._lazy_clone(x),
    lambda rng, x: torch._efficientzerotensor(x.shape, dtype=x.dtype),
    lambda rng, x: torch.nn.Parameter(x) if x.is_floating_point() else x,
    lambda rng, x: (x * 1).requires_grad_() if x.is_floating_point() else x,
    lambda rng, x: x.tolist(),
    lambda rng, x: 1.5,
)


def spoiled(rng: random.Random, value: Any, others: list[Tensor]) -> Any:
    """`value` made odd, or as it is where torch has no such tensor; `others`: tensors of the same call, whose memory it may take."""
    try:
        return _spoiled(rng, value, others)
    except (RuntimeError, NotImplementedError):
        return value


def _spoiled(rng: random.Random, value: Any, others: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        return _taken(rng, value, rng.choice(others)) if others and rng.random() < 0.1 else rng.choice(TENSORS)(rng, value)
    if isinstance(value, list):
        return _spoiled_list(rng, value, others)
    if isinstance(value, str):
        return rng.choice(["", "divide", "mse", "skip", "float16", "x" * 1000, None])
    if isinstance(value, bool):
        return rng.choice([not value, None, 2, "yes"])
    if isinstance(value, float):
        return rng.choice(NUMBERS)
    return rng.choice([*INTEGERS, *INTEGERS, None, 0.5])  # None may stand for any option


def _taken(rng: random.Random, value: Tensor, other: Tensor) -> Tensor:
    """`other` itself, or a tensor like `value` somewhere in its memory."""
    if rng.random() < 0.3 or other.numel() == 0 or not other.is_contiguous() or other.is_neg() or other._is_zerotensor():
        return other
    if other.is_quantized:  # torch ends the process where such a tensor is viewed as another type
        return other
    memory = other.view(-1).view(torch.uint8)
    start = rng.choice([0, 0, 4, 8]) if value.element_size() < 8 else 0
    if memory.numel() < start + value.nbytes or value.numel() == 0 or value.dtype == torch.bool:
        return other
    return memory[start : start + value.nbytes].view(value.dtype).view(value.shape)


def _spoiled_list(rng: random.Random, values: list[Any], others: list[Tensor]) -> Any:
    changed, kind = list(values), rng.randrange(6)
    if kind == 0 or not changed:
        return rng.choice([[], None, changed + changed[:1], changed[1:]])
    at = rng.randrange(len(changed))
    if kind == 1:
        changed.append(changed[at])
    elif kind == 2 and isinstance(changed[at], Tensor) and changed[at].dim() > 0:
        changed += [changed[at][:1], changed[at].t()] if changed[at].dim() == 2 else [changed[at][1:]]
    else:
        changed[at] = _spoiled(rng, changed[at], others)
    return changed
