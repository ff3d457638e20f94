"""The summary of a simulation, out of its plan, its quantizers and its weights."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter

import torch
from torch import Tensor, nn

from qsim.graph.plan.actions import Decisions, PlannedQuantizer
from qsim.numbers.encoding import Encoding
from qsim.numbers.granularity import granularity
from qsim.pages.curves import Curves
from qsim.pages.subject import Subject
from qsim.quantizers.observer import Observer
from qsim.quantizers.quantizer import Quantizer
from qsim.quantizers.sketch import Distribution
from qsim.runs.sharding import is_sharded
from qsim.simulation.clipping import clipped_share_of, clipped_share_seen
from qsim.simulation.summary import HELD, LARGEST, Row, Summary


def summarize(
    model: nn.Module,
    decisions: Decisions,
    quantizers: Mapping[str, Quantizer],
    released: Mapping[str, str],
    notes: list[str],
    subject: Subject,
) -> Summary:
    """The summary of a plan, of the state of its quantizers, and of the weights of the model that they are for.

    `released`: the formats of those in whose place all that use them compute in float.
    """
    rows = [_row(decisions.quantizers[key], quantizer, model, released.get(key, "")) for key, quantizer in quantizers.items()]
    for bias in decisions.biases:
        enabled = quantizers[bias.input].enabled and quantizers[bias.weight].enabled
        scale, fallback = f"scale of {bias.input} x {bias.weight}", released.get(bias.weight, "")
        rows.append(Row(bias.parameter, "bias", bias.op, "int32", 32, True, scale, enabled, fallback=fallback))
    return Summary(rows, decisions.left, notes, subject=subject)


def _row(plan: PlannedQuantizer, quantizer: Quantizer, model: nn.Module, fallback: str) -> Row:
    spec, encoding, counts = quantizer.spec, quantizer.encoding, quantizer.counts
    weight = attrgetter(plan.parameter)(model) if plan.parameter else None
    if weight is not None and is_sharded(weight):
        weight = None  # gathering it takes every rank, and a summary may be printed by one
    distribution = _distribution(quantizer.observer if weight is None else Observer().to(weight.device), weight)
    clipped = None
    if encoding is not None:
        clipped = clipped_share_seen(quantizer, encoding, distribution) if weight is None else clipped_share_of(weight, quantizer)
    alive = None if encoding is None else ~_zeros(quantizer, weight, encoding)
    return Row(
        plan.key,
        plan.role,
        plan.op,
        spec.encoding_dtype,
        spec.bits,
        spec.symmetric,
        granularity(spec),
        quantizer.enabled,
        scale=None if encoding is None or alive is None or not spec.has_scale else _span(encoding.scale[alive]),
        **_ends(encoding, alive),
        observed=(quantizer.min.min().item(), quantizer.max.max().item()) if counts.elements > counts.nonfinite else None,
        elements=counts.elements,
        nonfinite=counts.nonfinite,
        clipped=clipped,
        format_counts=quantizer.format_counts,
        fallback=fallback,
        zeros=0 if alive is None else int((~alive).sum()),
        distribution=distribution,
        channels=None if weight is None or plan.role != "weight" else _channels(weight, encoding),
        dynamic=spec.is_dynamic,
    )


def _distribution(observer: Observer, weight: Tensor | None) -> Distribution | None:
    """Of what the observer saw, or of the weight as the observer sees it; None without a sketch, or without anything finite."""
    if weight is not None:
        observer(weight.detach())
    if not observer.sketched or not bool(observer.lowest <= observer.highest):
        return None
    return Distribution.of(observer.sketch, observer.lowest, observer.highest)


def _zeros(quantizer: Quantizer, weight: Tensor | None, encoding: Encoding) -> Tensor:
    """Which channels hold nothing but zeros, of the shape of the scale; none is looked for in blocks."""
    scale, axis = encoding.scale, encoding.axis
    if encoding.block_size is not None or isinstance(axis, tuple):
        return torch.zeros_like(scale, dtype=torch.bool)
    if weight is not None:
        magnitude = weight.detach().abs()
        zero = (magnitude.max() if axis is None else magnitude.movedim(axis, 0).flatten(1).amax(1)) == 0
    else:
        zero = (quantizer.min == 0) & (quantizer.max == 0)
    return zero.to(scale.device).reshape(scale.shape) if zero.numel() == scale.numel() else torch.zeros_like(scale, dtype=torch.bool)


def _span(values: Tensor) -> tuple[float, float] | None:
    return (values.min().item(), values.max().item()) if values.numel() else None


def _ends(encoding: Encoding | None, alive: Tensor | None) -> dict[str, float]:
    if encoding is None or alive is None:
        return {}
    if not bool(alive.any()):
        return {"low": 0.0, "high": 0.0}
    return {"low": encoding.min[alive].min().item(), "high": encoding.max[alive].max().item()}


def _channels(weight: Tensor, encoding: Encoding | None) -> Curves | None:
    """Along the axis of the scale, or along the first where a scale is for all, or for blocks, whose ranges are not shown."""
    if weight.ndim == 0 or weight.numel() == 0:
        return None
    plain = encoding is not None and encoding.block_size is None and not isinstance(encoding.axis, tuple)
    axis = encoding.axis if encoding is not None and plain and isinstance(encoding.axis, int) else 0
    magnitude = weight.detach().abs().float().nan_to_num(0.0, 0.0, 0.0)
    curves = {LARGEST: magnitude.movedim(axis, 0).reshape(weight.shape[axis], -1).amax(1).cpu()}
    if encoding is not None and plain:
        held = torch.maximum(encoding.min.abs(), encoding.max.abs()).float().cpu()
        curves[HELD] = held.expand(len(curves[LARGEST])) if held.numel() == 1 else held
    return Curves(f"channel of axis {axis}", curves)
