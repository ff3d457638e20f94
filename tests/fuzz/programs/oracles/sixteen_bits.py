"""At 16 bits the simulation is within 60 dB of float on every path that the example took."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import qsim

from ..case import Case, Failure, Undecided
from ..ir import Apply, Hold, Remember, all_statements
from ..loaded import Call
from ..operations import TABLE
from ..results import sqnr, tensors_of
from ..running import quietly, same_state

_WANTED, _MARGIN = 60.0, 8.0


class _Rounding(TorchFunctionMode):
    """Adds to every result what rounding to 16 bits would: how well the program is conditioned."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            out = func(*args, **(kwargs or {}))
            for t in tensors_of(out):
                wrapped = torch._C._functorch.is_functorch_wrapped_tensor(t)
                if not wrapped and t.is_floating_point() and t.numel() > 1 and t._base is None and not isinstance(t, nn.Parameter):
                    _add_noise(t)
            return out


def _add_noise(t: Tensor) -> None:
    with torch.no_grad():
        t.data += t.detach().abs().max() * 2.0**-16 * (torch.rand(t.shape, dtype=t.dtype) * 2 - 1)


def sixteen_bits_are_near(case: Case) -> Failure | None:
    statements = list(all_statements(case.program))
    if any(isinstance(s, Apply) and TABLE[s.operation].rough for s in statements):
        raise Undecided("a program that jumps")
    has_state = any(isinstance(s, Remember) or (isinstance(s, Hold) and s.how == "attribute") for s in statements)
    calls = [call for call in case.calls if call.recorded][:2]
    sequence = calls * 2 if has_state else calls
    sim = case.simulation(qsim.int16(), data=sequence)
    with same_state(sim.model):
        found = _steps(case, sim, sequence)
    expected, noisy = _steps(case, case.float_model(), sequence), _steps(case, _perturbed(case), sequence, noise=True)
    for step, (theirs, ours, rough) in enumerate(zip(expected, found, noisy, strict=True)):
        for i, (a, b, c) in enumerate(zip(theirs, ours, rough, strict=True)):
            if a.shape != b.shape:
                return Failure("16 bits", "shapes", f"step {step}: {tuple(b.shape)}, expected {tuple(a.shape)}")
            conditioned = sqnr(c, a)
            if sqnr(b, a) < _WANTED and conditioned > _WANTED + _MARGIN:
                numbers = f"result {i} of step {step} has {sqnr(b, a):.1f} dB; {conditioned:.1f} with noise of 16 bits"
                return Failure("16 bits", "state" if has_state else "no state", numbers)
    return None


def _perturbed(case: Case) -> nn.Module:
    model = case.float_model()
    for p in model.parameters():
        _add_noise(p)
    return model


def _steps(case: Case, model: nn.Module, calls: list[Call], *, noise: bool = False) -> list[list[Tensor]]:
    """Results of several calls, of which each finds what the one before left."""
    found = []
    model.eval()
    torch.manual_seed(case.program.seed)
    with torch.no_grad(), quietly(), _Rounding() if noise else contextlib.nullcontext():
        for call in calls:
            args, kwargs = case.loaded.arguments(call, torch.float32)
            found.append([t.clone() for t in tensors_of(model(*args, **kwargs))])
    return found
