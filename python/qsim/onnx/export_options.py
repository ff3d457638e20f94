"""How a model is written. Apart from what writes it, so that nothing imports onnx before it is needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Options:
    """How a model is written; `QuantSim.export` documents them."""

    opset: int | None = None
    dynamic_batch: bool = True
    dynamic_shapes: Any = None
    input_names: Sequence[str] | None = None
    output_names: Sequence[str] | None = None
    external_data: bool | None = None
    accuracy_level: int | None = 1

    def __post_init__(self) -> None:
        for field in ("input_names", "output_names"):
            names = getattr(self, field)
            listed = isinstance(names, Sequence) and not isinstance(names, str) and all(isinstance(name, str) for name in names)
            if names is not None and not listed:
                raise TypeError(f"QuantSim.export: got {field}={names!r}; expected a list of names, such as ['image']")
