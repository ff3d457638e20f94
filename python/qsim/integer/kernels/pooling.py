"""QLinearAveragePool and QLinearGlobalAveragePool. (MaxPool only moves values.)"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from qsim.integer.kernels.quantized import QuantizedTensor, saturated
from qsim.numbers.encoding import Encoding


def global_average_pool(x: QuantizedTensor, y: Encoding) -> QuantizedTensor:
    """QLinearGlobalAveragePool: the mean over all axes but two, which stay as axes of length 1.

    ``clip(rint(float32(sum(x - z_x)) * (s_x / (s_y * n))) + z_y)`` for n elements.
    """
    axes = list(range(2, x.integers.dim()))
    n = prod(x.integers.shape[2:])
    total = x.centered.double().sum(axes, keepdim=True)
    return saturated((total.float() * (x.encoding.scale.float() / (y.scale.float() * float(n)))).round() + y.zero_point, y)


def average_pool(
    x: QuantizedTensor,
    y: Encoding,
    *,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool = False,
    count_padding: bool = True,
) -> QuantizedTensor:
    """QLinearAveragePool over one to three axes.

    Adds the dequantized elements of a window in float32 one after the other, the last axis fastest; then
    ``clip(rint(mean / s_y + z_y))``. A window that covers all of `x` is a global one. A window that reaches over the end, as `ceil_mode`
    makes them, is cut there; with `count_padding` it counts as whole.
    """
    if list(x.integers.shape[2:]) == list(kernel) and not any(padding):
        return global_average_pool(x, y)
    values = x.dequantized()
    results = [_windows(*axis, ceil_mode) for axis in zip(values.shape[2:], kernel, stride, padding, strict=True)]
    ends = [max(0, (r - 1) * s + k - p - n) for r, s, k, p, n in zip(results, stride, kernel, padding, values.shape[2:], strict=True)]
    around = [n for before, after in reversed(list(zip(padding, ends, strict=True))) for n in (before, after)]
    total = _window_sums(torch.nn.functional.pad(values, around), kernel, stride, results)
    if count_padding:
        count = torch.tensor(float(prod(kernel)), device=values.device)
    else:
        inside = torch.nn.functional.pad(torch.ones_like(values[:1, :1]), around)
        count = _window_sums(inside, kernel, stride, results)
    return saturated((total / count / y.scale.float() + y.zero_point.float()).round(), y)


def _windows(n: int, kernel: int, stride: int, padding: int, ceil_mode: bool) -> int:
    """How many windows an axis of length `n` has: none begins beyond its end."""
    count = (n + 2 * padding - kernel + (stride - 1 if ceil_mode else 0)) // stride + 1
    return count - 1 if ceil_mode and (count - 1) * stride >= n + padding else count


def _window_sums(padded: Tensor, kernel: Sequence[int], stride: Sequence[int], results: Sequence[int]) -> Tensor:
    total: Tensor | None = None
    for offset in itertools.product(*(range(k) for k in kernel)):
        slices = [slice(None), slice(None)] + [slice(o, o + s * (r - 1) + 1, s) for o, s, r in zip(offset, stride, results, strict=True)]
        window = padded[tuple(slices)]
        total = window if total is None else total + window
    assert total is not None
    return total
