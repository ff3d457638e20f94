"""Numbers of a few bits, one behind the other, in little-endian 32-bit words: a number may begin in one word and end in the next.

At 2, 4 and 8 bits a word holds whole numbers; at 3 bits 32 numbers fill three words, which is how auto-gptq lays them out.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 32


def pack(numbers: Tensor, bits: int) -> Tensor:
    """Numbers of `bits` bits as words, along the last axis.

    Parameters
    ----------
    numbers : Tensor, shape ``[rows, columns]``, an integer type
        Within ``0 .. 2**bits - 1``. The last word of a row is filled up with zeros.
    bits : int, 1 to 16

    Returns
    -------
    Tensor, int32, shape ``[rows, ceil(columns * bits / 32)]``
    """
    rows, columns = numbers.shape
    padded = torch.nn.functional.pad(numbers.to(torch.int64), (0, -columns % _WORD)).reshape(rows, -1, _WORD)
    words = padded.new_zeros(rows, padded.shape[1], bits + 1)
    for i in range(_WORD):
        word, offset = divmod(i * bits, _WORD)
        words[..., word] |= padded[..., i] << offset
        words[..., word + 1] |= padded[..., i] >> (_WORD - offset)
    low = words[..., :bits] & 0xFFFFFFFF
    signed = torch.where(low >= 1 << (_WORD - 1), low - (1 << _WORD), low)
    return signed.to(torch.int32).reshape(rows, -1)[:, : -(-columns * bits // _WORD)].contiguous()


def unpack(words: Tensor, bits: int, columns: int) -> Tensor:
    """The numbers that `pack` packed.

    Parameters
    ----------
    words : Tensor, int32, shape ``[rows, ceil(columns * bits / 32)]``
    bits : int, 1 to 8
    columns : int

    Returns
    -------
    Tensor, uint8, shape ``[rows, columns]``
    """
    rows = words.shape[0]
    padded = torch.nn.functional.pad(words, (0, -words.shape[1] % bits)).reshape(rows, -1, bits).to(torch.int64) & 0xFFFFFFFF
    padded = torch.nn.functional.pad(padded, (0, 1))
    found = torch.empty(rows, padded.shape[1], _WORD, dtype=torch.uint8, device=words.device)
    for i in range(_WORD):
        word, offset = divmod(i * bits, _WORD)
        found[..., i] = ((padded[..., word] >> offset) | (padded[..., word + 1] << (_WORD - offset))) & ((1 << bits) - 1)
    return found.reshape(rows, -1)[:, :columns].contiguous()
