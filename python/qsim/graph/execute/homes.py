"""Stacks of weights, quantized in the modules that have them: what a forward gets of ``self.experts`` is on its grid.

`qsim.graph.execute.simulated.home_property` stands before the parameter.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from qsim.graph.execute.lowered import Quantize
from qsim.graph.execute.marks import Mark
from qsim.graph.execute.shortcuts import Kept, is_plain_eager
from qsim.graph.execute.switch import Switch
from qsim.graph.plan.actions import Post, QuantizationPlan
from qsim.quantizers.quantizer import Quantizer


class Home:
    """One stack in its module.

    Parameters
    ----------
    key : str
        Of its quantizer.
    quantizer : Quantizer
    kept : Kept
    readers : list of Post
        The operations that read it.
    """

    def __init__(self, key: str, quantizer: Quantizer, kept: Kept, readers: list[Post]) -> None:
        self.key, self.quantizer, self.kept, self.readers = key, quantizer, kept, readers
        self.falls = False  # all that read it fall back: they round it themselves

    def fall_back(self, formats: Mapping[str, str]) -> None:
        """From now on the operations in `formats` fall back."""
        self.falls = not any(post.is_integer(formats) for post in self.readers)

    def quantized(self, parameter: Tensor, switch: Switch) -> Tensor:
        """The parameter on its grid, or marked."""
        with torch._C.DisableTorchFunction():
            if switch.marks:
                return Mark(self.key)(parameter)
            quantize: Quantize = self.kept if switch.saves and is_plain_eager() else self.quantizer
            return quantize(parameter)


def homes_of(path: str, plan: QuantizationPlan, quantizers: Mapping[str, Quantizer], kept: dict[tuple[str, ...], Kept]) -> dict[str, Home]:
    """The stacks that the module at a path has, by their names there."""
    found = {}
    for key, readers in plan.stacks.items():
        owner, _, name = key.rpartition(".")
        if owner == path:
            found[name] = Home(key, quantizers[key], kept.setdefault((key,), Kept(quantizers[key])), readers)
    return found
