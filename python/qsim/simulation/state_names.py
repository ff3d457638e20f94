"""State dicts of a simulation: the model's entries keep the names that they have in the model."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from qsim.batch_norm.absorb import NotFoldable
from qsim.batch_norm.foldable import Fold
from qsim.batch_norm.folded_states import fold_state
from qsim.graph.execute.simulated import WITHOUT_RANGES
from qsim.quantizers.quantizer import Quantizer
from qsim.simulation.bank import QuantizerBank
from qsim.simulation.observed_with import ObservedWith
from qsim.simulation.restored_weights import forget_loaded
from qsim.warning import warn

_MODEL, _BANK = "model.", "quantization."
_OTHER_WEIGHTS = (
    "qsim: the state is of a simulation whose BatchNorms are not folded, as they are here, and its ranges are those of other weights. Load "
    "it into a simulation of the same config, before sim.fold_batch_norms()"
)


class NamedAsTheModel(nn.Module):
    """Base of `QuantSim`: leaves the name of its child `model` out of state dicts.

    So a state dict is that of the model plus the quantizers' entries (``quantization.*``), and loads both ways: a float checkpoint
    into a simulation (its BatchNorms are folded as those of the model were; quantizers keep what they have), and, with
    ``strict=False``, a simulation's into the float model.
    """

    model: nn.Module
    quantization: QuantizerBank
    folds: tuple[tuple[Fold, _BatchNorm], ...]

    def __init__(self) -> None:
        super().__init__()
        self.observed_with = ObservedWith()
        self.register_state_dict_post_hook(_leave_out)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_leave_out_of_report)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_follow_own)  # type: ignore[no-untyped-call]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        bank = f"{prefix}quantization."
        tables = (f"{bank}{name}" for name, _ in self.quantization.named_buffers(recurse=False))
        own = (*tables, *(f"{bank}{name}." for name, _ in self.quantization.named_children()))
        models = [key for key in state_dict if key.startswith(prefix) and not key.startswith(own)]
        named = {key.removeprefix(prefix): state_dict.pop(key) for key in models}
        has_ranges = any(key.startswith(own) for key in state_dict)
        error_messages: list[str] = args[-1]
        try:
            if fold_state(self.model, self.folds, named) and has_ranges:
                error_messages.append(_OTHER_WEIGHTS)
        except NotFoldable as error:
            error_messages.append(f"qsim: {error}")
        state_dict.update({f"{prefix}{_MODEL}{name}": t for name, t in named.items()})
        if f"{bank}restored_weights" not in state_dict:
            forget_loaded(self.quantization, self.model, named)
        if has_ranges:
            self.observed_with.parameters = None
        else:  # a float checkpoint: strict is about the model
            state_dict.update({f"{prefix}quantization.{key}": t for key, t in self.quantization.state_dict().items()})
        super()._load_from_state_dict(state_dict, prefix, *args)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As of every module. A state of the float model alone is taken too: ranges stay as they are, with a warning if there are any.

        Raises
        ------
        RuntimeError
            The state is of another model or config: the message says which of both, and what is too much or missing.

        Examples
        --------
        >>> layer = nn.Linear(3, 2)
        >>> sim = qsim.QuantSim(layer, torch.zeros(1, 3))
        >>> sim.load_state_dict(layer.state_dict())
        <All keys matched successfully>
        """
        bare = not any(key.startswith(_BANK) for key in state_dict)
        before = copy.copy(self.observed_with)
        try:
            found = super().load_state_dict(state_dict, strict, assign)
        except RuntimeError as error:
            self.observed_with = before  # with other parameters, if some were loaded
            own = self.state_dict().keys()
            unknown, missing = ([key for key in mine if key not in other] for mine, other in ((state_dict, own), (own, state_dict)))
            absent = [] if bare and not unknown else missing
            names_tell = strict and _OTHER_WEIGHTS not in str(error)
            raise RuntimeError(_unfit_state(unknown if names_tell else [], absent if names_tell else [], error)) from error
        if bare and any(not quantizer.lacks_encoding for quantizer in self.quantization.children() if isinstance(quantizer, Quantizer)):
            warn(WITHOUT_RANGES)
        return found

    def _fqn_modifiers(self) -> dict[str, str]:
        """What `torch.distributed.checkpoint` asks of modules whose state dict leaves a name out: which one, before which others."""
        return dict.fromkeys([name for name, _ in (*self.model.named_children(), *self.model.named_parameters(recurse=False))], "model")


def _unfit_state(unknown: Sequence[str], missing: Sequence[str], error: RuntimeError) -> str:
    """Why a state does not fit, and what to do: is the model another one, or the config?"""
    named = [
        f"{title} {', '.join(map(repr, keys[:3]))}{f' and {len(keys) - 3} more' if len(keys) > 3 else ''}"
        for title, keys in (("it has", unknown), ("it lacks", missing))
        if keys
    ]
    if not named:
        return f"QuantSim: the state does not fit this simulation: {' '.join(str(error).split())}"
    another = "config or version" if all(key.startswith(_BANK) for key in (*unknown, *missing)) else "model"
    return (
        f"QuantSim: the state is of another {another}: {'; '.join(named)}. Load it into a simulation of the model, and with the config, "
        "that it was saved of"
    )


def _leave_out(module: NamedAsTheModel, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    if (flag := state_dict.get(key := f"{prefix}{_BANK}observed_before")) is not None:
        state_dict[key] = torch.full_like(flag, module.observed_with.is_before(module))
    for key in list(state_dict):  # all of them, so that their order stays
        name = key.removeprefix(prefix + _MODEL)
        state_dict[key if name == key else prefix + name] = state_dict.pop(key)


def _follow_own(sim: NamedAsTheModel, report: Any) -> None:
    if sim.observed_with.parameters is None:
        flag = sim.quantization.observed_before
        sim.observed_with.follow_state(sim, not flag.is_meta and bool(flag))


def _leave_out_of_report(module: nn.Module, report: Any) -> None:
    for keys in (report.missing_keys, report.unexpected_keys):
        keys[:] = [key.removeprefix(_MODEL) for key in keys]
