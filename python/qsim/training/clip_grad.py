"""Gradient clipping that no NaN or Inf gets through."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from qsim import ops
from qsim.call_fit import tells_arguments
from qsim.options import shown
from qsim.runs.sharding import is_sharded, layout_of, local, reduce_over_shards

_MOST_NAMED = 8


class ClipReport:
    """What `clip_grad_norm_` found, left on the device until someone reads it.

    Pass one to `clip_grad_norm_`, step the optimizer, and read it when it suits: only `nonfinite` and `per_parameter` wait for the device.

    Attributes
    ----------
    labels : tuple of str
        The parameters that had a gradient, quoted names, or positions and shapes where no names were given.
    counts : Tensor, shape (len(labels),), int64, or None before the first call
        How many elements of each gradient were NaN or infinite, on the first gradient's device.
    norms : Tensor, shape (len(labels),), float64, or None before the first call
        Norm of the finite elements of each gradient before clipping, on the same device.

    Examples
    --------
    >>> layer, report = torch.nn.Linear(2, 1), ClipReport()
    >>> layer.weight.grad = torch.tensor([[1.0, float("nan")]])
    >>> norm = clip_grad_norm_(layer.named_parameters(), 1.0, report=report)
    >>> report.nonfinite()
    {"'weight'": 1}
    >>> report.per_parameter()
    {"'weight'": 1.0}
    """

    def __init__(self) -> None:
        self.labels: tuple[str, ...] = ()
        self.counts: Tensor | None = None
        self.norms: Tensor | None = None

    def per_parameter(self) -> dict[str, float]:
        """Norm of each gradient before clipping, its finite elements only. Waits for the device."""
        norms = [] if self.norms is None else self.norms.tolist()
        return dict(zip(self.labels, norms, strict=True))

    def nonfinite(self) -> dict[str, int]:
        """Non-finite elements of each gradient that had any. Waits for the device."""
        counts = [] if self.counts is None else self.counts.tolist()
        return {label: count for label, count in zip(self.labels, counts, strict=True) if count > 0}


@tells_arguments("qsim.clip_grad_norm_")
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor] | Iterable[tuple[str, Tensor]],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    nonfinite: str = "skip",
    report: ClipReport | None = None,
) -> Tensor:
    """Clip the joint norm of gradients in place, as `torch.nn.utils.clip_grad_norm_` does, but safely and in two reads.

    Parameters
    ----------
    parameters : Tensor, iterable of Tensor, or iterable of (name, Tensor)
        Their ``.grad`` are clipped; parameters without one are left out, and one given twice counts once.
        ``model.named_parameters()`` lets errors name them.
        Dense gradients of any strides, float32, float16, bfloat16 or float64, on one or several devices. Where they are sharded
        (FSDP), every rank has to call, and the norm is that of the whole gradients.
    max_norm : float
        Largest norm allowed, 0 or more.
    norm_type : float
        p of the p-norm: any number above 0, or ``inf``.
    nonfinite : {"skip", "zero", "raise"}
        What to do when any gradient holds NaN or Inf. ``"skip"``: every gradient becomes 0, and the norm returned is NaN.
        ``"zero"``: such elements become 0 and the others are clipped by their own norm. ``"raise"``: an error names the
        parameters and the gradients stay as they were; this alone waits for the device.
    report : ClipReport, optional
        Receives the norm of each gradient and which were not finite, from the same pass and without waiting for the device.

    Returns
    -------
    Tensor, shape (), float32 (float64 when a gradient is)
        The norm before clipping, on the first gradient's device; 0 when there are no gradients.

    Raises
    ------
    RuntimeError
        With ``nonfinite="raise"``, when an element is not finite.
    TypeError
        A gradient is sparse or of another dtype.

    Examples
    --------
    >>> weight = torch.nn.Parameter(torch.ones(4))
    >>> weight.grad = torch.full((4,), 2.0)
    >>> clip_grad_norm_([weight], 1.0)
    tensor(4.)

    Notes
    -----
    On finite gradients the result is that of torch up to float32 rounding; see `qsim.ops.clip_grad_` for the arithmetic.
    """
    if not isinstance(report, ClipReport | None):
        raise TypeError(f"clip_grad_norm_: got report={shown(report)}; expected a qsim.ClipReport, which is filled")
    with torch.no_grad():
        labels, grads = _gradients(parameters)
        if not grads:
            if report is not None:
                report.labels, report.counts, report.norms = (), None, None
            return torch.tensor(0.0)
        groups: dict[Hashable, list[int]] = {}
        for i, grad in enumerate(grads):
            groups.setdefault(layout_of(grad), []).append(i)
        order = [i for group in groups.values() for i in group]
        if report is None and len(groups) == 1 and not is_sharded(grads[0]):
            norm, counts = ops.clip_grad_(grads, max_norm, norm_type=norm_type, nonfinite=nonfinite)
        else:
            norm, powers, counts = _clip([[grads[i] for i in group] for group in groups.values()], max_norm, norm_type, nonfinite)
        if report is not None:
            report.labels, report.counts = tuple(labels[i] for i in order), counts
            report.norms = powers if math.isinf(norm_type) else powers.pow(1 / norm_type)
        if nonfinite == "raise":
            found = [(labels[i], count, grads[i].numel()) for i, count in zip(order, counts.tolist(), strict=True) if count > 0]
            if found:
                raise RuntimeError(_complaint(found))
        return norm


def _gradients(parameters: Tensor | Iterable[Tensor] | Iterable[tuple[str, Tensor]]) -> tuple[list[str], list[Tensor]]:
    """Names (or positions and shapes) and gradients of the parameters that have one."""
    if isinstance(parameters, nn.Module):
        raise TypeError(
            f"qsim.clip_grad_norm_: got a {type(parameters).__name__}; expected its parameters: model.parameters(), or "
            "model.named_parameters(), by which errors then name them"
        )
    labels, grads, seen = [], [], set()
    given = [parameters] if isinstance(parameters, Tensor) else parameters
    for position, item in enumerate(cast("Iterable[Tensor | tuple[str, Tensor]]", given)):
        name, parameter = (None, item) if isinstance(item, Tensor) else item
        if parameter.grad is None or id(parameter) in seen:
            continue
        seen.add(id(parameter))
        label = repr(name) if name is not None else f"parameter {position} of shape {list(parameter.shape)}"
        if parameter.grad.layout != torch.strided:
            raise TypeError(
                f"qsim: the gradient of {label} is {parameter.grad.layout}, expected a dense one; "
                "build its layer with sparse=False or leave the parameter out"
            )
        labels.append(label)
        grads.append(parameter.grad)
    return labels, grads


def _clip(groups: Sequence[Sequence[Tensor]], max_norm: float, norm_type: float, nonfinite: str) -> tuple[Tensor, Tensor, Tensor]:
    """Norm, and powers and counts, of gradients grouped by device and sharding; all on the first group's device."""
    home, firsts = groups[0][0].device, [group[0] for group in groups]
    groups = [[local(grad) for grad in group] for group in groups]
    parts = [ops.grad_power_sum(group, norm_type=norm_type) for group in groups]
    for like, (power, count) in zip(firsts, parts, strict=True):
        reduce_over_shards(like, power, maximum=math.isinf(norm_type))
        reduce_over_shards(like, count)
    powers, counts = (torch.cat([part.to(home) for part in found]) for found in zip(*parts, strict=True))
    norms = []
    for group in groups:
        there = group[0].device
        norms.append(ops.scale_grad_(group, powers.to(there), counts.to(there), max_norm, norm_type=norm_type, nonfinite=nonfinite))
    return max(norms, key=lambda norm: norm.itemsize).to(home), powers, counts


def _complaint(found: Sequence[tuple[str, int, int]]) -> str:
    lines = [f"  {label}: {count} of {elements} elements" for label, count, elements in found[:_MOST_NAMED]]
    if len(found) > _MOST_NAMED:
        lines.append(f"  and {len(found) - _MOST_NAMED} more")
    advice = "lower the learning rate or the loss scale, or pass nonfinite='skip' to leave such steps out"
    return "\n".join(["qsim: gradients hold NaN or Inf and were left unclipped:", *lines, advice])
