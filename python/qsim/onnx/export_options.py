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
