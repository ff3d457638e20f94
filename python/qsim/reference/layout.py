"""Which elements of a tensor share a scale: all, a channel, a block, a tile."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor
from torch.nn.functional import pad

from qsim.numbers.blocks import Axes


def per_element(values: Tensor, x: Tensor, axis: Axes, block_size: Axes) -> Tensor:
    """`values`, one per tensor, channel or block, in a shape that broadcasts against `x`."""
    if axis is None:
        return values.reshape(())
    if block_size is None:
        assert isinstance(axis, int)
        return values.reshape([-1 if i == axis % x.dim() else 1 for i in range(x.dim())])
    for a, size in _sizes(axis, block_size).items():
        values = values.repeat_interleave(size, a).narrow(a, 0, x.shape[a])
    return values


def blocks_of(x: Tensor, axis: Axes, block_size: Axes) -> tuple[list[Tensor], torch.Size]:
    """What shares a range, one flat tensor each, and the shape of the ranges."""
    if axis is None:
        return [x.flatten()], torch.Size()
    if block_size is None:
        assert isinstance(axis, int)
        return [channel.flatten() for channel in x.unbind(axis)], torch.Size([x.shape[axis]])
    sizes = {a % x.dim(): size for a, size in _sizes(axis, block_size).items()}
    cuts = [[slice(begin, begin + sizes.get(i, 1)) for begin in range(0, n, sizes.get(i, 1))] for i, n in enumerate(x.shape)]
    return [x[where].flatten() for where in product(*cuts)], torch.Size([len(slices) for slices in cuts])


def least(x: Tensor, axis: Axes, block_size: Axes) -> Tensor:
    """The least of the values that share a range."""
    if axis is None:
        return x.amin()
    if block_size is None:
        assert isinstance(axis, int)
        return x.movedim(axis, 0).reshape(x.shape[axis], -1).amin(1)
    for a, size in _sizes(axis, block_size).items():
        x = pad(x.movedim(a, -1), (0, -x.shape[a] % size), value=torch.inf)
        x = x.reshape(*x.shape[:-1], -1, size).amin(-1).movedim(-1, a)
    return x


def _sizes(axis: Axes, block_size: Axes) -> dict[int, int]:
    axes, sizes = ([value] if isinstance(value, int) else list(value or ()) for value in (axis, block_size))
    return dict(zip(axes, sizes, strict=True))
