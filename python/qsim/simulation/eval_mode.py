"""Notices that a simulation is trained while it is in eval mode, where BatchNorm, dropout and running ranges stand still."""

from __future__ import annotations

import torch
from torch import nn

from qsim.warning import warn


class EvalMode:
    """What calls in eval mode saw since the simulation was put into it.

    A simulation starts in eval mode, and loops that keep the mode of what they are given (Lightning's) would train it there.
    """

    def __init__(self) -> None:
        self.begin()

    def __reduce__(self) -> tuple[type[EvalMode], tuple[()]]:
        """Of a copy, or what is pickled, nothing was seen: its parameters count their versions anew."""
        return EvalMode, ()

    def begin(self) -> None:
        self._seen: int | None = None
        self._told = False

    def look(self, sim: nn.Module) -> None:
        """Warn, once, if a parameter was written to between two calls in eval mode that record gradients."""
        if sim.training or torch.compiler.is_compiling() or self._told or not torch.is_grad_enabled():
            return
        parameter = next((p for p in sim.parameters() if p.requires_grad), None)
        if type(parameter) is not nn.Parameter or parameter.is_inference():  # shards and the like have versions of their own
            return
        if self._seen not in (None, parameter._version):
            self._told = True
            warn(
                "QuantSim: its parameters change while it is in eval mode, where BatchNorm, dropout and running ranges stand still. "
                "To train it, call sim.train() before; Lightning's Trainer keeps the mode that it finds, so call it before trainer.fit()"
            )
        self._seen = parameter._version
