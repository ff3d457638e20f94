"""fake_quantize and its backward passes."""

from __future__ import annotations

import math
from functools import partial

import peers
import torch
from case import Calls, Case
from torch import Tensor

from qsim.ops import fake_quantize, fake_quantize_

qsim_ops, aten = torch.ops.qsim, torch.ops.aten
GRID = (-8, 7)
SCALE = 0.31
SIZES = (2**16, 2**20, 2**22, 2**25)


def encoding(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, int, int]:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return torch.full(shape, SCALE, dtype=wide), torch.full(shape, 2, dtype=torch.int32), *GRID


def image(n: int, layout: torch.memory_format = torch.contiguous_format) -> Tensor:
    return torch.randn(max(1, n // 65536), 64, 32, 32).contiguous(memory_format=layout)


def reused(dtype: torch.dtype, n: int) -> Calls:
    x, y, grid = torch.randn(n).to(dtype), torch.empty(n, dtype=dtype), encoding(dtype=dtype)
    calls: Calls = {"qsim": lambda: fake_quantize(x, *grid, out=y), "copy_": lambda: y.copy_(x)}
    if dtype.itemsize == 2:
        calls["mul"] = lambda: torch.mul(x, 1.5, out=y)
    return calls


def fresh(dtype: torch.dtype, n: int) -> Calls:
    x, grid = torch.randn(n).to(dtype), encoding(dtype=dtype)
    calls: Calls = {"qsim": lambda: fake_quantize(x, *grid), "clone": x.clone}
    if dtype != torch.float64:
        calls["torch.compile"] = lambda: peers.compiled(peers.quantized)(x, *grid)
        if n <= 2**22:
            calls["torch core"] = lambda: torch.fake_quantize_per_tensor_affine(x, *grid)
    return calls


def in_place(n: int) -> Calls:
    x, y, grid = torch.randn(n), torch.empty(n), encoding()
    return {"qsim": lambda: fake_quantize_(y, *grid), "copy_": lambda: y.copy_(x)}


def per_channel(layout: torch.memory_format, n: int) -> Calls:
    x, grid = image(n, layout), encoding(64)
    y = torch.empty_like(x)
    shaped = grid[0].view(-1, 1, 1), grid[1].view(-1, 1, 1), *GRID
    return {
        "qsim": lambda: fake_quantize(x, *grid, axis=1, out=y),
        "copy_": lambda: y.copy_(x),
        "torch core": lambda: torch.fake_quantize_per_channel_affine(x, *grid[:2], 1, *GRID),
        "torch.compile": lambda: peers.compiled(peers.quantized)(x, *shaped),
    }


def channels(count: int, inner: tuple[int, ...], layout: torch.memory_format, n: int) -> Calls:
    x, grid = torch.randn(n // (count * math.prod(inner)), count, *inner).contiguous(memory_format=layout), encoding(count)
    y = torch.empty_like(x)
    return {"qsim": lambda: fake_quantize(x, *grid, axis=1, out=y), "copy_": lambda: y.copy_(x)}


def blocks(size: int, n: int) -> Calls:
    x = torch.randn(max(1, n // 1024), 1024)
    y, grid = torch.empty_like(x), encoding(len(x), 1024 // size)
    return {"qsim": lambda: fake_quantize(x, *grid, axis=1, block_size=size, out=y), "copy_": lambda: y.copy_(x)}


def with_mask(n: int) -> Calls:
    x, y, grid = torch.randn(n), torch.empty(n), encoding()
    cachemask = partial(aten.fake_quantize_per_tensor_affine_cachemask, x, SCALE, 2, *GRID)
    return {
        "qsim": lambda: qsim_ops.fake_quantize_with_mask(x, *grid),
        "copy_": lambda: y.copy_(x),
        "clone": x.clone,
        "torch core": cachemask,
    }


def backward_from_bits(n: int) -> Calls:
    grad, x, bytes_ = torch.randn(n), torch.randn(n), torch.ones(n, dtype=torch.bool)
    mask = qsim_ops.fake_quantize_with_mask(x, *encoding())[1]
    return {
        "qsim": lambda: qsim_ops.fake_quantize_mask_backward(grad, mask),
        "clone": grad.clone,
        "torch core": lambda: aten.fake_quantize_per_tensor_affine_cachemask_backward(grad, bytes_),
    }


def backward_from_x(n: int) -> Calls:
    grad, x, grid = torch.randn(n), torch.randn(n), encoding()
    return {
        "qsim": lambda: qsim_ops.fake_quantize_backward(grad, x, *grid),
        "add": lambda: torch.add(grad, x),
        "torch.compile": lambda: peers.compiled(peers.gradient)(grad, x, *grid),
    }


def learned(n: int) -> Calls:
    grad, x, y, grid = torch.randn(n), torch.randn(n), torch.empty(n), encoding()
    core = torch.tensor([SCALE]), torch.tensor([2.0]), *GRID
    return {
        "qsim": lambda: qsim_ops.fake_quantize_learnable_backward(grad, x, *grid),
        "copy_": lambda: y.copy_(x),
        "torch core": lambda: aten._fake_quantize_learnable_per_tensor_affine_backward(grad, x, *core),
        "torch.compile": lambda: peers.compiled(peers.learned_gradients)(grad, x, *grid),
    }


def learned_per_channel(layout: torch.memory_format, n: int) -> Calls:
    grad, x, grid = image(n, layout), image(n, layout), encoding(64)
    y, core = torch.empty_like(x), (torch.full((64,), SCALE), torch.full((64,), 2.0))
    return {
        "qsim": lambda: qsim_ops.fake_quantize_learnable_backward(grad, x, *grid, axis=1),
        "copy_": lambda: y.copy_(x),
        "torch core": lambda: aten._fake_quantize_learnable_per_channel_affine_backward(grad, x, *core, 1, *GRID),
    }


def small(kind: str, n: int) -> Calls:
    x, grid = torch.randn(n, requires_grad=kind != "plain"), encoding()
    x = x * 1.0 if kind == "activation" else x
    return {
        "qsim": lambda: fake_quantize(x, *grid),
        "clone": x.clone,
        "torch core": lambda: torch.fake_quantize_per_tensor_affine(x, *grid),
        "torch.compile": lambda: peers.compiled(peers.quantized)(x, *grid),
    }


FORWARD, BACKWARD = "fake_quantize", "fake_quantize backward"
LAST, FIRST = torch.channels_last, torch.contiguous_format
IN_CACHE, TO_MEMORY = (2**20,), (2**20, 2**22, 2**25)
TWO_THREADS = {"parallel": True, "parallel_bars": {"copy_": 1.10}}

CASES = [
    Case(FORWARD, "reused output", SIZES, partial(reused, torch.float32), 8, bars={2**20: {"copy_": 1.12}}, **TWO_THREADS),
    Case(FORWARD, "fresh output", SIZES, partial(fresh, torch.float32), 8, bars={2**25: {"clone": 0.5}}, parallel=True),
    Case(FORWARD, "in place", SIZES, in_place, 8, bars={2**25: {"copy_": 0.65}}, parallel=True),
    Case(FORWARD, "channel axis 1", TO_MEMORY, partial(per_channel, FIRST), 8, bars={2**20: {"copy_": 1.2}}, **TWO_THREADS),
    Case(FORWARD, "channels_last", TO_MEMORY, partial(per_channel, LAST), 8, bars={2**20: {"copy_": 1.2}}, **TWO_THREADS),
    Case(FORWARD, "blocks of 32", TO_MEMORY, partial(blocks, 32), 8, bars={2**20: {"copy_": 1.2}}, **TWO_THREADS),
    *(Case(FORWARD, f"blocks of {size}", IN_CACHE, partial(blocks, size), 8) for size in (64, 128)),
    *(Case(FORWARD, f"channels_last, {count} channels", IN_CACHE, partial(channels, count, (32, 32), LAST), 8) for count in (3, 100)),
    Case(FORWARD, "channel axis 1, images of 7x7", IN_CACHE, partial(channels, 64, (7, 7), FIRST), 8),
    Case(
        FORWARD, "with 1-bit mask", TO_MEMORY, with_mask, 8.125, bars={2**20: {"copy_": 1.15}}, parallel=True, parallel_bars={"clone": 1.10}
    ),
    Case(FORWARD, "small, no gradient", (1024,), partial(small, "plain"), 8, bars={1024: {"torch core": 0.4, "clone": 1.3}}),
    Case(FORWARD, "small weight, with graph", (1024,), partial(small, "weight"), 8, bars={1024: {"clone": 1.5}}),
    Case(FORWARD, "small activation, with graph", (1024,), partial(small, "activation"), 8, bars={1024: {"clone": 1.5}}),
    *(
        Case(
            FORWARD,
            "reused output",
            TO_MEMORY,
            partial(reused, dtype),
            4,
            name,
            bars={2**20: {"mul": 1.0}, 2**25: {"copy_": 1.25}},
            parallel=True,
        )
        for name, dtype in [("bfloat16", torch.bfloat16), ("float16", torch.float16)]
    ),
    *(
        Case(FORWARD, "fresh output", IN_CACHE, partial(fresh, dtype), 4, name)
        for name, dtype in [("bfloat16", torch.bfloat16), ("float16", torch.float16)]
    ),
    Case(FORWARD, "reused output", IN_CACHE, partial(reused, torch.float64), 16, "float64"),
    Case(BACKWARD, "from bits", TO_MEMORY, backward_from_bits, 8.125, bars={2**20: {"clone": 1.1}}, parallel=True),
    Case(BACKWARD, "from x", TO_MEMORY, backward_from_x, 12, bars={2**20: {"add": 1.15}}, parallel=True),
    Case(BACKWARD, "learned scale", TO_MEMORY, learned, 12, bars={2**20: {"copy_": 1.75}}, parallel=True),
    Case(BACKWARD, "learned scales, axis 1", IN_CACHE, partial(learned_per_channel, FIRST), 12, bars={2**20: {"copy_": 1.85}}),
    Case(BACKWARD, "learned scales, channels_last", IN_CACHE, partial(learned_per_channel, LAST), 12, bars={2**20: {"copy_": 1.85}}),
]
