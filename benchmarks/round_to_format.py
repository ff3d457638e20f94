"""Rounding to float formats, plain and counted."""

from __future__ import annotations

from functools import partial

import torch
from case import Calls, Case
from torch import Tensor

from qsim.ops import count_format_, round_to_format, round_to_format_counted


def tensors(dtype: torch.dtype, n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n).to(dtype), torch.empty(n, dtype=dtype)


def there_and_back(x: Tensor, format: str) -> Tensor:
    """What users write in torch: the same numbers where nothing overflows."""
    return x.to(getattr(torch, format)).to(x.dtype)


def plain(format: str, dtype: torch.dtype, n: int) -> Calls:
    x, y = tensors(dtype, n)
    return {"qsim": lambda: round_to_format(x, format, out=y), "copy_": lambda: y.copy_(x)}


def fresh(format: str, dtype: torch.dtype, n: int) -> Calls:
    x, _ = tensors(dtype, n)
    return {"qsim": lambda: round_to_format(x, format), "clone": x.clone, "cast there and back": lambda: there_and_back(x, format)}


def counted(format: str, dtype: torch.dtype, squares: bool, n: int) -> Calls:
    x, _ = tensors(dtype, n)
    counts, sums = torch.zeros(6, dtype=torch.int64), torch.zeros(2, dtype=torch.float64) if squares else None
    return {
        "qsim": lambda: round_to_format_counted(x, format, counts, sums),
        "clone": x.clone,
        "cast there and back": lambda: there_and_back(x, format),
    }


def counted_alone(format: str, n: int) -> Calls:
    x, counts = torch.randn(n), torch.zeros(6, dtype=torch.int64)
    return {"qsim": lambda: count_format_(x, format, counts), "aminmax": lambda: torch.aminmax(x)}


FORMAT = "round_to_format"
FORMATS = ("float16", "bfloat16", "float8_e4m3fn")
IN_CACHE, TO_MEMORY = (2**20,), (2**20, 2**25)
F32, BF16 = torch.float32, torch.bfloat16

CASES = [
    *(Case(FORMAT, f"{format}, reused output", IN_CACHE, partial(plain, format, F32), 8) for format in FORMATS),
    *(Case(FORMAT, f"{format}, fresh output", TO_MEMORY, partial(fresh, format, F32), 8, parallel=True) for format in FORMATS),
    *(Case(FORMAT, f"{format}, counted", TO_MEMORY, partial(counted, format, F32, False), 8, parallel=True) for format in FORMATS),
    Case(FORMAT, "float16, counted and summed", IN_CACHE, partial(counted, "float16", F32, True), 8),
    Case(FORMAT, "float16, counts alone", IN_CACHE, partial(counted_alone, "float16"), 4),
    Case(FORMAT, "float8_e4m3fn, reused output", IN_CACHE, partial(plain, "float8_e4m3fn", BF16), 4, "bfloat16"),
    Case(FORMAT, "float8_e4m3fn, counted", IN_CACHE, partial(counted, "float8_e4m3fn", BF16, False), 4, "bfloat16"),
]
