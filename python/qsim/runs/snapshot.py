"""Running a model without leaving a trace in it."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

# Of every module: parameters, buffers, children, and hooks, which a forward may install when it first runs (Hugging Face's do).
_REGISTRIES = tuple(name for name, held in vars(nn.Module()).items() if isinstance(held, (dict, set)))


class Snapshot:
    """What `model` is: the contents of its parameters and buffers, and every module's attributes, with its hooks.

    Costs one copy of the model's tensors.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [
            (m, dict(vars(m)), {name: copy.copy(vars(m)[name]) for name in _REGISTRIES if name in vars(m)})
            for m in model.modules()
            if not isinstance(m, torch.jit.ScriptModule)  # its attributes are not Python's
        ]
        self.tensors = [(t, t.detach().clone()) for t in (*model.parameters(), *model.buffers())]

    def restore(self) -> None:
        """Put everything back. What a forward appended to a list of its own stays."""
        for module, attributes, registries in self._modules:
            vars(module).clear()
            vars(module).update(attributes)
            for name, entries in registries.items():
                vars(module)[name].clear()
                vars(module)[name].update(entries)
        with torch.no_grad():
            for tensor, contents in self.tensors:
                tensor.data.copy_(contents)  # .data: no version bump, so a graph the caller still holds stays usable


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Undo on leaving, also by an exception, what the body did to `model` and to the random numbers of torch, Python and NumPy.

    Put back is what a `Snapshot` holds: training flags, what a forward assigns (counters, caches, replaced buffers, modules made on the
    first call), hooks.
    """
    before = Snapshot(model)
    state, numpy = random.getstate(), sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy else None
    with ExitStack() as stack:
        for kind, indices in _accelerators(before.tensors).items():
            stack.enter_context(torch.random.fork_rng(devices=sorted(indices), device_type=kind))
        try:
            yield
        finally:
            random.setstate(state)
            if numpy:
                numpy.random.set_state(numpy_state)
            before.restore()


def _accelerators(tensors: list[tuple[Tensor, Tensor]]) -> dict[str, set[int]]:
    """Indices of the model's devices by type. `cuda` is always there: forking it for no device forks the CPU's generator alone."""
    found: dict[str, set[int]] = {"cuda": set()}
    for tensor, _ in tensors:
        if tensor.device.index is not None and tensor.device.type not in ("cpu", "meta"):
            found.setdefault(tensor.device.type, set()).add(tensor.device.index)
    return found
