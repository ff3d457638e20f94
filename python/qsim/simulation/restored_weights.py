"""What restoration did to the parameters of a simulation, which then is not simulated from the float model any more: part of its state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from qsim.simulation import warned_of
from qsim.simulation.bank import QuantizerBank

SOLVED, TRAINED = 1, 2  # bits of what `QuantizerBank.restored_weights` holds


class RestoredWeights(nn.Module):
    """Base of `QuantSim`: notes what of the model's parameters was solved for or trained, and tells of it."""

    quantization: QuantizerBank

    @property
    def restored(self) -> str:
        """What of the float model's parameters `restoration` replaced: "12 weights, distillation"; "" as long as nothing was."""
        found = self.quantization.restored.values()
        solved = sum(1 for did in found if did & SOLVED)
        parts = [f"{solved} weights"] if solved else []
        return ", ".join([*parts, *(["distillation"] if any(did & TRAINED for did in found) else [])])

    def note_restored(self, keys: Iterable[str], did: int) -> None:
        """From now on these weights are solved for, or trained. "": other parameters than those that have a quantizer."""
        known = self.quantization.restored
        self.quantization.restored = known | {key: known.get(key, 0) | did for key in keys}

    def tell_of_restored(self) -> None:
        """Warn where the model in float is taken for the float model, and its parameters were replaced by what was solved for."""
        warned_of.restored_weights(self.restored)


def forget_loaded(bank: QuantizerBank, model: nn.Module, state: Mapping[str, Any]) -> None:
    """Parameters that come from a state of the float model, by the model's names, are not restored ones."""
    left = {key: did for key, did in bank.restored.items() if key and bank.path_of(key) not in state}
    if any(name not in state for name, _ in model.named_parameters()):
        left |= {key: did for key, did in bank.restored.items() if not key}
    bank.restored = left
