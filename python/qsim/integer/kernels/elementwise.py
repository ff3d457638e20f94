"""QLinearAdd and QLinearMul."""

from __future__ import annotations

import torch
from torch import Tensor

from qsim.integer.kernels.fma import fma
from qsim.integer.kernels.quantized import QuantizedTensor, saturated
from qsim.numbers.encoding import Encoding

_PAIRS = 1 << 16  # of integers of eight bits


def add(a: QuantizedTensor, b: QuantizedTensor, y: Encoding) -> QuantizedTensor:
    """QLinearAdd of operands that broadcast.

    With ``r = s / s_y`` in float32: ``clip(rint(fma(a, r_a, fma(b, r_b, z_y - fma(r_a, z_a, r_b * z_b)))))``, so the zero point is
    added before rounding. Where the last axis of `a` is repeated, `a` and `b` change places. CPUs without FMA round in between, ARM
    computes in fixed point: they differ at ties and next to them.
    """
    if _is_repeated(a.integers, b.integers):
        a, b = b, a
    if max(a.integers.numel(), b.integers.numel()) <= _PAIRS:
        return _added(a, b, y)
    every = [torch.arange(q.encoding.quant_min, q.encoding.quant_max + 1, device=q.integers.device) for q in (a, b)]
    sums = _added(QuantizedTensor(every[0][:, None], a.encoding), QuantizedTensor(every[1], b.encoding), y).integers
    first, second = (q.integers.int() - q.encoding.quant_min for q in (a, b))
    pairs = first * sums.shape[1] + second
    return QuantizedTensor(sums.flatten().index_select(0, pairs.flatten()).view(pairs.shape), y)


def _added(a: QuantizedTensor, b: QuantizedTensor, y: Encoding) -> QuantizedTensor:
    ratio_a, ratio_b = (q.encoding.scale.float() / y.scale.float() for q in (a, b))
    zero_a, zero_b = (q.encoding.zero_point.float() for q in (a, b))
    fixed = y.zero_point.float() - fma(ratio_a, zero_a, ratio_b * zero_b)
    return saturated(fma(a.integers.float(), ratio_a, fma(b.integers.float(), ratio_b, fixed)).round_(), y)


def mul(a: QuantizedTensor, b: QuantizedTensor, y: Encoding) -> QuantizedTensor:
    """QLinearMul of operands that broadcast: ``clip(rint((a - z_a) * (b - z_b) * (s_a * s_b / s_y) + z_y))``, each step in float32."""
    ratio = a.encoding.scale.float() * b.encoding.scale.float() / y.scale.float()
    return saturated((a.centered * b.centered).mul_(ratio).add_(y.zero_point.float()).round_(), y)


def _is_repeated(a: Tensor, b: Tensor) -> bool:
    """Whether `a` has one element along the last axis along which either has more."""
    for i in range(1, max(a.dim(), b.dim()) + 1):
        own, other = (t.shape[-i] if i <= t.dim() else 1 for t in (a, b))
        if own != 1 or other != 1:
            return own == 1
    return True
