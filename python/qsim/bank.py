"""The quantizers of a simulation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from operator import attrgetter

import torch
from torch import Tensor, nn

from qsim.graph.actions import PlannedQuantizer
from qsim.observer import encoding_of_range
from qsim.quantizer import Quantizer


class QuantizerBank(nn.Module):
    """All quantizers of a simulation, flat: containers refer to them without owning them."""

    def __init__(self, model: nn.Module, planned: Mapping[str, PlannedQuantizer], known: Mapping[str, Quantizer]) -> None:
        super().__init__()
        self._keys = list(planned)
        first: Tensor | None = next(chain(model.parameters(), model.buffers()), None)
        for key, decided in planned.items():
            parameter: Tensor | None = attrgetter(decided.parameter)(model) if decided.parameter else None
            quantizer = known.get(key) or Quantizer(decided.spec, None if parameter is None else parameter.shape, key)
            beside = first if parameter is None else parameter
            if decided.range is not None:
                low, high = map(torch.tensor, decided.range)
                quantizer.set_encoding(encoding_of_range(low, high, decided.spec))
            # nn.Module allows no dots in names; "/" keeps them readable in state dicts
            self._modules[key.replace(".", "/")] = quantizer if beside is None else quantizer.to(beside.device)

    def items(self) -> Iterable[tuple[str, Quantizer]]:
        """The quantizers by their names as modules."""
        return self._modules.items()  # type: ignore[return-value]

    def by_key(self) -> dict[str, Quantizer]:
        return dict(zip(self._keys, self._modules.values(), strict=True))  # type: ignore[arg-type]
