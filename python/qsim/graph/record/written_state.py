"""What a model holds: the parameters and buffers that its forward writes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from qsim.graph.record.containers import full_name
from qsim.graph.record.tape import Origin, Tape, version_of


class Held:
    """Parameters and buffers as they were before a pass. The statistics of normalizations are not looked at."""

    def __init__(self, model: nn.Module) -> None:
        self._before = {name: (t, version_of(t)) for name, t in self._tensors(model)}

    def written(self, model: nn.Module, tape: Tape) -> dict[str, frozenset[Origin]]:
        """Those that were written to, or replaced, since, and where what is in them now came from."""
        now = dict(self._tensors(model))
        changed = {name for name, (t, version) in self._before.items() if now.get(name) is not t or version_of(t) != version}
        return {name: tape.origins(now[name]) | tape.origins_by_memory(now[name]) for name in changed & now.keys()}

    @staticmethod
    def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        for path, m in model.named_modules():
            if not isinstance(m, (_NormBase, torch.jit.ScriptModule)):
                for name, t in (*m.named_parameters(recurse=False), *m.named_buffers(recurse=False)):
                    yield full_name(path, name), t
