"""Folding of BatchNorms into the convolution or linear layer beside them. Which fold, and why the others do not: `find_folds`; the
arithmetic: `absorb`; states of the model as it was: `fold_state`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from qsim.batch_norm.absorb import NotFoldable, absorb
from qsim.batch_norm.fold_report import FoldReport
from qsim.batch_norm.foldable import Fold, NoLayerBeside, find_folds
from qsim.batch_norm.folded_states import fold_what_is_loaded
from qsim.batch_norm.frozen import as_batch_norms
from qsim.batch_norm.lone_norms import NAME, before_children, has_layer, unit_layer
from qsim.batch_norm.recorded import Recording, recorded
from qsim.call_fit import tells_arguments
from qsim.close_names import close_names
from qsim.graph.execute.simulated import refuse_simulated
from qsim.graph.record.record import record
from qsim.graph.record.tape import Tape
from qsim.operations.layers import Layer
from qsim.options import shown
from qsim.runs.arguments import example_calls
from qsim.runs.offloaded import settle_offloaded
from qsim.runs.report_subject import subject_of
from qsim.runs.runnable import check_module


@tells_arguments("qsim.fold_batch_norms")
def fold_batch_norms(model: nn.Module, example_inputs: Any, *, keep: Collection[str] = ()) -> FoldReport:
    """Fold each BatchNorm into the convolution or linear layer right before it, or right after it, in place.

    Parameters
    ----------
    model : nn.Module, any device, float16/bfloat16/float32/float64
        Runs on the example inputs in eval and in training mode, and is then as it was but for the folding: outputs in eval mode are
        equal to a few ulp, a folded BatchNorm is an `nn.Identity` at the same path (of a subclass that calls its children after it has
        normalized, as timm's do, the children stay, in an `nn.Sequential`; frozen ones that are none by class, `FrozenBatchNorm2d`,
        fold too), training flags are kept. Whatever those flags say,
        the running statistics are folded.
    example_inputs : Tensor, tuple of arguments, dict of keyword arguments, or list of such calls
    keep : collection of str
        Paths of BatchNorms to leave as they are.

    Returns
    -------
    FoldReport
        What was folded into what, and what was kept for which reason.

    Raises
    ------
    ValueError
        If the model fails on the example inputs in eval mode, has lazy modules that never ran, or is a simulation.

    Examples
    --------
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    >>> fold_batch_norms(model, torch.zeros(2, 3, 8, 8)).folded
    {'1': '0'}

    Notes
    -----
    Jacob et al. 2018, "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference", section 3.2.
    Who follows whom is read from the recorded calls, not from the order of the modules.
    """
    check_module(model, "fold_batch_norms")
    refuse_simulated(model, "qsim.fold_batch_norms", ", which folds its own: sim.fold_batch_norms()")
    settle_offloaded(model)
    if isinstance(keep, str) or not isinstance(keep, Collection):
        raise TypeError(f"fold_batch_norms: got keep={shown(keep)}; expected the paths of BatchNorms, such as ['stem.bn']")
    paths = dict(model.named_modules())
    for path in keep:
        if path not in paths:
            near = ", ".join(map(repr, close_names(str(path), paths))) or "see model.named_modules()"
            raise ValueError(f"fold_batch_norms: got {path!r} in keep, which is no module; close to it: {near}")
    return folded_for("fold_batch_norms", model, example_inputs, keep)


def folded_for(caller: str, model: nn.Module, example_inputs: Any, keep: Collection[str] = ()) -> FoldReport:
    """As `fold_batch_norms`; errors name who was called."""
    as_batch_norms(model, lambda path: path not in keep)
    return fold_recorded(model, *recorded(model, example_inputs, caller), keep)


def fold_recorded(
    model: nn.Module, tape: Tape, problems: Iterable[str], keep: Collection[str] = (), *, alone: Collection[str] = ()
) -> FoldReport:
    """As `fold_batch_norms`, for a model that was recorded already. BatchNorms in `alone` become layers of their own where they fold into
    no other."""
    norms = {path: m for path, m in model.named_modules() if isinstance(m, _BatchNorm)}
    folds, refused = find_folds(model, tape, keep=keep)
    kept = {path: str(reason) for path, reason in refused.items()}
    folded: dict[str, str] = {}
    done: list[tuple[Fold, _BatchNorm]] = []
    for fold in folds:
        try:
            apply_fold(model, fold)
            folded[fold.batch_norm] = fold.layer
            done.append((fold, norms[fold.batch_norm]))
        except NotFoldable as reason:
            kept[fold.batch_norm] = str(reason)
    apart: dict[str, str] = {}
    for path, refusal in refused.items():
        if path in alone and isinstance(refusal, NoLayerBeside) and has_layer(refusal.dims):
            try:
                done.append((_set_apart(model, path, *refusal.dims), norms[path]))
                apart[path] = kept.pop(path)
            except NotFoldable as obstacle:
                kept[path] = str(obstacle)
    warnings = (*problems, *_warnings(norms, {*folded, *apart}))
    return FoldReport(folded, kept, warnings, tuple(done), apart, subject=subject_of(model))


def fold_and_record(
    model: nn.Module, example_inputs: Any, caller: str, keep: Collection[str] = (), *, alone: Collection[str] = (), empty: bool = False
) -> tuple[FoldReport, Recording]:
    """As `fold_recorded`, with the recording of the model as it is then: made anew only where something folded. States of the model as it
    was are folded from now on where they are loaded."""
    recording = recorded(model, example_inputs, caller, empty=empty)
    report = fold_recorded(model, *recording, keep, alone=alone)
    fold_what_is_loaded(model, report.folds)
    return report, record(model, example_calls(example_inputs)) if report.folds else recording


def _set_apart(model: nn.Module, path: str, dims: int) -> Fold:
    """Put a layer in the place of a BatchNorm."""
    bn = cast(_BatchNorm, model.get_submodule(path))
    layer = unit_layer(bn, dims)
    fold = Fold(path, f"{path}.{NAME}", before=False, alone=True)
    absorb(layer, bn, before=False, names=(fold.layer, path))
    _replace(model, bn, layer)
    return fold


def _warnings(norms: dict[str, _BatchNorm], folded: Collection[str]) -> list[str]:
    training = [f"'{path}'" for path, bn in norms.items() if bn.training and path in folded]
    counts = {path: bn.num_batches_tracked for path, bn in norms.items()}
    untrained = [f"'{path}'" for path, count in counts.items() if count is not None and not count.is_meta and not count.item()]
    found = []
    if training:
        found.append(f"in training mode, yet folded with the running statistics, as eval mode uses them: {', '.join(training)}")
    if untrained:
        found.append(f"num_batches_tracked is 0: the running statistics may still be the initial ones: {', '.join(untrained)}")
    return found


def apply_fold(model: nn.Module, fold: Fold) -> Tensor:
    """Fold one BatchNorm of a model, as `absorb` does, which documents result and refusal, and take it out."""
    bn, layer = cast(_BatchNorm, model.get_submodule(fold.batch_norm)), cast(Layer, model.get_submodule(fold.layer))
    factor = absorb(layer, bn, before=fold.before, names=(fold.layer, fold.batch_norm))
    _replace(model, bn)
    return factor


def _replace(model: nn.Module, bn: _BatchNorm, layer: nn.Module | None = None) -> None:
    """An Identity wherever `bn` is registered, or its layer and what it called behind the normalization (`is_followed_by_children`)."""
    rest = before_children(bn, layer)
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if module is bn:
            parent, _, child = path.rpartition(".")
            setattr(model.get_submodule(parent), child, rest)
