"""The quantizers of a simulation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from qsim.graph.plan.actions import PlannedQuantizer
from qsim.quantizers.observer import encoding_of_range
from qsim.quantizers.quantizer import Quantizer

OPERATION_FORMATS = (
    "int",
    "float16",
    "bfloat16",
    "float32",
)  # what `operation_formats` holds are their positions: state dicts depend on the order


class QuantizerBank(nn.Module):
    """All quantizers of a simulation, flat: containers refer to them without owning them.

    Attributes
    ----------
    operation_formats : Tensor, uint8, shape [operations]
        What each operation of the simulation computes in, as a position in `OPERATION_FORMATS`.
    """

    operation_formats: Tensor

    def __init__(
        self, model: nn.Module, planned: Mapping[str, PlannedQuantizer], known: Mapping[str, Quantizer], operations: Sequence[str]
    ) -> None:
        super().__init__()
        self._keys, self._operations = list(planned), list(operations)
        first: Tensor | None = next(chain(model.parameters(), model.buffers()), None)
        for key, decided in planned.items():
            parameter: Tensor | None = attrgetter(decided.parameter)(model) if decided.parameter else None
            quantizer = known.get(key) or Quantizer(decided.spec, None if parameter is None else parameter.shape, key)
            quantizer.batched = parameter is None
            beside = first if parameter is None else parameter
            if decided.range is not None:
                low, high = map(torch.tensor, decided.range)
                quantizer.set_encoding(encoding_of_range(low, high, decided.spec))
            # nn.Module allows no dots in names; "/" keeps them readable in state dicts
            self._modules[key.replace(".", "/")] = quantizer if beside is None else quantizer.to(beside.device)
        on = None if first is None else first.device
        self.register_buffer("operation_formats", torch.zeros(len(self._operations), dtype=torch.uint8, device=on))

    @property
    def formats(self) -> dict[str, str]:
        """The float formats of the operations that fall back, by name."""
        return {name: OPERATION_FORMATS[code] for name, code in zip(self._operations, self.operation_formats.tolist(), strict=True) if code}

    @formats.setter
    def formats(self, formats: Mapping[str, str]) -> None:
        codes = [OPERATION_FORMATS.index(formats.get(name, "int")) for name in self._operations]
        self.operation_formats.copy_(torch.tensor(codes, dtype=torch.uint8))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        state_dict.setdefault(f"{prefix}operation_formats", self.operation_formats)  # states from before there were fallbacks
        super()._load_from_state_dict(state_dict, prefix, *args)

    def items(self) -> Iterable[tuple[str, Quantizer]]:
        """The quantizers by their names as modules."""
        return self._modules.items()  # type: ignore[return-value]

    def by_key(self) -> dict[str, Quantizer]:
        return dict(zip(self._keys, self._modules.values(), strict=True))  # type: ignore[arg-type]
