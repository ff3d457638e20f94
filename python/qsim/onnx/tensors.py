"""Tensors of ONNX from PyTorch's, with the types that one of them lacks."""

from __future__ import annotations

import onnx_ir as ir
import torch
from torch import Tensor

from qsim import ops

# By the names that an Encoding has for them.
ONNX_TYPES = {
    "int4": ir.DataType.INT4,
    "uint4": ir.DataType.UINT4,
    "int8": ir.DataType.INT8,
    "uint8": ir.DataType.UINT8,
    "int16": ir.DataType.INT16,
    "uint16": ir.DataType.UINT16,
    "int32": ir.DataType.INT32,
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
    "float32": ir.DataType.FLOAT,
    "float8_e4m3fn": ir.DataType.FLOAT8E4M3FN,
    "float8_e5m2": ir.DataType.FLOAT8E5M2,
}
_RAW = {"bfloat16": torch.int16, "float8_e4m3fn": torch.uint8, "float8_e5m2": torch.uint8}  # NumPy knows none of these: their bits


def stored(name: str, values: Tensor, dtype: str) -> ir.TensorProtocol:
    """`values` as a tensor of ONNX. 4-bit integers come one in a byte and are packed two in a byte; other types are cast."""
    values, kind = values.detach().cpu(), ONNX_TYPES[dtype]
    if dtype in ("int4", "uint4"):
        packed = ops.pack_int4(values.to(getattr(torch, f"{dtype[:-1]}8")))
        return ir.PackedTensor(packed.numpy(), kind, shape=ir.Shape(values.shape), name=name)
    values = values.to(getattr(torch, dtype)).contiguous()
    numbers = values.view(_RAW[dtype]).numpy().view(kind.numpy()) if dtype in _RAW else values.numpy()
    return ir.Tensor(numbers, dtype=kind, name=name)
