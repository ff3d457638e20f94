"""What restoration did to the parameters of a simulation, which then is not simulated from the float model any more: part of its state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from qsim.quantizers.quantizer import Quantizer
from qsim.runs.fingerprint import fingerprint
from qsim.runs.sharding import whole
from qsim.simulation import warned_of
from qsim.simulation.bank import QuantizerBank

SOLVED, TRAINED = 1, 2  # bits of what `QuantizerBank.restored_weights` holds
_SHOWN = 3


class RestoredWeights(nn.Module):
    """Base of `QuantSim`: notes what of the model's parameters was solved for or trained, and tells of it."""

    model: nn.Module
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
        keys, known = [*keys], self.quantization.restored
        self.quantization.restored = known | {key: known.get(key, 0) | did for key in keys}
        self.bind(key for key in keys if key)

    def bind(self, keys: Iterable[str]) -> None:
        """From now on the scales of these weights are theirs, as they are: see `bound_weights`."""
        weights, bank = self.quantization.weights(self.model), self.quantization
        bank.fingerprints |= {key: fingerprint(whole(weights[key])) for key in keys}

    def bound_weights(self) -> list[str]:
        """The weights that are as restoration left them: on the scales that it found, or learned, together with them. On others they
        would be worse than weights that nothing was done to."""
        did, known = self.quantization.restored, self.quantization.fingerprints
        weights = self.quantization.weights(self.model) if any(did) else {}
        return [key for key, weight in weights.items() if key in did and fingerprint(whole(weight)) == known[key]]

    def bound_scales(self) -> list[str]:
        """The quantizers that keep their scales when ranges are chosen anew: `bound_weights`, and where distillation trained these, and all
        of them are as it left them, those of activations that it learned with them, at which weights may clip."""
        bound, did = self.bound_weights(), self.quantization.restored
        trained = {key for key, how in did.items() if how & TRAINED}
        if not trained or not trained - {""} <= {*bound}:
            return bound
        weights = self.quantization.weights(self.model)
        learned = [key for key, q in self.quantization.by_key().items() if key not in weights and has_free_scale(q)]
        return bound + [key for key in learned if self.quantization.by_key()[key].encoding is not None]

    def told_of_bound(self) -> str:
        """What a choice of ranges says of `bound_scales`, which it leaves out, and of restored weights that are others by now."""
        bound, known = self.bound_scales(), self.quantization.weights(self.model)
        weights = [key for key in bound if key in known]
        others = len(bound) - len(weights)
        if changed := [key for key in self.quantization.restored if key in known and key not in weights]:
            left = (
                f"{_named(changed)} {'is' if len(changed) == 1 else 'are'} not as restoration left {'it' if len(changed) == 1 else 'them'}"
            )
            left = f"{left} (trained, loaded or converted since): scales are chosen anew there"
            return f"{left}. {self._told_of(weights, others)}" if bound else left
        return self._told_of(weights, others) if bound else ""

    def _told_of(self, weights: Sequence[str], others: int) -> str:
        parts = [_named(weights)] if weights else []
        parts += [f"{others} activation{'' if others == 1 else 's'}"] if others else []
        return (
            f"{' and '.join(parts)} keep the scales that were solved for, or learned, together with the weights. For others begin with a "
            "new simulation: qsim.QuantSim(model, example_inputs, config)"
        )

    def tell_of_restored(self) -> None:
        """Warn where the model in float is taken for the float model, and its parameters were replaced by what was solved for."""
        warned_of.restored_weights(self.restored)


def _named(weights: Sequence[str]) -> str:
    shown = ", ".join(map(repr, weights[:_SHOWN])) + (", ..." if len(weights) > _SHOWN else "")
    return f"{len(weights)} restored weight{'' if len(weights) == 1 else 's'} ({shown})"


def has_free_scale(quantizer: Quantizer) -> bool:
    """Whether its scale may become any positive number, and stays from one call to the next: what distillation can learn."""
    spec = quantizer.spec
    kept = quantizer.enabled and spec.has_scale and not spec.is_running and not spec.is_dynamic
    return kept and not spec.is_float and spec.scale_format is None


def forget_loaded(bank: QuantizerBank, model: nn.Module, state: Mapping[str, Any]) -> None:
    """Parameters that come from a state of the float model, by the model's names, are not restored ones."""
    left = {key: did for key, did in bank.restored.items() if key and bank.path_of(key) not in state}
    if any(name not in state for name, _ in model.named_parameters()):
        left |= {key: did for key, did in bank.restored.items() if not key}
    bank.restored = left
