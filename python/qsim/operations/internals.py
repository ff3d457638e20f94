"""What is inside operations that engines compute with an accumulator: means, pools, normalizations, written out with their sums shown.

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

# Takes sums, a function that returns the mean magnitude of the terms of each (it broadcasts to the sums), and how many there were.
Total = Callable[[Tensor, Callable[[], Tensor], float], Tensor]
Inside = Callable[..., Any]


def inside(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Total], Any] | None:
    """A call written out, to be given a `total`; None if it has no sums of its own, or gives arguments that are not known here."""
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


def _sum(total: Total, x: Tensor, dim: Axes, keepdim: bool = True) -> tuple[Tensor, float]:
    """The sum over some axes (None or none: over all), and how many numbers it adds."""
    axes = tuple(range(x.dim())) if dim is None or dim == () else (dim,) if isinstance(dim, int) else tuple(dim)
    count = float(math.prod([x.shape[a] for a in axes]))
    added = x.sum(axes, keepdim=keepdim) if x.dim() else x
    return total(added, lambda: x.abs().mean(axes, keepdim=keepdim) if x.dim() else x.abs(), count), count


def _mean(total: Total, input: Tensor, dim: Axes = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    added, count = _sum(total, input if dtype is None else input.to(dtype), dim, keepdim)
    return added / count


def _summed(total: Total, input: Tensor, dim: Axes = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    return _sum(total, input if dtype is None else input.to(dtype), dim, keepdim)[0]


def _running(total: Total, input: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    x = input if dtype is None else input.to(dtype)
    terms = float(x.shape[dim]) if x.dim() else 1.0
    return total(x.cumsum(dim), lambda: x.abs().cumsum(dim) / torch.ones_like(x).cumsum(dim), terms)


def _moments(total: Total, x: Tensor, dim: Axes, correction: float = 0) -> tuple[Tensor, Tensor]:
    added, count = _sum(total, x, dim)
    mean = added / count
    squares, _ = _sum(total, (x - mean).square(), dim)
    return mean, squares / (count - correction)


def _normalized(total: Total, x: Tensor, dim: Axes, eps: float) -> Tensor:
    mean, variance = _moments(total, x, dim)
    return (x - mean) * (variance + eps).rsqrt()


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _per_channel(x: Tensor, parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.reshape(-1, *(1,) * (x.dim() - 2))


def _last(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(range(-len(shape), 0))


def _layer_norm(
    total: Total,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    return _affine(_normalized(total, input, _last(normalized_shape), eps), weight, bias)


def _rms_norm(total: Total, input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: Any = None) -> Tensor:
    squares, count = _sum(total, input.square(), _last(normalized_shape))
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    return _affine(input * (squares / count + eps).rsqrt(), weight, None)


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
    return _affine(_normalized(total, groups, -1, eps).reshape(input.shape), _per_channel(input, weight), _per_channel(input, bias))


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
        return _affine((input - running_mean.reshape(shape)) * (running_var.reshape(shape) + eps).rsqrt(), weight, bias)
    return _affine(_normalized(total, input, tuple(range(2, input.dim())), eps), weight, bias)


def _variance(
    total: Total,
    input: Tensor,
    dim: Axes | bool = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> Tensor:
    axes: Axes = dim
    if isinstance(dim, bool):  # var(x, unbiased)
        axes, unbiased = None, dim
    _, variance = _moments(total, input, axes, (1.0 if unbiased else 0.0) if correction is None else correction)
    if keepdim:
        return variance
    return variance.reshape(()) if axes is None else variance.squeeze(axes if isinstance(axes, int) else tuple(axes))


def _deviation(total: Total, *args: Any, **kwargs: Any) -> Tensor:
    return _variance(total, *args, **kwargs).sqrt()


def _norm(total: Total, input: Tensor, p: Any = 2, dim: Axes = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    x = input if dtype is None else input.to(dtype)
    power = 2.0 if p in (None, "fro") else float(p)
    if math.isinf(power):
        largest: Tensor = torch.linalg.vector_norm(x, power, dim, keepdim)
        return largest
    powers, _ = _sum(total, x.abs().pow(power), dim, keepdim)
    return powers.pow(1 / power)


def _normalize(total: Total, input: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12) -> Tensor:
    return input / _norm(total, input, p, dim, True).clamp_min(eps)


def _attention(
    total: Total,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if enable_gqa:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    factor = math.sqrt(1 / math.sqrt(query.shape[-1]) if scale is None else scale)  # of both, as the ONNX exporter divides it up
    width = float(query.shape[-1])
    scores = total((query * factor) @ (key * factor).transpose(-1, -2), lambda: _magnitude(query, key, factor) / width, width)
    if is_causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril(), -math.inf)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    weights = scores.softmax(-1).masked_fill((scores == -math.inf).all(-1, keepdim=True), 0.0)  # a row that is masked throughout is zero
    return weights @ value


def _magnitude(query: Tensor, key: Tensor, factor: float) -> Tensor:
    """The sum of the magnitudes of what is added up for each score."""
    return (query.abs() * factor) @ (key.abs() * factor).transpose(-1, -2)


def _logsumexp(total: Total, input: Tensor, dim: Axes, keepdim: bool = False) -> Tensor:
    return _sum(total, input.exp(), dim, keepdim)[0].log()  # the Neural Engine does not subtract the largest first: apple/coremltools#2690


def _pool(dims: int) -> Inside:
    pool: Callable[..., Tensor] = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[dims - 1]

    def written_out(total: Total, input: Tensor, kernel_size: int | Sequence[int], *args: Any, **kwargs: Any) -> Tensor:
        sides = (kernel_size,) * dims if isinstance(kernel_size, int) else tuple(kernel_size) * (dims // len(kernel_size))
        area = float(math.prod(sides))
        return total(pool(input, kernel_size, *args, **kwargs) * area, lambda: pool(input.abs(), kernel_size, *args, **kwargs), area) / area

    return written_out


def _adaptive_pool(dims: int) -> Inside:
    pool: Callable[..., Tensor] = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)[dims - 1]

    def written_out(total: Total, input: Tensor, output_size: int | Sequence[int | None]) -> Tensor:
        out = pool(input, output_size)
        area = math.prod(input.shape[-dims:]) / math.prod(out.shape[-dims:])  # of the windows on average: they may differ by one
        return total(out * area, lambda: pool(input.abs(), output_size), area) / area

    return written_out


def _stored(total: Total, x: Tensor) -> Tensor:
    """What an engine stores between two operations."""
    return total(x, x.abs, 1.0)


def _response_norm(total: Total, input: Tensor, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0) -> Tensor:
    squares = _stored(total, input.square()).flatten(2)
    beside = F.pad(squares, (0, 0, size // 2, (size - 1) // 2)).unsqueeze(1)
    means = _stored(total, F.avg_pool2d(beside, (size, 1), stride=1)).reshape(input.shape)
    return input / _stored(total, _stored(total, _stored(total, means * alpha) + k).pow(beta))


def _power_pool(dims: int) -> Inside:
    mean: Callable[..., Tensor] = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[dims - 1]
    largest: Callable[..., Tensor] = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[dims - 1]

    def written_out(
        total: Total, input: Tensor, norm_type: float, kernel_size: int | Sequence[int], stride: Any = None, ceil_mode: bool = False
    ) -> Tensor:
        if math.isinf(norm_type):
            sign = math.copysign(1.0, norm_type)
            return sign * largest(sign * input.abs(), kernel_size, stride, ceil_mode=ceil_mode)
        area = kernel_size**dims if isinstance(kernel_size, int) else math.prod(kernel_size)
        means = _stored(total, mean(_stored(total, input.pow(norm_type)), kernel_size, stride, ceil_mode=ceil_mode))
        means = means.sign() * F.relu(means.abs())  # its gradient at zero is zero
        return _stored(total, means * area).pow(1 / norm_type)

    return written_out


def _shrunk(total: Total, input: Tensor) -> Tensor:
    return input - _stored(total, input.tanh())


def _covariance(total: Total, input: Tensor, *, correction: float = 1) -> Tensor:
    rows = input.reshape(1, -1) if input.dim() < 2 else input
    apart = _stored(total, rows - _mean(total, rows, 1, True))
    terms = float(rows.shape[1])
    products = total(apart @ apart.T, lambda: apart.abs() @ apart.abs().T / terms, terms)
    return (products / max(terms - correction, 0)).reshape(() if input.dim() < 2 else products.shape)


def _correlation(total: Total, input: Tensor) -> Tensor:
    together = _stored(total, _covariance(total, input))
    if not together.dim():
        return together / together
    deviations = _stored(total, together.diagonal().sqrt())
    return (_stored(total, together / deviations[:, None]) / deviations).clamp(-1, 1)


# Operations of which engines store what is inside as a tensor, unless a kernel of theirs fits: whatever the accumulators are.
# But for attention they are several operations in every exported model.
STORED = frozenset(
    ["scaled_dot_product_attention", "local_response_norm", "lp_pool1d", "lp_pool2d", "lp_pool3d", "tanhshrink", "cov", "corrcoef"]
)

WRITTEN_OUT: dict[str, Inside] = {
    "scaled_dot_product_attention": _attention,
    "mean": _mean,
    "sum": _summed,
    "cumsum": _running,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "group_norm": _group_norm,
    "instance_norm": _instance_norm,
    "var": _variance,
    "std": _deviation,
    "norm": _norm,
    "linalg_norm": _norm,
    "linalg_vector_norm": _norm,
    "vector_norm": _norm,
    "normalize": _normalize,
    "logsumexp": _logsumexp,
    "local_response_norm": _response_norm,
    "tanhshrink": _shrunk,
    "cov": _covariance,
    "corrcoef": _correlation,
    **{f"lp_pool{dims}d": _power_pool(dims) for dims in (1, 2, 3)},
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
