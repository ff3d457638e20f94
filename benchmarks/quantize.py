"""quantize, dequantize and 4-bit packing."""

from __future__ import annotations

import warnings
from functools import partial

import torch
from case import Calls, Case
from torch import Tensor

from qsim.ops import dequantize, pack_int4, quantize, unpack_int4

warnings.filterwarnings("ignore", message=".*quantized tensor creation functions")  # torch core's own, on every first call

GRID = (-128, 127)
SCALE, ZERO_POINT = 0.031, 2


def encoding(*shape: int) -> tuple[Tensor, Tensor]:
    return torch.full(shape, SCALE), torch.full(shape, ZERO_POINT, dtype=torch.int32)


def image(n: int, layout: torch.memory_format) -> Tensor:
    return torch.randn(max(1, n // 65536), 64, 32, 32).contiguous(memory_format=layout)


def stored(dtype: torch.dtype, bits: int, n: int) -> Calls:
    x, y, grid = torch.randn(n).to(dtype), torch.empty(n, dtype=dtype), (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    calls: Calls = {"qsim": lambda: quantize(x, *encoding(), *grid), "copy_": lambda: y.copy_(x)}
    if dtype == torch.float32 and bits == 8:
        calls["torch core"] = lambda: torch.quantize_per_tensor(x, SCALE, ZERO_POINT, torch.qint8)
    return calls


def stored_per_channel(layout: torch.memory_format, n: int) -> Calls:
    x, grid = image(n, layout), encoding(64)
    y, core = torch.empty_like(x), (grid[0].double(), grid[1].long())
    return {
        "qsim": lambda: quantize(x, *grid, *GRID, axis=1),
        "copy_": lambda: y.copy_(x),
        "torch core": lambda: torch.quantize_per_channel(x, *core, 1, torch.qint8),
    }


def stored_in_blocks(n: int) -> Calls:
    x = torch.randn(n // 1024, 1024)
    y, grid = torch.empty_like(x), encoding(len(x), 32)
    return {"qsim": lambda: quantize(x, *grid, *GRID, axis=1, block_size=32), "copy_": lambda: y.copy_(x)}


def read(dtype: torch.dtype, n: int) -> Calls:
    x, y, grid = torch.randn(n), torch.empty(n, dtype=dtype), encoding()
    q, other = quantize(x, *grid, *GRID), torch.empty(n, dtype=dtype)
    calls: Calls = {"qsim": lambda: dequantize(q, *grid, dtype=dtype), "copy_": lambda: y.copy_(other)}
    if dtype == torch.float32:
        calls["torch core"] = torch.quantize_per_tensor(x, SCALE, ZERO_POINT, torch.qint8).dequantize
    return calls


def packed(n: int) -> Calls:
    q, copy = torch.randint(-8, 8, (n,), dtype=torch.int8), torch.empty(n, dtype=torch.int8)
    return {
        "qsim": lambda: pack_int4(q),
        "copy_": lambda: copy.copy_(q),
        "torch formula": lambda: q[0::2] & 15 | q[1::2] << 4,
    }


def unpacked(n: int) -> Calls:
    q, copy = torch.randint(-8, 8, (n,), dtype=torch.int8), torch.empty(n, dtype=torch.int8)
    halves = pack_int4(q)
    return {
        "qsim": lambda: unpack_int4(halves, (n,)),
        "copy_": lambda: copy.copy_(q),
        "torch formula": lambda: torch.stack((halves << 4 >> 4, halves.view(torch.int8) >> 4), dim=-1),
    }


QUANTIZE, DEQUANTIZE, INT4 = "quantize", "dequantize", "int4"
IN_CACHE, TO_MEMORY = (2**20,), (2**20, 2**25)
HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}

CASES = [
    Case(QUANTIZE, "int8", TO_MEMORY, partial(stored, torch.float32, 8), 5, parallel=True),
    Case(QUANTIZE, "int16", IN_CACHE, partial(stored, torch.float32, 16), 6),
    Case(QUANTIZE, "int8, axis 1", IN_CACHE, partial(stored_per_channel, torch.contiguous_format), 5),
    Case(QUANTIZE, "int8, channels_last", IN_CACHE, partial(stored_per_channel, torch.channels_last), 5),
    Case(QUANTIZE, "int8, blocks of 32", IN_CACHE, stored_in_blocks, 5),
    *(Case(QUANTIZE, "int8", IN_CACHE, partial(stored, dtype, 8), 3, name) for name, dtype in HALVES.items()),
    Case(DEQUANTIZE, "int8", TO_MEMORY, partial(read, torch.float32), 5, parallel=True),
    *(Case(DEQUANTIZE, "int8", IN_CACHE, partial(read, dtype), 3, name) for name, dtype in HALVES.items()),
    Case(INT4, "pack", TO_MEMORY, packed, 1.5, "int8"),
    Case(INT4, "unpack", TO_MEMORY, unpacked, 1.5, "int8"),
]
