"""What a simulation warns of when it is made, and when it runs in float: sentences, pointed at the caller of `Simulation`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import Tensor, nn

from qsim.batch_norm.statistics import batch_norms, degenerate
from qsim.close_names import close_names
from qsim.graph.plan.actions import WEIGHTS_LEFT, Decisions
from qsim.graph.plan.reasons import BY_CONFIG
from qsim.graph.record.telling import Telling
from qsim.warning import warn

_SHOWN = 5  # so many sentences are in one warning


def training(model: nn.Module) -> None:
    """A model with BatchNorm that was in training mode."""
    names = [name or "the model itself" for name in batch_norms(model)]
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


def useless_statistics(model: nn.Module) -> None:
    """Statistics of BatchNorm that say nothing of the data."""
    if useless := degenerate(model):
        remedy = "Load other statistics, or call sim.reestimate_batch_norms(data) in `with sim.in_float():` before calibrating"
        warn(f"QuantSim: {'; '.join(useless.values())}. {remedy}")


def parts_in_float(notes: Iterable[str]) -> None:
    """Those of a plan's notes that change what numbers mean."""
    if told := [note for note in notes if isinstance(note, Telling)]:
        more = f" (and {len(told) - _SHOWN} more: see sim.summary().notes)" if len(told) > _SHOWN else ""
        warn(f"QuantSim: {'; '.join(told[:_SHOWN])}{more}")


def little_quantized(decisions: Decisions, model: nn.Module, quantized: Iterable[Tensor]) -> None:
    """A target that leaves more of a model's weights in float than it quantizes, or everything: figures of its simulation are about the
    float model's. Tables of embeddings, which nothing is multiplied with, do not count."""
    reasons = Counter(entry.reason for entry in decisions.left)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    left = {entry.name: entry.reason for entry in decisions.left if WEIGHTS_LEFT in entry.reason and not entry.op.startswith("embedding")}
    elements = sum(parameters[name].numel() for name in left if name in parameters)
    grids = sum(weight.numel() for weight in quantized)
    if not decisions.quantizers and BY_CONFIG not in reasons:  # else none, as was asked for
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
