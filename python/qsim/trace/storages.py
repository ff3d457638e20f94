"""What each quantizer's numbers are stored in, in the model for a target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from qsim.quantizers.quantizer import Quantizer
from qsim.trace.mark_uses import Marked
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


def storages(marked: Marked, quantizers: Mapping[str, Quantizer], target: Runtime) -> Storages:
    """Choose types for a graph that the target can express."""
    chosen = Storages()
    for key, uses in marked.uses.items():
        encoding = quantizers[key].encoding
        if quantizers[key].enabled and encoding is not None:
            for constant in uses:
                (chosen.constants if constant else chosen.activations)[key] = str(target.storage(encoding, constant))
    if target.only8:
        _widen_weights(chosen, quantizers)
        _sign_activations(chosen, quantizers)
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


def _sign_activations(chosen: Storages, quantizers: Mapping[str, Quantizer]) -> None:
    """Without VNNI, sums of two products of uint8 and int8 saturate at 16 bits unless weights have 7 bits; int8 with int8 is exact."""
    ends = [
        max(-quantizers[key].spec.quant_min, quantizers[key].spec.quant_max) for key, dtype in chosen.constants.items() if "int" in dtype
    ]
    unsigned = [key for key, dtype in chosen.activations.items() if dtype == "uint8"]
    if max(ends, default=0) <= 64 or not unsigned:
        return
    for key in unsigned:
        chosen.activations[key] = "int8"
    chosen.notes.append(
        f"{len(unsigned)} uint8 activations are written as int8, 128 lower: the same values. Products of uint8 with 8-bit weights "
        "saturate on CPUs without VNNI; with weights of 7 bits, Config.override(weight={'bits': 7}), they stay uint8"
    )
