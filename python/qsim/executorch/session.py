"""Programs of ExecuTorch, run here."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, Any]


def is_installed() -> bool:
    """Whether ``import executorch`` finds a package."""
    return find_spec("executorch") is not None


class ExecutorchSession:
    """A program run as `onnxruntime.InferenceSession` is.

    Parameters
    ----------
    source : Path or bytes
        A ``.pte`` file, or what is in one.
    """

    def __init__(self, source: Path | bytes) -> None:
        from executorch.runtime import Runtime

        self.version = version()
        self._held = source, Runtime.get().load_program(source)  # a method reads both, and keeps neither
        self._method = self._held[1].load_method("forward")

    def run(self, names: None, inputs: Mapping[str, Any]) -> list[Array]:
        """All outputs, in order. Inputs go by their order, not by their names."""
        given = [torch.from_numpy(x) if isinstance(x, np.ndarray) else x for x in inputs.values()]
        return [t.detach().numpy().copy() if isinstance(t, Tensor) else np.asarray(t) for t in self._method.execute(given)]


def version() -> str:
    """Of ExecuTorch."""
    from importlib.metadata import version as of

    return of("executorch")
