"""Blocks along several axes, brought to what the operators know: blocks along one.

A tile of 128 x 128 is 128 blocks of 128 that share a scale: parameters are repeated for each of them, ranges joined.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

Axes = int | Sequence[int] | None
_ONE = int | None  # made once: it costs as much as the question


def is_tiled(axis: Axes, block_size: Axes) -> bool:
    """Whether blocks lie along a sequence of axes, which the operators do not know."""
    return not isinstance(axis, _ONE) or not isinstance(block_size, _ONE)


def block_lengths(dims: int, axis: Axes, block_size: Axes) -> dict[int, int]:
    """Length of a block by axis (not negative, ascending) of a tensor with so many dimensions.

    Raises
    ------
    ValueError, IndexError
        Not one block size for each axis, an axis twice, a size below 1, or an axis that the tensor lacks.
    TypeError
        What is no integer.
    """
    axes, sizes = _listed("axis", axis), _listed("block_size", block_size)
    if len(axes) != len(sizes) or not axes:
        raise ValueError(f"qsim: got axis={axis!r} and block_size={block_size!r}; expected one block size for each axis")
    if not all(-dims <= a < dims for a in axes):
        raise IndexError(f"qsim: got axis={axis!r} for a tensor with {dims} dimensions; expected {-dims} .. {dims - 1}")
    lengths = {a % dims: size for a, size in zip(axes, sizes, strict=True)}
    if len(lengths) < len(axes) or min(sizes) < 1:
        raise ValueError(f"qsim: got axis={axis!r} and block_size={block_size!r}; expected different axes and sizes of at least 1")
    return dict(sorted(lengths.items()))


def _listed(name: str, value: Axes) -> list[int]:
    found = [] if value is None else [value] if isinstance(value, int) else value
    if not isinstance(found, Sequence) or not all(isinstance(number, int) for number in found):
        raise TypeError(f"qsim: got {name}={value!r}; expected an integer, a sequence of integers, or None")
    return list(found)


def ranges_shape(shape: Sequence[int], lengths: dict[int, int]) -> tuple[int, ...]:
    """Shape of one value per block: `shape` with ``ceil(n / length)`` along each axis of `lengths`."""
    return tuple(-(-n // lengths.get(i, 1)) for i, n in enumerate(shape))


def along_one_axis(x: Tensor, axis: Axes, block_size: Axes, *parameters: Tensor) -> tuple[int | None, int | None, tuple[Tensor, ...]]:
    """Axis, block size and parameters with which an operator sees blocks along the last of several axes."""
    if isinstance(axis, _ONE) and isinstance(block_size, _ONE):
        return axis, block_size, parameters
    lengths = block_lengths(x.dim(), axis, block_size)
    expected = ranges_shape(x.shape, lengths)
    for values in parameters:
        if values.shape != expected:
            raise ValueError(
                f"qsim: scale or zero_point has shape {tuple(values.shape)}; expected {expected}, one per block of "
                f"{tuple(lengths.values())} along axes {tuple(lengths)} of x with shape {tuple(x.shape)}"
            )
    *others, (last, size) = lengths.items()
    for a, repeats in others:
        repeats = min(repeats, max(x.shape[a], 1))
        parameters = tuple(values.repeat_interleave(repeats, a).narrow(a, 0, x.shape[a]) for values in parameters)
    return last, size, parameters


def join_blocks(values: Tensor, axis: int, size: int, largest: bool) -> Tensor:
    """Minimum or maximum of every `size` values along `axis`; the last block may be short."""
    count, shape = -(-values.shape[axis] // size), list(values.shape)
    shape[axis] = count * size - values.shape[axis]
    padding = values.new_full(shape, -torch.inf if largest else torch.inf)
    blocks = torch.cat([values, padding], axis).reshape(*values.shape[:axis], count, size, *values.shape[axis + 1 :])
    return blocks.amax(axis + 1) if largest else blocks.amin(axis + 1)


def tiles(x: Tensor, lengths: dict[int, int]) -> Tensor:
    """One row per tile, in the order of their scales; those that reach beyond `x` are filled up with NaN."""
    counts = ranges_shape(x.shape, lengths)
    block = [lengths.get(i, 1) for i in range(x.dim())]
    missing = [count * size - n for count, size, n in zip(counts, block, x.shape, strict=True)]
    padded = torch.nn.functional.pad(x, [end for n in reversed(missing) for end in (0, n)], value=torch.nan)
    split = padded.reshape([n for pair in zip(counts, block, strict=True) for n in pair])
    order = [*range(0, 2 * x.dim(), 2), *range(1, 2 * x.dim(), 2)]
    return split.permute(order).reshape(prod(counts), prod(block))
