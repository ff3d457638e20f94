"""Formats whose elements share a scale of few bits by the block: those of the OCP Microscaling specification, NVFP4, LPBQ, k-quants."""

from __future__ import annotations

from typing import Any

SCALE_FORMATS = ("float8_e8m0fnu", "float8_e4m3fn", "int")
SCALE_ROUNDINGS = ("floor", "ceil", "even", "rceil")


def _mx(dtype: str, bits: int) -> dict[str, Any]:
    return {"dtype": dtype, "bits": bits, "block_size": 32, "scale_format": "float8_e8m0fnu"}


def _two_levels(bits: int, block_size: int, levels: int, super_block: int | None) -> dict[str, Any]:
    layout = {"block_size": block_size, "scale_format": "int", "scale_levels": levels, "super_block": super_block}
    return {"dtype": "int", "bits": bits, "signed": True, "symmetric": True, **layout}


# What the names mean, as fields of TensorSpec. OCP Microscaling Formats (MX) Specification v1.0, table 1; NVFP4: NVIDIA 2025,
# "Pretraining Large Language Models with NVFP4", section 2; LPBQ: AIMET's "Encoding Format Specification", 4 bits that expand to 8;
# Q4_K and Q6_K: github.com/ggml-org/ggml, src/ggml-common.h, of which Q4_K has minima too, here those of a symmetric grid.
BLOCK_FORMATS: dict[str, dict[str, Any]] = {
    "mxfp8": _mx("float8_e4m3fn", 8),
    "mxfp8_e5m2": _mx("float8_e5m2", 8),
    "mxfp6_e3m2": _mx("float6_e3m2fn", 6),
    "mxfp6_e2m3": _mx("float6_e2m3fn", 6),
    "mxfp4": _mx("float4_e2m1fn", 4),
    "mxint8": {**_mx("int", 8), "signed": True, "narrow": True},
    "nvfp4": {"dtype": "float4_e2m1fn", "bits": 4, "block_size": 16, "scale_format": "float8_e4m3fn"},
    "lpbq": _two_levels(4, 64, 16, None),
    "q4_k": _two_levels(4, 32, 63, 256),
    "q6_k": _two_levels(6, 16, 127, 256),
}
