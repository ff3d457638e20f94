"""Sums of two products of uint8 and int8, which x86 CPUs without VNNI keep in 16 bits, saturating (``vpmaddubsw``)."""

from __future__ import annotations

import torch
from torch import Tensor

INT16_MAX = torch.iinfo(torch.int16).max
_LARGEST = 255  # of an activation


def largest_pair(weight: Tensor, channels: int | None) -> int:
    """The largest magnitude that two products of one sum can add up to, whatever the activations, and whichever two a kernel pairs.

    Activations are 0 or more, so that only products with weights of one sign add up: 255 times the two largest of them.

    Parameters
    ----------
    weight : Tensor, int8
    channels : int or None
        The axis of the output channels: products of different channels are in different sums. None where it is not known.

    Examples
    --------
    >>> largest_pair(torch.tensor([[100, -90, 20], [-64, -64, 127]], dtype=torch.int8), 0) // 255
    128
    """
    rows = weight.reshape(1, -1) if channels is None else weight.movedim(channels, 0).flatten(1)
    if rows.numel() == 0:
        return 0
    both = torch.stack([rows.int(), -rows.int()]).clamp_min(0)
    return _LARGEST * int(both.topk(min(2, rows.shape[1]), -1).values.sum(-1).max())
