from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def pack_int4(q: Tensor) -> Tensor:
    """Two 4-bit integers to a byte, as ONNX stores INT4 and UINT4: in row-major order, the first in the low half.

    Parameters
    ----------
    q : Tensor, any shape and strides, int8 or uint8
        Integers within -8 .. 7 or 0 .. 15. Others are not detected (that would wait for the device): their low four bits count.

    Returns
    -------
    Tensor, shape ``[ceil(q.numel() / 2)]``, uint8
        The bytes of an ONNX tensor's ``raw_data``. An odd count leaves the last high half 0. With an even last dimension a row
        fills whole bytes: ``pack_int4(weight).view(O, I // 2)``.

    Examples
    --------
    >>> packed = pack_int4(torch.tensor([[1, -1], [7, -8]], dtype=torch.int8))
    >>> [hex(byte) for byte in packed]
    ['0xf1', '0x87']

    Notes
    -----
    Source: ONNX, "4 bit integer types" (docs/docsgen/source/technical/int4.md of onnx/onnx).
    """
    packed: Tensor = torch.ops.qsim.pack_int4(q)
    return packed


def unpack_int4(packed: Tensor, shape: Sequence[int], *, dtype: torch.dtype | None = None) -> Tensor:
    """The integers that `pack_int4` packed.

    Parameters
    ----------
    packed : Tensor, uint8
        ``ceil(n / 2)`` bytes for the n integers of `shape`, in any shape of its own.
    shape : sequence of int
        Of the result: the shape of what was packed.
    dtype : torch.int8 or torch.uint8, optional
        int8 (the default) reads signed integers, -8 .. 7; uint8 unsigned ones, 0 .. 15.

    Returns
    -------
    Tensor, shape `shape`, `dtype`

    Examples
    --------
    >>> packed = torch.tensor([0xF1, 0x87], dtype=torch.uint8)
    >>> unpack_int4(packed, (2, 2)).tolist(), unpack_int4(packed, (3,), dtype=torch.uint8).tolist()
    ([[1, -1], [7, -8]], [1, 15, 7])
    """
    q: Tensor = torch.ops.qsim.unpack_int4(packed, shape, dtype=dtype)
    return q
