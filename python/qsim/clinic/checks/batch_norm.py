"""BatchNorm: statistics that mean nothing, and what folding makes of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from qsim.batch_norm.absorb import NotFoldable, normalization
from qsim.clinic.examination import Examination
from qsim.clinic.finding import Finding, Severity
from qsim.runs.snapshot import unchanged

_UNLIKE = 16.0  # times the variance 1 that is recorded: four times the scale
_OFF = 1e-3  # of the layer's largest weight: a channel that training has switched off, as weight decay does
_BITS = 16.0  # four bits: half of an int8 grid


def never_updated(exam: Examination) -> list[Finding]:
    """QS021: running_mean 0 and running_var 1 exactly, as BatchNorm is made; training moves both in its first step.

    A warning where the rest of the model is trained (weight or bias are, or other BatchNorms have statistics), so that these were lost,
    and where the data in the median channel is four times as large as they say or more. Else worth knowing: a model that was never
    trained is no fault of its own, and statistics with num_batches_tracked 0 came from elsewhere.
    """
    findings = []
    others = any(not _as_made(bn) for _, bn in _norms(exam))
    fresh = {path: bn for path, bn in _norms(exam) if _untracked(bn) or _as_made(bn)}
    measured = _measured(exam, fresh) if fresh else {}
    for path, bn in fresh.items():
        tracked = -1 if bn.num_batches_tracked is None else int(bn.num_batches_tracked)
        evidence: dict[str, Any] = {"num_batches_tracked": tracked} if tracked >= 0 else {}
        severity: Severity = "info"
        if _as_made(bn):
            evidence |= {"running_mean": 0.0, "running_var": 1.0}
            severity = "warning" if others or _trained(bn) else "info"
            if path in measured:
                mean, var = measured[path]
                evidence |= {"mean of the data": mean, "variance of the data": var}
                severity = "warning" if var + mean * mean >= _UNLIKE else severity
        fix = "Load a checkpoint with its buffers (running_mean, running_var), or run the model in training mode on data first."
        findings.append(Finding("QS021", severity, path, "", evidence, fix))
    return findings


def tiny_variances(exam: Examination) -> list[Finding]:
    """QS022: channels whose variance is below eps: the gain is that of eps, up to ``1 / sqrt(eps)``, and multiplies whatever comes.

    Channels that training has switched off are no fault: their weight is below a thousandth of the layer's largest.
    """
    findings = []
    for path, bn in _norms(exam):
        var = cast(Tensor, bn.running_var).double()
        gamma = torch.ones_like(var) if bn.weight is None else bn.weight.detach().double().abs()
        tiny = (var < bn.eps) & (gamma > _OFF * gamma.max())
        if tiny.any():
            gain = (gamma / (var + bn.eps).sqrt())[tiny].max().item()
            evidence = {"channels": int(tiny.sum()), "of": var.numel(), "smallest": var.min().item(), "eps": bn.eps, "largest gain": gain}
            fix = "Train with data that moves these channels, or set their weight to 0: what is constant in training is amplified in use."
            findings.append(Finding("QS022", "warning", path, "", evidence, fix))
    return findings


def fold_gains(exam: Examination) -> list[Finding]:
    """QS023: gains whose largest is 16 times the median: folded, they leave the median channel 4 of 8 bits under a common scale.

    Scales by output channel take such gains in, so it is a warning only where there are none, or where the BatchNorm stands before its
    layer: the gains then lie along the input channels, which share their scales.
    """
    findings = []
    for fold, bn in exam.subject.folding.folds if exam.target.integers else ():
        gain = normalization(fold.batch_norm, bn)[0].abs()
        median, largest = gain.median().item(), gain.max().item()
        if largest >= _BITS * median > 0:
            shared = fold.before or not exam.target.per_channel
            evidence = {"largest gain": largest, "median gain": median, "layer": fold.layer, "channels": gain.numel()}
            fix = (
                "Keep this BatchNorm apart: batch_norm={'" + fold.batch_norm + "': 'keep'} in the Config."
                if fold.before
                else f"Give '{fold.layer}' one scale per output channel (axis=0); with one scale it needs equalization first."
            )
            findings.append(Finding("QS023", "warning" if shared else "info", fold.batch_norm, "", evidence, fix))
    return findings


def not_folded(exam: Examination) -> list[Finding]:
    """QS024: BatchNorms that stay operations of their own, with the reason.

    A warning where the statistics are what forbids it; info where the model is built so, and only for integers: such a BatchNorm runs
    between two more roundings to a grid.
    """
    findings = []
    norms = dict(_norms(exam))
    for path, reason in exam.subject.folding.kept.items():
        broken = path in norms and _degenerate(path, norms[path])
        if broken or exam.target.integers:
            fix = (
                "Repair the statistics: run the model in training mode on data, or load a checkpoint that has them."
                if broken
                else "Put it right behind, or right before, one convolution or linear layer of its own, or accept that it runs in float."
            )
            findings.append(Finding("QS024", "warning" if broken else "info", path, "", {"reason": reason}, fix))
    return findings


def _norms(exam: Examination) -> Iterator[tuple[str, _BatchNorm]]:
    """BatchNorms with running statistics, as they are in the model that was given."""
    for path, module in exam.model.named_modules():
        if isinstance(module, _BatchNorm) and module.running_mean is not None and module.running_var is not None:
            yield path, module


def _untracked(bn: _BatchNorm) -> bool:
    return bn.num_batches_tracked is not None and int(bn.num_batches_tracked) == 0


def _as_made(bn: _BatchNorm) -> bool:
    return not bool(cast(Tensor, bn.running_mean).any()) and bool((cast(Tensor, bn.running_var) == 1).all())


def _trained(bn: _BatchNorm) -> bool:
    return bn.affine and (bool((bn.weight != 1).any()) or bool(bn.bias.any()))


def _degenerate(path: str, bn: _BatchNorm) -> bool:
    try:
        normalization(path, bn)
    except NotFoldable:
        return True
    return False


def _measured(exam: Examination, norms: dict[str, _BatchNorm]) -> dict[str, tuple[float, float]]:
    """Mean magnitude and variance, in the median channel, of what reaches each BatchNorm with the first batch."""
    found: dict[str, tuple[float, float]] = {}

    def look(path: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            x = args[0].detach().double()
            along = [d for d in range(x.dim()) if d != 1]
            if x.numel() and x.isfinite().all():
                var, mean = torch.var_mean(x, along, correction=0)
                found.setdefault(path, (mean.abs().median().item(), var.median().item()))

        return hook

    with unchanged(exam.model), torch.no_grad(), ExitStack() as hooks:
        for path, bn in norms.items():
            hooks.callback(bn.register_forward_pre_hook(look(path)).remove)
        exam.subject.call(exam.model.eval(), exam.batches[0], exam.forward)
    return found
