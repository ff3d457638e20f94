"""What is inside operations: the sums that engines keep in an accumulator (means, pools, normalizations), and what `stored.py` has.

Each takes `total`, a function that every sum passes through before it is used. One that rounds to float16 gives what an engine with
float16 accumulators returns; one that looks gives the largest sum. With the identity the result is that of torch, to a few ulp.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qsim.numbers.blocks import Axes
from qsim.operations.functions import Function, name_of
from qsim.operations.stored import STORED
from qsim.operations.totals import Inside, Total, added_up, affine, averaged, last


def inside(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Total], Any] | None:
    """A call written out, to be given a `total`; None if it has nothing inside, or gives arguments that are not known here.

    It writes into no argument, whether the call does so or not.
    """
    return inside_of(name_of(func), args, kwargs)


def inside_of(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Total], Any] | None:
    """The same by the operation's name, as `name_of` gives it. Dynamo traces this."""
    written_out = WRITTEN_OUT.get(op)
    if written_out is None:
        return None
    given = {_AS_NUMPY.get(key, key): value for key, value in kwargs.items() if value is not None}  # torch itself passes out=None on
    if not _is_known(op, args, given):
        return None
    return lambda total: written_out(total, *args, **given)


_AS_NUMPY = {"axis": "dim", "keepdims": "keepdim", "ord": "p"}  # names that torch takes as well


def _is_known(op: str, args: tuple[Any, ...], given: dict[str, Any]) -> bool:
    """Whether it says how a call with these arguments is written out: of numbers that are no integers, over known arguments."""
    names = _PARAMETERS[op]
    x = args[0] if args else given.get("input")
    if not isinstance(x, Tensor) or not x.is_floating_point():  # how many of a mask are true, for one
        return False
    if names is not None and (len(args) > len(names) or any(key not in names for key in given)):
        return False
    if op == "interpolate":  # others look at a few numbers
        return "area" in (*args[3:4], given.get("mode"))
    return "p" not in (names or ()) or _is_known_norm(op, x, args, given)


def _is_known_norm(op: str, x: Tensor, args: tuple[Any, ...], given: dict[str, Any]) -> bool:
    """Whether a norm is a root of a sum of powers: not of singular values, of rows, or a count."""
    at = {name: args[i] for i, name in enumerate(_PARAMETERS[op] or ()) if i < len(args)} | given
    p, dim = at.get("p"), at.get("dim")
    if p in (None, "fro"):
        return True
    axes = x.dim() if dim is None else 1 if isinstance(dim, int) else len(dim)
    is_of_matrices = op == "linalg_norm" and axes == 2
    return isinstance(p, (int, float)) and p != 0 and not is_of_matrices


