from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from qsim._library import eager
from qsim.numbers.blocks import Axes, block_lengths, join_blocks, ranges_shape


def observe_range_(x: Tensor, lowest: Tensor, highest: Tensor, counts: Tensor, axis: Axes = None, *, block_size: Axes = None) -> None:
    """Extend the exact range of the finite elements seen so far, and count the others.

    The state is changed in place, without host synchronisation. It does not depend on the order of calls, on how the data is
    cut into batches, nor on the number of threads: states of disjoint data merge by minimum, maximum and sum.

    Parameters
    ----------
    x : Tensor, any shape, float32, float16, bfloat16 or float64
        Elements are taken as float32: a float64 element beyond float32 counts as infinite. May be empty. Read without a copy
        when it is dense, in any order of axes (with `block_size`: contiguous).
    lowest, highest : Tensor, float32
        Ends of the range. Shape ``()``: one range for the tensor. Shape ``(C,)`` with `axis`: one for each of the ``C``
        positions along it. With `block_size`: the shape of `x` with ``ceil(n / block_size)`` along `axis`. Start them at +inf
        and -inf: "nothing seen". An end at zero is stored as +0.0.
    counts : Tensor, shape (4,), int64
        Elements, NaNs, +infs, -infs of the whole tensor. Start at zero.
    axis : int or sequence of int, optional
        The axis whose positions (or blocks) have ranges of their own.
    block_size : int or sequence of int, optional
        Elements in a block along `axis`; the last block may be shorter. With a sequence of axes and of block sizes every tile has
        a range: `lowest` then has ``ceil(n / block_size)`` along each of them.

    Examples
    --------
    >>> lowest, highest = torch.full((2,), torch.inf), torch.full((2,), -torch.inf)
    >>> counts = torch.zeros(4, dtype=torch.int64)
    >>> observe_range_(torch.tensor([[1.0, 2.0], [torch.nan, 3.0]]), lowest, highest, counts, axis=0)
    >>> lowest.tolist(), highest.tolist(), counts.tolist()
    ([1.0, 3.0], [2.0, 3.0], [4, 1, 0, 0])

    Notes
    -----
    One read of `x`. No gradient. The version counters of the state are bumped.
    """
    observe = torch.ops.qsim.observe_range_ if is_dynamo_compiling() else eager.observe_range_
    if isinstance(axis, int | None) and isinstance(block_size, int | None):
        observe(x, lowest, highest, counts, axis, block_size=block_size)
        return
    lengths = block_lengths(x.dim(), axis, block_size)
    expected = ranges_shape(x.shape, lengths)
    if lowest.shape != expected or highest.shape != expected:
        raise ValueError(
            f"qsim: lowest has shape {tuple(lowest.shape)} and highest {tuple(highest.shape)}; expected {expected}, one per tile"
        )
    *others, (last, size) = lengths.items()
    shape = ranges_shape(x.shape, {last: size})
    low, high = lowest.new_full(shape, torch.inf), highest.new_full(shape, -torch.inf)
    observe(x, low, high, counts, axis=last, block_size=size)
    for a, length in others:
        low, high = join_blocks(low, a, length, largest=False), join_blocks(high, a, length, largest=True)
    lowest.copy_(torch.minimum(lowest, low))
    highest.copy_(torch.maximum(highest, high))


def observe_(x: Tensor, lowest: Tensor, highest: Tensor, counts: Tensor, sketch: Tensor, low_bits: Tensor) -> None:
    """Extend range and counts as `observe_range_` does for a whole tensor, and the sketch, in the same pass.

    The sketch is a histogram whose bins are the leading 14 bits of a float32 (sign, exponent, 5 bits of mantissa): it needs no
    range in advance and never has to grow, so every range estimator can be run on it afterwards (`search_range`).

    Parameters
    ----------
    x : Tensor, any shape, float32, float16, bfloat16 or float64
        As for `observe_range_`.
    lowest, highest : Tensor, shape (), float32
        Ends of the range; start at +inf and -inf.
    counts : Tensor, shape (4,), int64
        Elements, NaNs, +infs, -infs; start at zero.
    sketch : Tensor, shape (16384,), int64
        Bin ``bits >> 18`` counts the finite elements with those leading bits; both zeros are in bin 0, negative numbers from
        bin 8192 on. NaNs and infinities are in no bin. Starts at zero.
    low_bits : Tensor, shape (), int32
        OR of ``bits & 0x3ffff``, what the bins leave out, over the finite elements: which lattice the values lie on. Starts at
        zero, which it stays for values with 5 mantissa bits; of bfloat16 values it has two bits, of float16 values five.

    Examples
    --------
    >>> lowest, highest = torch.tensor(torch.inf), torch.tensor(-torch.inf)
    >>> counts, sketch = torch.zeros(4, dtype=torch.int64), torch.zeros(16384, dtype=torch.int64)
    >>> low_bits = torch.zeros((), dtype=torch.int32)
    >>> observe_(torch.tensor([-0.0, 1.0, 1.01, torch.inf]), lowest, highest, counts, sketch, low_bits)
    >>> sketch.nonzero().flatten().tolist(), sketch[sketch > 0].tolist()
    ([0, 4064], [1, 2])

    Notes
    -----
    A histogram with logarithmic bins of bounded relative width merges exactly: Masson et al. 2019, "DDSketch", section 2;
    here the logarithm is the float's own exponent. No gradient.
    """
    observe = torch.ops.qsim.observe_ if is_dynamo_compiling() else eager.observe_
    observe(x, lowest, highest, counts, sketch, low_bits)
