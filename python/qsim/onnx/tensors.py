"""Tensors of ONNX from PyTorch's, with the types that one of them lacks."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir
import torch
from torch import Tensor

from qsim import ops


@dataclass(frozen=True)
class OnnxType:
    """A type that tensors are stored in.

    Attributes
    ----------
    type : DataType
    since : int
        The first opset whose QuantizeLinear, DequantizeLinear or Cast takes it; 19 where that is older.
    bits : torch.dtype, optional
        Of what NumPy does not know: what its bits are taken as.
    """

    type: ir.DataType
    since: int = 19
    bits: torch.dtype | None = None


# By the names that an Encoding has for them.
ONNX_TYPES = {
    "int4": OnnxType(ir.DataType.INT4, since=21),
    "uint4": OnnxType(ir.DataType.UINT4, since=21),
    "int8": OnnxType(ir.DataType.INT8),
    "uint8": OnnxType(ir.DataType.UINT8),
    "int16": OnnxType(ir.DataType.INT16, since=21),
    "uint16": OnnxType(ir.DataType.UINT16, since=21),
    "int32": OnnxType(ir.DataType.INT32),
    "float16": OnnxType(ir.DataType.FLOAT16),
    "bfloat16": OnnxType(ir.DataType.BFLOAT16, bits=torch.int16),
    "float32": OnnxType(ir.DataType.FLOAT),
    "float8_e4m3fn": OnnxType(ir.DataType.FLOAT8E4M3FN, bits=torch.uint8),
    "float8_e5m2": OnnxType(ir.DataType.FLOAT8E5M2, bits=torch.uint8),
}


def stored(name: str, values: Tensor, dtype: str) -> ir.TensorProtocol:
    """`values` as a tensor of ONNX. 4-bit integers come one in a byte and are packed two in a byte; other types are cast."""
    values, kind, bits = values.detach().cpu(), ONNX_TYPES[dtype].type, ONNX_TYPES[dtype].bits
    if dtype in ("int4", "uint4"):
        packed = ops.pack_int4(values.to(getattr(torch, f"{dtype[:-1]}8")))
        return ir.PackedTensor(packed.numpy(), kind, shape=ir.Shape(values.shape), name=name)
    values = values.to(getattr(torch, dtype)).contiguous()
    numbers = values.numpy() if bits is None else values.view(bits).numpy().view(kind.numpy())
    return ir.Tensor(numbers, dtype=kind, name=name)
