"""Activations that are the product of their operand and a gate: written out, so that the gate can be quantized too.

SiLU is ``x * sigmoid(x)`` (Elfwing et al., 2018, section 2), HardSwish ``x * hardsigmoid(x)`` (Howard et al., 2019, section 5.2).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qsim.operations.functions import Function

# By the activation's name: what computes its gate, and the gate's ONNX type.
GATES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "silu": (torch.sigmoid, "Sigmoid"),
    "hardswish": (F.hardsigmoid, "HardSigmoid"),
}
RANGE = (0.0, 1.0)  # of every gate
_IN_PLACE = (torch._C._nn.silu_, torch._C._nn.hardswish_)  # others have an argument for it


class Gated:
    """Runs such an activation with its gate quantized: ``x * quantize(gate(x))``.

    Parameters
    ----------
    op : str
        One of `GATES`.
    quantize : callable
        Of the gate.
    """

    def __init__(self, op: str, quantize: Callable[[Tensor], Tensor]) -> None:
        self.gate, self.quantize = GATES[op][0], quantize

    def __call__(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        given = [*args, *kwargs.values()]
        x: Tensor = given[0]
        if func not in _IN_PLACE and True not in given[1:]:
            return x * self.quantize(self.gate(x))
        if torch.is_grad_enabled():  # the factors are needed as they were
            return x.copy_(x.clone() * self.quantize(self.gate(x.clone())))
        return x.mul_(self.quantize(self.gate(x)))
