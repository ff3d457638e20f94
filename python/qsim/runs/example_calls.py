"""The calls that a model was recorded on, kept to look at it again: to fold, to trace."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from qsim.runs.arguments import Arguments
from qsim.runs.batches import to_device
from qsim.runs.runnable import first_float


class ExampleCalls:
    """Example calls that go where the model goes: to its device, and from the float type that it computed in to the one that it does.

    Parameters
    ----------
    calls : sequence of (tuple, dict)
        Their tensors are detached, not copied.
    model : nn.Module
        As it was when they ran.
    """

    def __init__(self, calls: Sequence[Arguments], model: nn.Module) -> None:
        self._calls: list[Arguments] = tree_map_only(Tensor, Tensor.detach, list(calls))
        self._type = _float_type(model)

    def beside(self, model: nn.Module) -> list[Arguments]:
        """The calls as `model` takes them now. They are brought there once: some ask with every batch."""
        was, now = self._type, _float_type(model)
        if was is not None and now is not None and was != now:
            self._calls = tree_map_only(Tensor, lambda t: t.to(now) if t.dtype == was else t, self._calls)
            self._type = now
        self._calls = [to_device(call, model) for call in self._calls]
        return self._calls


def _float_type(model: nn.Module) -> torch.dtype | None:
    first = first_float(model)
    return None if first is None else first.dtype
