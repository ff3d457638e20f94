"""Scales from the tensor itself: per token, and block formats. 2**24 elements are 4096 tokens of 4096 features."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from case import Calls, Case

from qsim.ops import fake_quantize_dynamic, round_to_format_dynamic


def tokens(dtype: torch.dtype, n: int) -> torch.Tensor:
    return torch.randn(n // 4096, 4096).to(dtype)


def integers(dtype: torch.dtype, axis: int | None, symmetric: bool, n: int) -> Calls:
    x = tokens(dtype, n)
    return {"qsim": lambda: fake_quantize_dynamic(x, -128, 127, axis=axis, symmetric=symmetric), "clone": x.clone}


def formats(dtype: torch.dtype, format: str, options: dict[str, Any], n: int) -> Calls:
    x = tokens(dtype, n)
    return {"qsim": lambda: round_to_format_dynamic(x, format, axis=-1, **options), "clone": x.clone}


DYNAMIC = "dynamic"
SIZES, F32, BF16 = (2**20, 2**24), torch.float32, torch.bfloat16
BAR = {2**24: {"clone": 1.6}}
MXFP4 = {"block_size": 32, "scale_format": "float8_e8m0fnu"}
NVFP4 = {"block_size": 16, "scale_format": "float8_e4m3fn"}

CASES = [
    Case(DYNAMIC, "int8 per token", SIZES, partial(integers, F32, -1, True), 8, bars=BAR, parallel=True),
    Case(DYNAMIC, "int8 per token, asymmetric", SIZES, partial(integers, F32, -1, False), 8, bars=BAR),
    Case(DYNAMIC, "int8 per tensor", SIZES, partial(integers, F32, None, True), 8),
    Case(DYNAMIC, "float8_e4m3fn per token", SIZES, partial(formats, F32, "float8_e4m3fn", {}), 8, bars=BAR),
    Case(DYNAMIC, "mxfp4", SIZES, partial(formats, F32, "float4_e2m1fn", MXFP4), 8),
    Case(DYNAMIC, "nvfp4", SIZES, partial(formats, F32, "float4_e2m1fn", NVFP4), 8),
    Case(DYNAMIC, "int8 per token", SIZES, partial(integers, BF16, -1, True), 4, "bfloat16", bars=BAR, parallel=True),
    Case(DYNAMIC, "float8_e4m3fn per token", SIZES, partial(formats, BF16, "float8_e4m3fn", {}), 4, "bfloat16", bars=BAR),
    Case(DYNAMIC, "mxfp4", SIZES, partial(formats, BF16, "float4_e2m1fn", MXFP4), 4, "bfloat16"),
    Case(DYNAMIC, "nvfp4", SIZES, partial(formats, BF16, "float4_e2m1fn", NVFP4), 4, "bfloat16"),
]
