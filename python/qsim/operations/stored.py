"""Operations that are one call of torch, and several in every exported model: what these store between them is rounded where the format is.

A file in half precision has ``Sigmoid`` and ``Log`` for `F.logsigmoid`, squares for a variance or `F.rms_norm`: what would be in range
at the end need not be so there. Written down from what `torch.onnx` makes of each before opset 23; Core ML's converter does likewise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qsim.numbers.blocks import Axes
from qsim.operations.totals import Inside, Total, added_up, affine, averaged, last, multiplied, root, stored


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
    scores = multiplied(total, query * factor, (key * factor).transpose(-1, -2))
    if is_causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril(), -math.inf)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    weights = scores.softmax(-1).masked_fill((scores == -math.inf).all(-1, keepdim=True), 0.0)  # a row that is masked throughout is zero
    return weights @ value


def _response_norm(total: Total, input: Tensor, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0) -> Tensor:
    squares = stored(total, input.square()).flatten(2)
    beside = F.pad(squares, (0, 0, size // 2, (size - 1) // 2)).unsqueeze(1)
    means = stored(total, F.avg_pool2d(beside, (size, 1), stride=1)).reshape(input.shape)
    return input / stored(total, stored(total, stored(total, means * alpha) + k).pow(beta))


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
        means = stored(total, mean(stored(total, input.pow(norm_type)), kernel_size, stride, ceil_mode=ceil_mode))
        means = means.sign() * F.relu(means.abs())  # its gradient at zero is zero
        return stored(total, means * area).pow(1 / norm_type)

    return written_out


def _shrunk(total: Total, input: Tensor) -> Tensor:
    return input - stored(total, input.tanh())


def _covariance(total: Total, input: Tensor, *, correction: float = 1) -> Tensor:
    rows = input.reshape(1, -1) if input.dim() < 2 else input
    apart = stored(total, rows - stored(total, averaged(total, rows, 1)))
    products = multiplied(total, apart, apart.T)
    return (products / max(float(rows.shape[1]) - correction, 0)).reshape(() if input.dim() < 2 else products.shape)


def _correlation(total: Total, input: Tensor) -> Tensor:
    together = stored(total, _covariance(total, input))
    if not together.dim():
        return together / together
    deviations = stored(total, together.diagonal().sqrt())
    return (stored(total, together / deviations[:, None]) / deviations).clamp(-1, 1)


def _norm(total: Total, input: Tensor, p: Any = 2, dim: Axes = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    x = input if dtype is None else input.to(dtype)
    power = 2.0 if p in (None, "fro") else float(p)
    if math.isinf(power):
        largest: Tensor = torch.linalg.vector_norm(x, power, dim, keepdim)
        return largest
    powers = x.abs().pow(power)
    if power in (1.0, 2.0):  # one operation in files
        return root(added_up(total, powers, dim, keepdim)[0], 1 / power)
    return root(stored(total, added_up(total, stored(total, powers), dim, keepdim)[0]), 1 / power)


def _normalize(total: Total, input: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12) -> Tensor:
    return input / stored(total, stored(total, _norm(total, input, p, dim, True)).clamp_min(eps))


def _rms_norm(total: Total, input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: Any = None) -> Tensor:
    means = stored(total, averaged(total, stored(total, input.square()), last(normalized_shape)))
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    size = stored(total, stored(total, means + eps).sqrt())
    normalized = input * stored(total, size.reciprocal())
    return normalized if weight is None else affine(stored(total, normalized), weight, None)


def _moments(
    total: Total,
    input: Tensor,
    dim: Axes | bool = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Variance and mean."""
    axes: Axes = dim
    if isinstance(dim, bool):  # var(x, unbiased)
        axes, unbiased = None, dim
    missing = (1.0 if unbiased else 0.0) if correction is None else float(correction)
    mean = stored(total, averaged(total, input, axes))
    added, count = added_up(total, stored(total, stored(total, input - mean).square()), axes)
    variance = added / count
    if missing:
        variance = stored(total, stored(total, variance) * count) / (count - missing)
    if keepdim:
        return variance, mean
    axis = axes if isinstance(axes, int) else tuple(axes or range(input.dim()))
    return variance.squeeze(axis), mean.squeeze(axis)


def _variance(total: Total, *args: Any, **kwargs: Any) -> Tensor:
    return _moments(total, *args, **kwargs)[0]


def _deviation(total: Total, *args: Any, **kwargs: Any) -> Tensor:
    return root(stored(total, _moments(total, *args, **kwargs)[0]))


