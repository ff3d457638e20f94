"""What each quantizer's numbers are stored in, in the model for a target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from qsim.quantizers.quantizer import Quantizer
from qsim.trace.mark_uses import MarkUses
from qsim.trace.runtimes import Runtime

_FOUR_BITS = {"int4": "int8", "uint4": "uint8"}


@dataclass(frozen=True)
class Storages:
    """Types by quantizer.

    Attributes
    ----------
    constants, activations : dict of str to str
        For each enabled quantizer that stands at constants, or at activations, a type as `qsim.Encoding` calls it.
    notes : list of str
        Where that is not the smallest type.
    """

    constants: dict[str, str] = field(default_factory=dict)
    activations: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def storages(mark_uses: MarkUses, quantizers: Mapping[str, Quantizer], target: Runtime) -> Storages:
    """Choose types for a graph that the target can express."""
    chosen = Storages()
    for key, uses in mark_uses.uses.items():
        encoding = quantizers[key].encoding
        if quantizers[key].enabled and encoding is not None:
            for constant in uses:
                (chosen.constants if constant else chosen.activations)[key] = str(target.storage(encoding, constant))
    if target.only8:
        _widen_weights(chosen, quantizers)
        _unsign_activations(chosen, quantizers)
    return chosen


def _widen_weights(chosen: Storages, quantizers: Mapping[str, Quantizer]) -> None:
    """Integer kernels read weights of 8 bits: beside quantized activations smaller ones get a byte each. No kernel reads blocks."""
    if not any("int" in storage for storage in chosen.activations.values()):
        return
    widened = [key for key, dtype in chosen.constants.items() if dtype in _FOUR_BITS and quantizers[key].spec.block_size is None]
    for key in widened:
        chosen.constants[key] = _FOUR_BITS[chosen.constants[key]]
    if widened:
        chosen.notes.append(f"{len(widened)} weights of 4 bits are stored in a byte each: integer kernels read no smaller ones")


def _unsign_activations(chosen: Storages, quantizers: Mapping[str, Quantizer]) -> None:
    """Where a config leaves the sign open activations become uint8, 128 higher: the same values, and on x86 the faster kernels."""
    signed = [key for key, dtype in chosen.activations.items() if dtype == "int8"]
    if all(quantizers[key].spec.signed is None for key in signed):
        chosen.activations.update(dict.fromkeys(signed, "uint8"))