def _mean(total: Total, input: Tensor, dim: Axes = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    return averaged(total, input if dtype is None else input.to(dtype), dim, keepdim)


def _summed(total: Total, input: Tensor, dim: Axes = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    return added_up(total, input if dtype is None else input.to(dtype), dim, keepdim)[0]


def _running(total: Total, input: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    x = input if dtype is None else input.to(dtype)
    terms = float(x.shape[dim]) if x.dim() else 1.0
    return total(x.cumsum(dim), lambda: x.abs().cumsum(dim) / torch.ones_like(x).cumsum(dim), terms)


def _normalized(total: Total, x: Tensor, dim: Axes, eps: float) -> Tensor:
    apart = x - averaged(total, x, dim)
    return apart * (averaged(total, apart.square(), dim) + eps).rsqrt()


def _per_channel(x: Tensor, parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.reshape(-1, *(1,) * (x.dim() - 2))


def _layer_norm(
    total: Total,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    return affine(_normalized(total, input, last(normalized_shape), eps), weight, bias)


def _group_norm(
    total: Total,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    groups = input.reshape(input.shape[0], num_groups, -1)
    return affine(_normalized(total, groups, -1, eps).reshape(input.shape), _per_channel(input, weight), _per_channel(input, bias))


def _instance_norm(
    total: Total,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    weight, bias = _per_channel(input, weight), _per_channel(input, bias)
    if not use_input_stats and running_mean is not None and running_var is not None:
        shape = (-1, *(1,) * (input.dim() - 2))
        return affine((input - running_mean.reshape(shape)) * (running_var.reshape(shape) + eps).rsqrt(), weight, bias)
    return affine(_normalized(total, input, tuple(range(2, input.dim())), eps), weight, bias)


def _logsumexp(total: Total, input: Tensor, dim: Axes, keepdim: bool = False) -> Tensor:
    return added_up(total, input.exp(), dim, keepdim)[
        0
    ].log()  # the Neural Engine does not subtract the largest first: apple/coremltools#2690


def _pool(dims: int) -> Inside:
    pool: Callable[..., Tensor] = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[dims - 1]

    def written_out(total: Total, input: Tensor, kernel_size: int | Sequence[int], *args: Any, **kwargs: Any) -> Tensor:
        sides = (kernel_size,) * dims if isinstance(kernel_size, int) else tuple(kernel_size) * (dims // len(kernel_size))
        area = float(math.prod(sides))
        return total(pool(input, kernel_size, *args, **kwargs) * area, lambda: pool(input.abs(), kernel_size, *args, **kwargs), area) / area

    return written_out


def _of_windows(total: Total, pool: Callable[[Tensor], Tensor], input: Tensor, dims: int) -> Tensor:
    out = pool(input)
    area = math.prod(input.shape[-dims:]) / math.prod(out.shape[-dims:])  # of the windows on average: they may differ by one
    return total(out * area, lambda: pool(input.abs()), area) / area


def _adaptive_pool(dims: int) -> Inside:
    pool: Callable[..., Tensor] = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)[dims - 1]

    def written_out(total: Total, input: Tensor, output_size: int | Sequence[int | None]) -> Tensor:
        return _of_windows(total, lambda x: pool(x, output_size), input, dims)

    return written_out


def _area(total: Total, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return _of_windows(total, lambda x: F.interpolate(x, *args, **kwargs), input, input.dim() - 2)


def _softmax(total: Total, input: Tensor, dim: int, dtype: Any = None, *, _stacklevel: int = 3) -> Tensor:
    powers, added = _exponentials(total, input, dim, dtype)
    return powers / added


def _log_softmax(total: Total, input: Tensor, dim: int, dtype: Any = None, *, _stacklevel: int = 3) -> Tensor:
    powers, added = _exponentials(total, input, dim, dtype)
    return powers.log() - added.log()


def _exponentials(total: Total, input: Tensor, dim: int, dtype: Any) -> tuple[Tensor, Tensor]:
    """Exponentials below the largest, and their sums. A few make up most of such a sum: each counts by its own size in their mean."""
    x = input.to(dtype) if isinstance(dtype, torch.dtype) else input
    powers = (x - x.amax(dim, keepdim=True)).exp()
    added = powers.sum(dim, keepdim=True)
    return powers, total(added, lambda: powers.square().sum(dim, keepdim=True) / added, float(x.shape[dim]) if x.dim() else 1.0)


def _of_numbers(total: Total, input: Tensor, dim: Axes, keepdim: bool, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """Sums of what is not NaN, and how many these are."""
    x = input if dtype is None else input.to(dtype)
    there = ~x.isnan()
    count, _ = added_up(lambda added, mean, count: added, there.to(x.dtype), dim, keepdim)
    return added_up(total, x.where(there, 0.0), dim, keepdim)[0], count


def _mean_of_numbers(total: Total, input: Tensor, dim: Axes = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    added, count = _of_numbers(total, input, dim, keepdim, dtype)
    return added / count


def _sum_of_numbers(total: Total, input: Tensor, dim: Axes = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    return _of_numbers(total, input, dim, keepdim, dtype)[0]


def _trapezoid(total: Total, y: Tensor, x: Tensor | None = None, *, dx: float = 1.0, dim: int = -1) -> Tensor:
    size = y.shape[dim] - 1
    pairs = (y.narrow(dim, 0, size) + y.narrow(dim, 1, size)) / 2
    if x is None:
        return added_up(total, pairs * dx, dim, False)[0]
    widths = x.diff().reshape(-1, *(1,) * (-1 - dim if dim < 0 else y.dim() - 1 - dim)) if x.dim() == 1 else x.diff(dim=dim)
    return added_up(total, pairs * widths, dim, False)[0]


WRITTEN_OUT: dict[str, Inside] = {
    **STORED,
    "mean": _mean,
    "sum": _summed,
    "cumsum": _running,
    "layer_norm": _layer_norm,
    "group_norm": _group_norm,
    "instance_norm": _instance_norm,
    "logsumexp": _logsumexp,
    "softmax": _softmax,
    "log_softmax": _log_softmax,
    "nanmean": _mean_of_numbers,
    "nansum": _sum_of_numbers,
    "interpolate": _area,
    **dict.fromkeys(["trapezoid", "trapz"], _trapezoid),
    **{f"avg_pool{dims}d": _pool(dims) for dims in (1, 2, 3)},
    **{f"adaptive_avg_pool{dims}d": _adaptive_pool(dims) for dims in (1, 2, 3)},
}

# Their parameters behind `total`, by name and in order; None where any are taken.
_PARAMETERS: dict[str, tuple[str, ...] | None] = {
    op: None if written_out.__code__.co_flags & inspect.CO_VARKEYWORDS else tuple(inspect.signature(written_out).parameters)[1:]
    for op, written_out in WRITTEN_OUT.items()
}


def partial_sums(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], chunks: int = 8) -> Tensor | None:
    """Largest magnitude of what a matrix product or convolution has summed up on its way, after each part of the channels it sums over.

    None where `func` is none of them, or adds few channels. As long as the products have one sign that is the result itself; where they
    cancel it may be far more.
    """
    name = name_of(func)
    if any(isinstance(value, Tensor) and not value.numel() for value in args):
        return None
    if name in ("linear", "conv1d", "conv2d", "conv3d"):
        x, weight = (args[i] if len(args) > i else kwargs[key] for i, key in enumerate(("input", "weight")))
        axis, groups = (-1, 1) if name == "linear" else (1, args[6] if len(args) > 6 else kwargs.get("groups", 1))
        if groups != 1 or (x.dim() < weight.dim() and name != "linear"):
            return None
        options = {} if name == "linear" else _options(args, kwargs)
        parts = zip(x.chunk(chunks, axis), weight.chunk(chunks, 1), strict=True)
        products = (func(part, w, None, **options) for part, w in parts)
    elif name in ("matmul", "bmm", "mm"):
        a, b = (*args, *kwargs.values())[:2]
        if min(a.dim(), b.dim()) < 2:
            return None
        products = (torch.matmul(part, w) for part, w in zip(a.chunk(chunks, -1), b.chunk(chunks, -2), strict=True))
    else:
        return None
    added: Tensor | None = None
    largest: Tensor | None = None
    for product in products:
        added = product if added is None else added.add_(product)
        here = added.abs().amax()
        largest = here if largest is None else torch.maximum(largest, here)
    return largest


def _options(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Stride, padding and dilation of a convolution."""
    return dict(zip(("stride", "padding", "dilation"), args[3:6], strict=False)) | {
        key: kwargs[key] for key in ("stride", "padding", "dilation") if key in kwargs
    }