def _deviation_and_mean(total: Total, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    variance, mean = _moments(total, *args, **kwargs)
    return root(stored(total, variance)), mean


def _log_sigmoid(total: Total, input: Tensor) -> Tensor:
    return stored(total, input.sigmoid()).log()


def _log_of_sum(exponential: Callable[[Tensor], Tensor], logarithm: Callable[[Tensor], Tensor]) -> Inside:
    def written_out(total: Total, input: Tensor, other: Tensor) -> Tensor:
        return logarithm(stored(total, stored(total, exponential(input)) + stored(total, exponential(other))))

    return written_out


def _exponential_less_one(total: Total, input: Tensor) -> Tensor:
    return stored(total, input.exp()) - 1


def _logarithm_of_one_more(total: Total, input: Tensor) -> Tensor:
    return stored(total, input + 1).log()


def _complementary_error(total: Total, input: Tensor) -> Tensor:
    return 1 - stored(total, input.erf())


def _logit(total: Total, input: Tensor, eps: float | None = None) -> Tensor:
    x = input if eps is None else stored(total, input.clamp(eps, 1 - eps))
    return stored(total, x / stored(total, 1 - x)).log()


def _sinc(total: Total, input: Tensor) -> Tensor:
    angle = stored(total, input * math.pi)
    return torch.where(angle == 0, 1.0, stored(total, angle.sin()) / angle.where(angle != 0, 1.0))


def _remainder(total: Total, input: Any, other: Any) -> Any:
    return input - stored(total, stored(total, input / other).floor() * other)


def _remainder_by(total: Total, other: Tensor, input: Any) -> Any:
    return _remainder(total, input, other)  # ``2.0 % t``


def _cosine(total: Total, x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    directions = [stored(total, _normalize(total, x, 2.0, dim, eps)) for x in (x1, x2)]
    return added_up(total, stored(total, directions[0] * directions[1]), dim, False)[0]


def _cross(total: Total, input: Tensor, other: Tensor, dim: int | None = None) -> Tensor:
    shape = torch.broadcast_shapes(input.shape, other.shape)  # type: ignore[no-untyped-call]
    a, b = input.expand(shape), other.expand(shape)
    axis = next(i for i, size in enumerate(a.shape) if size == 3) if dim is None else dim
    ahead, behind = (stored(total, a.roll(-i, axis) * b.roll(i, axis)) for i in (1, -1))
    return ahead - behind


def _linalg_cross(total: Total, input: Tensor, other: Tensor, *, dim: int = -1) -> Tensor:
    return _cross(total, input, other, dim)


def _times_logarithm_of_one_more(total: Total, input: Tensor, other: Tensor) -> Tensor:
    products = torch.where(input == 0, 0.0, input * stored(total, _logarithm_of_one_more(total, other)))
    return products.where(~other.isnan(), math.nan)


def _normal_distribution(total: Total, input: Tensor) -> Tensor:
    return stored(total, 1 + stored(total, stored(total, input * math.sqrt(0.5)).erf())) / 2


def _scaled_complementary_error(total: Total, input: Tensor) -> Tensor:
    return stored(total, stored(total, input.square()).exp()) * stored(total, _complementary_error(total, input))


def _log_of_normal_distribution(total: Total, input: Tensor) -> Tensor:
    t = stored(total, input * math.sqrt(0.5))
    small = stored(total, stored(total, stored(total, _scaled_complementary_error(total, -t)) / 2).log()) - stored(total, t.square())
    others = _logarithm_of_one_more(total, stored(total, -stored(total, _complementary_error(total, t)) / 2))
    return torch.where(input < 1, small, others)


def _product_and_sum(total: Total, input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return _scaled(total, input, beta) + _scaled(total, multiplied(total, batch1, batch2), alpha)


def _multiplied_and_added(total: Total, input: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: float = 1) -> Tensor:
    return input + stored(total, _scaled(total, tensor1, value) * tensor2)


def _divided_and_added(total: Total, input: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: float = 1) -> Tensor:
    return input + _scaled(total, stored(total, tensor1 / tensor2), value)


def _scaled(total: Total, x: Tensor, factor: float) -> Tensor:
    return x if factor == 1 else stored(total, x * factor)


_OF_ONE: dict[str, Inside] = {  # which torch.special has too
    "expm1": _exponential_less_one,
    "log1p": _logarithm_of_one_more,
    "erfc": _complementary_error,
    "logit": _logit,
    "sinc": _sinc,
}

STORED: dict[str, Inside] = {
    "scaled_dot_product_attention": _attention,  # one kernel, where one fits
    "local_response_norm": _response_norm,
    "rms_norm": _rms_norm,
    "normalize": _normalize,
    **dict.fromkeys(["norm", "vector_norm", "linalg_norm", "linalg_vector_norm"], _norm),
    "var": _variance,
    "std": _deviation,
    "var_mean": _moments,
    "std_mean": _deviation_and_mean,
    "cov": _covariance,
    "corrcoef": _correlation,
    "tanhshrink": _shrunk,
    "log_sigmoid": _log_sigmoid,
    "logaddexp": _log_of_sum(torch.exp, torch.log),
    "logaddexp2": _log_of_sum(torch.exp2, torch.log2),
    "baddbmm": _product_and_sum,
    "remainder": _remainder,
    "rmod": _remainder_by,
    "cosine_similarity": _cosine,
    "cross": _cross,
    "linalg_cross": _linalg_cross,
    "special_xlog1py": _times_logarithm_of_one_more,
    "special_ndtr": _normal_distribution,
    "special_erfcx": _scaled_complementary_error,
    "special_log_ndtr": _log_of_normal_distribution,
    "addcmul": _multiplied_and_added,
    "addcdiv": _divided_and_added,
    **{f"lp_pool{dims}d": _power_pool(dims) for dims in (1, 2, 3)},
    **_OF_ONE,
    **{f"special_{name}": written_out for name, written_out in _OF_ONE.items()},
}

# Those whose inside torch computes in float32 where it is given half precision, in files too.
WIDENED = frozenset(["rms_norm"])
