"""Two integers of 4 bits in a byte."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def pack_int4(q: Tensor) -> Tensor:
    """Twin of `qsim.ops.pack_int4`.

    Examples
    --------
    >>> pack_int4(torch.tensor([1, -1], dtype=torch.int8)).tolist()
    [241]
    """
    halves = q.reshape(-1).view(torch.uint8) & 15
    halves = torch.nn.functional.pad(halves, (0, halves.numel() % 2))
    return halves[0::2] | halves[1::2] << 4


def unpack_int4(packed: Tensor, shape: Sequence[int], *, dtype: torch.dtype | None = None) -> Tensor:
    """Twin of `qsim.ops.unpack_int4`.

    Examples
    --------
    >>> unpack_int4(torch.tensor([241], dtype=torch.uint8), (2,)).tolist()
    [1, -1]
    """
    halves = torch.stack([packed & 15, packed >> 4], -1).reshape(-1)[: torch.Size(shape).numel()].reshape(shape)
    if dtype == torch.uint8:
        return halves
    signed = halves.to(torch.int8)
    return torch.where(signed > 7, signed - 16, signed)
