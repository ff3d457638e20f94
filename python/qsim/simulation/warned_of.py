"""What a simulation warns of when it is made, trained, and runs in float: sentences, pointed at the caller of `Simulation`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from qsim.batch_norm.statistics import batch_norms, degenerate
from qsim.close_names import close_names
from qsim.graph.plan.actions import WEIGHTS_LEFT, Decisions, PlannedQuantizer
from qsim.graph.plan.reasons import BY_CONFIG
from qsim.graph.record.telling import Telling
from qsim.quantizers.quantizer import Quantizer
from qsim.warning import warn

_SHOWN = 5  # so many sentences are in one warning


def training(model: nn.Module) -> None:
    """BatchNorms that were in training mode."""
    names = [name or "the model itself" for name, norm in batch_norms(model).items() if norm.training]
    if names:
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        warn(
            f"QuantSim: the model was in training mode; it is simulated in eval mode, with the running statistics of BatchNorm ({shown}). "
            "Call sim.train() to train."
        )


def idle_policies(policies: str | Mapping[str, str] | tuple[tuple[str, str], ...], norms: Collection[str]) -> None:
    """Patterns of ``Config(batch_norm={...})`` that match no BatchNorm; "*" may."""
    for pattern in () if isinstance(policies, str) else dict(policies):
        if pattern != "*" and not any(fnmatchcase(name, pattern) for name in norms):
            near = close_names(pattern, norms)
            hint = f"; close to it: {', '.join(map(repr, near))}" if near else ""
            warn(f"QuantSim: {pattern!r} in the config's batch_norm matches no BatchNorm{hint}")


def made(model: nn.Module, notes: Iterable[str], decisions: Decisions, quantized: Iterable[Tensor]) -> None:
    """What a new simulation has to say."""
    _useless_statistics(model)
    _parts_in_float(notes)
    _little_quantized(decisions, model, quantized)


def _useless_statistics(model: nn.Module) -> None:
    """Statistics of BatchNorm that say nothing of the data."""
    if useless := degenerate(model):
        remedy = "Load other statistics, or call sim.reestimate_batch_norms(data) in `with sim.in_float():` before calibrating"
        warn(f"QuantSim: {'; '.join(useless.values())}. {remedy}")


def _parts_in_float(notes: Iterable[str]) -> None:
    """Those of a plan's notes that change what numbers mean."""
    if told := [note for note in notes if isinstance(note, Telling)]:
        more = f" (and {len(told) - _SHOWN} more: see sim.summary().notes)" if len(told) > _SHOWN else ""
        warn(f"QuantSim: {'; '.join(told[:_SHOWN])}{more}")


def _little_quantized(decisions: Decisions, model: nn.Module, quantized: Iterable[Tensor]) -> None:
    """A target that leaves more of a model's weights in float than it quantizes, or everything: figures of its simulation are about the
    float model's. Tables of embeddings, which nothing is multiplied with, do not count."""
    reasons = Counter(entry.reason for entry in decisions.left)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    left = {entry.name: entry.reason for entry in decisions.left if WEIGHTS_LEFT in entry.reason and not entry.op.startswith("embedding")}
    elements = sum(parameters[name].numel() for name in left if name in parameters)
    grids = sum(weight.numel() for weight in quantized)
    if not (decisions.quantizers or decisions.rounds_numbers) and BY_CONFIG not in reasons:  # else none, as was asked for
        what = "nothing of this model is quantized, so all figures are the float model's, and what is exported runs in float"
        reason = reasons.most_common(1)[0][0] if reasons else "the example inputs reach no operation that could be"
    elif elements > grids:
        what = f"{elements} of the {elements + grids} elements of weights stay in float, and no figure has their error in it"
        reason = Counter(left.values()).most_common(1)[0][0]
    else:
        return
    warn(f"QuantSim: {what}: {reason}. sim.summary() has the reason of each operation; other targets: docs/targets.md")


def unseen_weights(weights: Sequence[str]) -> None:
    """Weights that nothing which a simulation meets reads; called while it is made."""
    if not weights:
        return
    shown = ", ".join(map(repr, weights[:4])) + (f" and {len(weights) - 4} more" if len(weights) > 4 else "")
    warn(
        f"QuantSim: weights stay in float, and no figure of this simulation has their error in it: {shown}. What multiplies "
        "with them is nothing that torch.compile shows to a simulation (an operator of torch.ops, for example); call a function of torch"
    )


def restored_weights(what: str) -> None:
    """The model in float is taken for the float model, and its parameters were replaced by what was solved for."""
    if what:
        warn(
            f"QuantSim: what runs in float is not the float model any more: restoring replaced its parameters ({what}). "
            "Compare with the model that the simulation was made of"
        )


def zero_weights(model: nn.Module, planned: Mapping[str, PlannedQuantizer], quantizers: Mapping[str, Quantizer]) -> None:
    """Warn of weights that are to be trained on the grid of zero, whose step is 1: what they become is rounded to zero."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    weights = {key: parameters[found.parameter] for key, found in planned.items() if found.parameter in parameters}
    trained = {
        key: weight for key, weight in weights.items() if type(weight) is nn.Parameter and weight.requires_grad and not weight.is_meta
    }
    grids = {key: q.scale.detach() for key, q in quantizers.items() if key in trained and _has_fixed_steps(q)}
    if not grids:
        return
    on = next(iter(grids.values())).device
    ones = torch.stack([scale.eq(1).all().to(on) for scale in grids.values()]).tolist()  # one wait for the device
    zero = [key for key, one in zip(grids, ones, strict=True) if one and not quantizers[key].lacks_encoding]
    if zero := [key for key in zero if bool(trained[key].detach().abs().max() < 0.5)]:
        shown = ", ".join(map(repr, zero[:4])) + (f" and {len(zero) - 4} more" if len(zero) > 4 else "")
        warn(
            f"QuantSim: weights were zero throughout when their ranges were chosen, as new heads and LoRA begin: {shown}. The steps of "
            "such a grid are 1, and what is below a half is rounded to zero, so training changes nothing. Train some steps within "
            "`with sim.in_float():`, then call sim.calibrate(data)"
        )


def _has_fixed_steps(quantizer: Quantizer) -> bool:
    spec = quantizer.spec
    return (
        quantizer.enabled and type(quantizer.scale) in (Tensor, nn.Parameter) and not (spec.is_float or spec.is_dynamic or spec.is_running)
    )


def waiting(keys: Collection[str]) -> None:
    """Quantizers that are off in a copy, since a schedule has them off in the simulation that it is of."""
    many = "1 quantizer is" if len(keys) == 1 else f"{len(keys)} quantizers are"
    warn(
        f"QuantSim: {many} off in this copy for good ({', '.join(sorted(keys)[:_SHOWN])}{', ...' if len(keys) > _SHOWN else ''}): a "
        "schedule has them off for now in the simulation that it is of, and does not know of copies. Copy later "
        "(torch.optim.swa_utils.AveragedModel copies when it is made), or sim.enable(...) in the copy"
    )
