from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from qsim.numbers.blocks import Axes, block_lengths, is_tiled, ranges_shape, tiles

_T = TypeVar("_T", int, Axes)


def search_range(
    lowest: Tensor,
    highest: Tensor,
    sketch: Tensor,
    quant_min: int,
    quant_max: int,
    symmetric: bool = False,
    method: str = "tf_enhanced",
    *,
    percentile: float = 99.99,
    gamma: float = 3.0,
    low_bits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose the range that a grid should cover, from what an observer saw.

    Parameters
    ----------
    lowest, highest : Tensor, [] or [T], float32
        Exact smallest and largest finite value seen; ``+Inf`` and ``-Inf`` when none was.
    sketch : Tensor, [16384] or [T, 16384], int64
        How many finite values fell into each bin; the bin of ``x`` is ``float32_bits(x) >> 18``.
    quant_min, quant_max : int
        Smallest and largest integer of the grid.
    symmetric : bool
        The zero point is fixed in the middle of the grid.
    method : str
        ``"minmax"``
            The observed range.
        ``"percentile"``
            Drops equal shares, ``(100 - percentile) / 2`` percent of the values each, at the bottom and at the top.
        ``"mse"``
            The candidate whose encoding has the least squared error.
        ``"tf_enhanced"``
            The same with the error of values that round off the grid weighted by `gamma`.
        ``"entropy"``
            The threshold on magnitudes whose clipped histogram (2048 bins), reduced to the grid's levels (128 at 8 bits),
            diverges least from the original; each end of the range is clipped at it. Exact zeros are left out. Grids with
            2048 levels or more take the observed range.
    percentile : float
        Percent of the values that ``"percentile"`` keeps, in ``(0, 100]``.
    gamma : float
        Weight of values that round off the grid in ``"tf_enhanced"``.
    low_bits : Tensor, shape of `lowest`, int32, optional
        OR of ``float32_bits(x) & 0x3ffff``, as `observe_` keeps it: ``"mse"`` and ``"tf_enhanced"`` then know the lattice that
        values lie on which were bfloat16 or of fewer bits still. None: nothing is known.

    Returns
    -------
    min, max : Tensor, shape of `lowest`, float32
        `choose_qparams` turns them into exactly the encoding that was judged. ``(+Inf, -Inf)`` where nothing was seen.

    Examples
    --------
    >>> x = torch.randn(100000, generator=torch.Generator().manual_seed(0))
    >>> sketch = torch.bincount((x.view(torch.int32) >> 18) & 16383, minlength=16384)
    >>> low, high = search_range(x.min(), x.max(), sketch, -8, 7, symmetric=True)
    >>> bool(high < x.max())  # 4 bits: rounding matters more than a few saturated values
    True

    Notes
    -----
    Candidates as AIMET's TF-enhanced analyzer has them: scales in 1/100 (symmetric) or 1/16 (asymmetric, with 20 offsets and
    the observed one) of the scale that covers the observed range, one step beyond it included; the first of equals wins. The
    mass of a bin counts as spread evenly over it, one value as sitting at each exact end; with `low_bits` it sits on the values
    that have no other bits, where they are not much closer than steps. Data that are all multiples of a power of two (integers)
    are recognised by the bins that stay empty, and their mass sits on the multiples; where such data fit the grid, the encoding
    that represents them exactly is a candidate too.
    Entropy: Migacz, "8-bit Inference with TensorRT", GTC 2017. No gradient, no host synchronisation, the same bits on every
    instruction-set level.
    """
    low, high = torch.ops.qsim.search_range(
        lowest,
        highest,
        sketch,
        quant_min,
        quant_max,
        symmetric=symmetric,
        method=method,
        percentile=percentile,
        gamma=gamma,
        low_bits=low_bits,
    )
    return low, high


def search_range_data(
    x: Tensor,
    quant_min: int,
    quant_max: int,
    *,
    axis: Axes = None,
    block_size: Axes = None,
    symmetric: bool = False,
    method: str = "tf_enhanced",
    percentile: float = 99.99,
    gamma: float = 3.0,
) -> tuple[Tensor, Tensor]:
    """Choose the range that a grid should cover, from the values themselves: for weights.

    Parameters
    ----------
    x : Tensor, any shape, float16, bfloat16, float32 or float64
        Values; those that are not finite are skipped.
    quant_min, quant_max, symmetric, method, gamma
        As in `search_range`.
    axis : int or sequence of int, optional
        One range per index along this axis; without it one for the whole tensor.
    block_size : int or sequence of int, optional
        One range per block of this many values along `axis` (the last may be short). With a sequence of axes and of block sizes
        one per tile.
    percentile : float
        As in `search_range`; linear between the two values around the rank, as `torch.quantile`.

    Returns
    -------
    min, max : Tensor, float64 for float64 `x`, otherwise float32
        Shape ``[]``, ``[x.shape[axis]]``, or that of `x` with ``ceil(n / block_size)`` along `axis`, or along each of its axes.
        ``(+Inf, -Inf)`` where no value is finite.

    Examples
    --------
    >>> weight = torch.randn(64, 576)
    >>> low, high = search_range_data(weight, -127, 127, axis=0, symmetric=True)
    >>> low.shape
    torch.Size([64])

    Notes
    -----
    The candidates of `search_range`, each judged by quantizing the values. No gradient.
    """
    if is_tiled(axis, block_size):
        lengths = block_lengths(x.dim(), axis, block_size)
        low, high = search_range_data(
            tiles(x, lengths), quant_min, quant_max, axis=0, symmetric=symmetric, method=method, percentile=percentile, gamma=gamma
        )
        shape = ranges_shape(x.shape, lengths)
        return low.reshape(shape), high.reshape(shape)
    low, high = torch.ops.qsim.search_range_data(
        x,
        quant_min,
        quant_max,
        axis=axis,
        block_size=block_size,
        symmetric=symmetric,
        method=method,
        percentile=percentile,
        gamma=gamma,
    )
    return low, high


def search_range_weights(
    weights: Sequence[Tensor],
    quant_min: int | Sequence[int],
    quant_max: int | Sequence[int],
    *,
    axis: int | Sequence[Axes] | None = None,
    block_size: int | Sequence[Axes] | None = None,
    symmetric: bool | Sequence[bool] = False,
    method: str = "tf_enhanced",
    percentile: float = 99.99,
    gamma: float = 3.0,
) -> tuple[list[Tensor], list[Tensor]]:
    """`search_range_data` of many tensors at once: for all weights of a model.

    Threads share the values of all tensors, however small; on CUDA one launch searches up to 56 tensors of a dtype. The results
    are those of one call a tensor, bit for bit.

    Parameters
    ----------
    weights : sequence of Tensor, any shapes, float16, bfloat16, float32 or float64 (mixed), one device
    quant_min, quant_max, axis, block_size, symmetric
        As in `search_range_data`: one for all weights, or a sequence with one for each. The axes of tiles stand in such a sequence.
    method, percentile, gamma
        As in `search_range_data`, for all weights.

    Returns
    -------
    min, max : list of Tensor
        One per weight, as `search_range_data` returns them.

    Examples
    --------
    >>> weights = [torch.randn(16, 3, 3, 3), torch.randn(3, 64, 64)]
    >>> low, high = search_range_weights(weights, [-128, -8], [127, 7], axis=[0, 2], block_size=[None, 32], symmetric=True)
    >>> [tuple(x.shape) for x in low]
    [(16,), (3, 64, 2)]

    Notes
    -----
    No gradient.
    """
    if not weights:
        return [], []

    def for_each(option: _T | Sequence[_T]) -> Sequence[_T]:
        return option if isinstance(option, Sequence) else [option] * len(weights)

    rows, axes, sizes = list(weights), list(for_each(axis)), list(for_each(block_size))
    shapes = {}
    for i, weight in enumerate(weights):
        if is_tiled(axes[i], sizes[i]):
            lengths = block_lengths(weight.dim(), axes[i], sizes[i])
            rows[i], axes[i], sizes[i] = tiles(weight, lengths), 0, None
            shapes[i] = ranges_shape(weight.shape, lengths)
    low, high = torch.ops.qsim.search_range_weights(
        rows,
        for_each(quant_min),
        for_each(quant_max),
        symmetric=for_each(symmetric),
        axis=axes,
        block_size=sizes,
        method=method,
        percentile=percentile,
        gamma=gamma,
    )
    for i, shape in shapes.items():
        low[i], high[i] = low[i].reshape(shape), high[i].reshape(shape)
    return low, high
