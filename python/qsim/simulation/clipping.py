"""How much of a tensor a quantizer clips: how many values round to a number beyond the end of its grid."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qsim.numbers.encoding import Encoding
from qsim.numbers.float_format import FLOAT_FORMATS
from qsim.numbers.spec import TensorSpec
from qsim.quantizers.quantizer import Quantizer
from qsim.quantizers.sketch import Distribution


def clipped_share_of(weight: Tensor, quantizer: Quantizer) -> float | None:
    """Share of the finite elements of a tensor that are clipped: exact, whatever the format and the granularity."""
    clipped, finite, _ = clipped_counts(weight, quantizer).tolist()
    return clipped / finite if finite else None


def clipped_counts(x: Tensor, quantizer: Quantizer) -> Tensor:
    """How many elements of a tensor are clipped, finite, and NaN or Inf: int64 [3], left on its device.

    Clipped are those whose gradient the straight-through estimator stops (docs/numerics.md, sections 1 and 7).
    """
    leaf = x.detach().requires_grad_()
    was, quantizer.enabled = quantizer.enabled, True
    try:
        with torch.enable_grad():
            quantized = quantizer.quantize(leaf)
            (passed,) = torch.autograd.grad(quantized, leaf, torch.ones_like(quantized))
    finally:
        quantizer.enabled = was
    finite = leaf.detach().isfinite()
    count = finite.sum()
    return torch.stack([((passed == 0) & finite).sum(), count, finite.numel() - count])


def clipped_share_seen(quantizer: Quantizer, encoding: Encoding, distribution: Distribution | None) -> float | None:
    """Share of the finite values observed that are clipped.

    Exactly 0 where the grid holds all that was observed. Else counted in the sketch, whose two bins that the ends of the grid cut are
    taken as evenly filled: each is at most 1/32 of its value wide. None where there is no sketch (a range per channel, ``"ema"``).
    """
    if (counts := quantizer.format_counts) is not None:
        finite = counts.elements - counts.nans - counts.infs
        return counts.overflows / finite if finite else None
    margin = _half_step(quantizer.spec) * encoding.scale.double()  # what rounds to the last number is not clipped
    low, high = encoding.min.double() - margin, encoding.max.double() + margin
    if quantizer.counts.elements == quantizer.counts.nonfinite:
        return None
    if bool(((quantizer.min >= low) & (quantizer.max <= high)).all()):
        return 0.0
    if distribution is None:
        return None
    return distribution.outside(low.item(), high.item()) / (quantizer.counts.elements - quantizer.counts.nonfinite)


def _half_step(spec: TensorSpec) -> float:
    """Half the distance between the largest numbers of the grid, as a multiple of the scale."""
    if not spec.is_float:
        return 0.5
    of = FLOAT_FORMATS[spec.dtype]
    return 0.5 * of.eps * 2.0 ** math.floor(math.log2(of.largest))
