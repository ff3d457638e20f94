"""Folding of a BatchNorm that stayed in a simulation: the integers of the layer's weight stay too, wherever a scale can absorb it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from qsim import ops
from qsim.batch_norm.absorb import NotFoldable
from qsim.batch_norm.fold import apply_fold
from qsim.batch_norm.fold_report import FoldReport
from qsim.batch_norm.foldable import Fold, find_folds
from qsim.graph.record.record import record
from qsim.numbers.encoding import Encoding
from qsim.quantizers.observer import Observer
from qsim.quantizers.quantizer import Quantizer
from qsim.runs.arguments import Arguments
from qsim.runs.report_subject import subject_of
from qsim.runs.snapshot import rewriting

_STEPS = (2.0**-20, 2.0**-16, 2.0**-12, 2.0**-8, 2.0**-4, 1.0)  # from a few ulp of a float32 to all the way


def fold_trained(model: nn.Module, examples: Sequence[Arguments], quantizers: Mapping[str | None, Quantizer]) -> FoldReport:
    """Fold the BatchNorms behind a layer in place, and bring the quantizers of the layers' weights along.

    Behind a scale s for each output channel, BatchNorm's factor g turns the grid of W into that of W g with scale ``s |g|``: the integers
    stay, with their sign turned where g is negative.

    Parameters
    ----------
    model : nn.Module
        Not simulating.
    examples : sequence of (tuple, dict)
        Example calls.
    quantizers : mapping of str to Quantizer
        By the parameter that they quantize.

    Returns
    -------
    FoldReport
        `warnings`: a sentence for each weight whose integers changed.
    """
    tape, problems = record(model, examples)
    folds, refused = find_folds(model, tape, trained=True)
    folded, kept, notes = {}, {name: str(reason) for name, reason in refused.items()}, list(problems)
    for fold in folds:
        try:
            notes += _fold(model, fold, quantizers.get(f"{fold.layer}.weight"))
            folded[fold.batch_norm] = fold.layer
        except NotFoldable as reason:
            kept[fold.batch_norm] = str(reason)
    return FoldReport(folded, kept, tuple(notes), subject=subject_of(model))


def _fold(model: nn.Module, fold: Fold, quantizer: Quantizer | None) -> list[str]:
    """Fold one BatchNorm. Returns a sentence if integers changed."""
    weight = model.get_submodule(fold.layer).weight
    assert isinstance(weight, Tensor)
    encoding = None if quantizer is None else quantizer.encoding
    if quantizer is None or encoding is None or not quantizer.spec.has_scale:
        apply_fold(model, fold)
        return []
    free = not quantizer.spec.is_float and quantizer.spec.scale_format is None  # any positive number is a scale
    before = _stored(weight, encoding, quantizer) if free else None
    factor = apply_fold(model, fold).to(weight.device)
    absorbed = _absorbed(encoding, factor)
    if absorbed is None or before is None:
        quantizer.compute_encoding_from(weight)
        return [f"'{quantizer.name}': its scale cannot absorb '{fold.batch_norm}'; the range was chosen anew"]
    quantizer.set_encoding(absorbed)
    turned = (before.int() * factor.sign().int()).clamp(absorbed.quant_min, absorbed.quant_max).to(before.dtype)
    _settle(weight, torch.where(factor > 0, before, turned), absorbed, quantizer)
    changed = int((_stored(weight, absorbed, quantizer) != before).sum())
    why = f"the weight of '{fold.batch_norm}' is negative or zero in some channels"
    return [f"'{quantizer.name}': {changed} of {weight.numel()} integers changed: {why}"] if changed else []


def _stored(weight: Tensor, encoding: Encoding, quantizer: Quantizer) -> Tensor:
    """The weight's integers."""
    scale = encoding.scale.double() if weight.dtype is torch.float64 else encoding.scale
    return ops.quantize(
        weight.detach(),
        scale,
        encoding.zero_point,
        encoding.quant_min,
        encoding.quant_max,
        axis=encoding.axis,
        block_size=encoding.block_size,
        rounding=quantizer.spec.rounding,
    )


def _absorbed(encoding: Encoding, factor: Tensor) -> Encoding | None:
    """The encoding with its scales times the factor's magnitude. None where elements that share a scale have different factors, and
    where a sign would turn a grid whose zero is not in the middle."""
    ends = Observer(encoding.axis, encoding.block_size).to(factor.device)
    ends(factor.abs())
    if not torch.equal(ends.min, ends.max) or (encoding.zero_point.any() and (factor <= 0).any()):
        return None
    by = torch.where(ends.max == 0, 1.0, ends.max.double())  # a channel that is switched off is all zeros on any grid
    return dataclasses.replace(encoding, scale=(encoding.scale.double() * by).float().clamp_min(torch.finfo(torch.float32).tiny))


def _settle(weight: Tensor, wanted: Tensor, encoding: Encoding, quantizer: Quantizer) -> None:
    """Move a weight that the product's rounding put on the other side of a step's edge back, by a few ulp."""
    scale = encoding.scale.double() if weight.dtype is torch.float64 else encoding.scale
    on_grid = ops.dequantize(wanted, scale, encoding.zero_point, axis=encoding.axis, block_size=encoding.block_size)
    for step in _STEPS:
        wrong = _stored(weight, encoding, quantizer) != wanted
        if not bool(wrong.any()):
            return
        with rewriting():
            weight.copy_(torch.where(wrong, torch.lerp(weight.to(on_grid.dtype), on_grid, step), weight))
