"""One call of a model: its results and gradients, from the same state and random numbers whenever it is made."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from .loaded import Call, Loaded, device
from .results import tensors_of

MODES = ("no_grad", "grad", "train")


@dataclass
class Outcome:
    """What a call gave: clones of its results, gradients of the parameters by name and of the inputs, and what came out itself."""

    results: list[Tensor]
    gradients: dict[str, Tensor | None]
    live: list[Tensor]


def run(model: nn.Module, loaded: Loaded, call: Call, mode: str, dtype: torch.dtype, *, of: nn.Module | None = None) -> Outcome:
    """Call `model`.

    Parameters
    ----------
    mode : str
        "no_grad": evaluation; "grad": evaluation with gradients, of the inputs too; "train": training mode with gradients;
        "train inputs": of the inputs too.
    of : nn.Module
        Whose parameters the gradients are of, if `model` is a wrapper or compiled.
    """
    owner, training = model if of is None else of, mode.startswith("train")
    for each in (model, owner):
        if any(m.training != training for m in each.modules()):  # a call of its own, which may have effects
            each.train(training)
    torch.default_generator.manual_seed(loaded.program.seed)  # torch.manual_seed looks for devices, a seventh of all the time
    if device().type == "cuda":
        torch.cuda.manual_seed(loaded.program.seed)
    given = {name: t.to(dtype).clone() if t is not None and t.is_floating_point() else t for name, t in call.tensors.items()}
    leaves = {name: t for name, t in given.items() if t is not None and t.is_floating_point()}
    packed = loaded.module.arguments(**given)
    args, kwargs = (packed, dict(call.flags)) if isinstance(packed, tuple) else ((), {**packed, **call.flags})
    if mode == "no_grad":
        with torch.no_grad():
            live = tensors_of(model(*args, **kwargs))
        return Outcome([t.detach().clone() for t in live], {}, [*live, *leaves.values()])
    owner.zero_grad()
    for t in leaves.values():
        t.requires_grad_(mode != "train")
    live = tensors_of(model(*args, **kwargs))
    results = [t.detach().clone() for t in live]
    total = sum((weighted(t) for t in live if t.requires_grad), torch.zeros((), dtype=dtype))
    if total.requires_grad:
        total.backward()
    gradients = {name: None if p.grad is None else p.grad.detach().clone() for name, p in owner.named_parameters()}
    gradients |= {f"input {name}": None if t.grad is None else t.grad.detach().clone() for name, t in leaves.items()}
    return Outcome(results, gradients, [*live, *leaves.values()])


def lines_run(model: nn.Module, loaded: Loaded, call: Call) -> set[int]:
    """The lines of the program that a call in evaluation runs."""
    file, found = loaded.module.__file__, set[int]()

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename != file:
            return None
        found.add(frame.f_lineno)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with quietly():
            run(model, loaded, call, "no_grad", torch.float32)
    finally:
        sys.settrace(before)
    return found


def weighted(t: Tensor) -> Tensor:
    """A number whose gradient is another for every element of `t`."""
    return (t * torch.linspace(-1, 1, t.numel(), dtype=t.dtype, device=t.device).reshape(t.shape)).sum()


@contextlib.contextmanager
def same_state(model: nn.Module) -> Iterator[None]:
    """Put buffers back that the forward wrote."""
    before = [(b, b.detach().clone()) for b in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, contents in before:
                buffer.copy_(contents)


@contextlib.contextmanager
def quietly() -> Iterator[list[warnings.WarningMessage]]:
    """Note warnings instead of printing them."""
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        yield noted
