from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from qsim._library import eager


def clip_grad_(grads: Sequence[Tensor], max_norm: float, *, norm_type: float = 2.0, nonfinite: str = "skip") -> tuple[Tensor, Tensor]:
    """Scale gradients in place so that their joint norm is at most `max_norm`, letting no NaN or Inf through.

    One pass computes the norm and counts what is not finite, one scales; the second is skipped when there is nothing to change.
    Nothing is read back to the host.

    Parameters
    ----------
    grads : sequence of Tensor, any shapes and strides, float32, float16, bfloat16 or float64 (mixed), one device
        At least one; changed in place, so no two may share memory.
    max_norm : float
        0 or more.
    norm_type : float
        p of the p-norm: any number above 0, or ``inf`` for the largest magnitude.
    nonfinite : {"skip", "zero", "raise"}
        What to do when any element is NaN or infinite. ``"skip"``: every gradient becomes 0, so that a plain optimizer step changes
        nothing, and `total_norm` is NaN. ``"zero"``: such elements become 0 and the others are clipped by their own norm.
        ``"raise"``: nothing is changed and `total_norm` is NaN; the caller raises (`qsim.clip_grad_norm_` does).

    Returns
    -------
    total_norm : Tensor, shape (), float32 (float64 when a gradient is)
        The norm before clipping.
    nonfinite : Tensor, shape (len(grads),), int64
        How many elements of each gradient were not finite.

    Examples
    --------
    >>> grads = [torch.tensor([3.0, 0.0]), torch.tensor([4.0])]
    >>> clip_grad_(grads, 1.0)
    (tensor(5.), tensor([0, 0]))
    >>> [round(x, 4) for grad in grads for x in grad.tolist()]
    [0.6, 0.0, 0.8]

    Notes
    -----
    Pascanu et al. 2013, "On the difficulty of training recurrent neural networks", section 3.2, with the coefficient of
    `torch.nn.utils.clip_grad_norm_`: ``min(1, max_norm / (total_norm + 1e-6))``. Sums are float64 in a fixed order: the result
    depends neither on the number of threads nor on the instruction set, and squares beyond float32 do not overflow. The
    product with the coefficient is taken in float32 (float64 for float64 gradients) and rounded once. No gradient.
    """
    operator = torch.ops.qsim.clip_grad_.default if is_dynamo_compiling() else eager.clip_grad_
    return operator(grads, max_norm, norm_type=norm_type, nonfinite=nonfinite)


def grad_power_sum(grads: Sequence[Tensor], *, norm_type: float = 2.0) -> tuple[Tensor, Tensor]:
    """The first half of `clip_grad_`: of each gradient the sum whose root is its norm, and the count.

    With `scale_grad_` this clips gradients that live on several devices: concatenate powers and counts, copy both to each device.

    Parameters
    ----------
    grads, norm_type
        As for `clip_grad_`.

    Returns
    -------
    powers : Tensor, shape (len(grads),), float64
        Sum of ``|x| ** norm_type`` over the finite elements of each gradient; for ``inf`` their largest ``|x|``.
    nonfinite : Tensor, shape (len(grads),), int64
        How many elements of each gradient are not finite.

    Examples
    --------
    >>> powers, nonfinite = grad_power_sum([torch.tensor([3.0, 4.0]), torch.tensor([torch.nan])])
    >>> powers.tolist(), nonfinite.tolist()
    ([25.0, 0.0], [0, 1])
    """
    powers, counts = torch.ops.qsim.grad_power_sum(grads, norm_type=norm_type)
    return powers, counts


def scale_grad_(
    grads: Sequence[Tensor], powers: Tensor, counts: Tensor, max_norm: float, *, norm_type: float = 2.0, nonfinite: str = "skip"
) -> Tensor:
    """The second half of `clip_grad_`: scale gradients in place by what `grad_power_sum` found.

    Parameters
    ----------
    grads : sequence of Tensor
        As for `clip_grad_`.
    powers : Tensor, float64
        Of these gradients and of all others that are clipped together with them.
    counts : Tensor, shape of `powers`, int64
        Non-finite elements of the same gradients.
    max_norm, norm_type, nonfinite
        As for `clip_grad_`.

    Returns
    -------
    total_norm : Tensor, shape (), float32 (float64 when one of these gradients is)

    Examples
    --------
    >>> here, there = torch.tensor([3.0]), torch.tensor([4.0])  # as if on two devices
    >>> sums = [grad_power_sum([grad]) for grad in (here, there)]
    >>> powers, counts = (torch.cat(parts) for parts in zip(*sums, strict=True))
    >>> [scale_grad_([grad], powers, counts, 1.0).item() for grad in (here, there)]
    [5.0, 5.0]
    >>> round(here.item(), 4), round(there.item(), 4)
    (0.6, 0.8)
    """
    total_norm: Tensor = torch.ops.qsim.scale_grad_(grads, powers, counts, max_norm, norm_type=norm_type, nonfinite=nonfinite)
    return total_norm
