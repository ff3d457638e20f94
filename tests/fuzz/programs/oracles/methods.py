"""A method that is called by itself, past the forward, is simulated or said not to be; with simulation off it is the float model's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import qsim

from ..case import Case, Failure, Raised, Undecided, in_float, kept_batch_norms
from ..results import same_bits, tensors_of
from ..running import quietly, same_state

_PRODUCTS = (F.linear, torch.conv1d, torch.conv2d, torch.matmul, Tensor.matmul, Tensor.__matmul__)


class _Products(TorchFunctionMode):
    """Whether something is multiplied with a parameter, outside the modules that know themselves to be called."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.found = model, False

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reads = func in _PRODUCTS and any(isinstance(value, nn.Parameter) for value in args)
        self.found = self.found or (reads and self._is_outside(sys._getframe(1)))
        return func(*args, **(kwargs or {}))

    def _is_outside(self, frame: FrameType | None) -> bool:
        while frame is not None:
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module) and (module is self.model or list(module.children())):
                return module is self.model
            frame = frame.f_back
        return False


def methods_by_themselves(case: Case) -> Failure | None:
    methods = [helper for helper in case.program.root.helpers if helper.kind == "method"]
    if not methods:
        raise Undecided("no method")
    sim, given = case.simulation(kept_batch_norms(qsim.int8())), case.calls[0].tensors
    said = False  # once for each method, also for those that another one calls
    for helper in methods:
        operands = [given[name] for name in ("x", "z")[: len(helper.parameters)]]
        model = case.float_model()
        try:
            expected = _called(model, helper.name, operands)
            with _Products(model) as products:  # apart: under a mode a transformer's layers take another path
                _called(model, helper.name, operands)
        except Exception:
            continue
        try:
            with quietly() as noted, torch.no_grad(), same_state(sim.model):
                tensors_of(getattr(sim.model, helper.name)(*_copies(operands)))
            with in_float(sim):
                found = _called(sim.model, helper.name, operands)
        except Exception as error:
            raise Raised(f"a method by itself ({helper.name})", error) from error
        if problem := same_bits(found, expected):
            return Failure("methods", "off", f"{helper.name}: {problem}")
        said = said or any("was called by itself" in str(w.message) for w in noted)
        if products.found and not said:
            return Failure("methods", "without a word", f"{helper.name} multiplies with parameters")
    return None


def _called(model: nn.Module, method: str, operands: list[Tensor | None]) -> list[Tensor]:
    with torch.no_grad(), quietly(), same_state(model):
        return tensors_of(getattr(model, method)(*_copies(operands)))


def _copies(operands: list[Tensor | None]) -> list[Tensor]:
    return [t.float().clone() for t in operands if t is not None]
