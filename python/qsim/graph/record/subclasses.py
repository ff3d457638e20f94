"""Tensors of subclasses with a `__torch_function__` of their own, which torch calls in place of its functions.

A simulation takes a tensor for its numbers, whatever its class: names of axes, units and other notes that such classes carry change none.
Those that are no block of numbers, as nested ones, compute what they do in their `__torch_function__` alone: it runs. What another one
computes there, and torch's functions do not, is told.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from types import GeneratorType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily

from qsim.graph.record.own_arguments import own_arguments
from qsim.graph.record.tape import Tape
from qsim.graph.record.telling import Telling
from qsim.operations.functions import Function
from qsim.runs.arguments import Arguments, tensors_in
from qsim.runs.snapshot import plain_eager, unchanged

_Way = Callable[[], contextlib.AbstractContextManager[Any]]
_ORDINARY = (Tensor.__torch_function__.__func__, torch._C._disabled_torch_function_impl)  # type: ignore[attr-defined]


@functools.cache
def own_functions(types: tuple[type, ...]) -> tuple[type, ...]:
    """Those of the classes that have a `__torch_function__` of their own."""
    return tuple(cls for cls in types if getattr(cls.__torch_function__, "__func__", cls.__torch_function__) not in _ORDINARY)  # type: ignore[attr-defined]


@functools.cache
def computes_itself(types: tuple[type, ...]) -> bool:
    """Whether one of them, besides, holds no numbers itself: torch asks its `__torch_dispatch__` for them."""
    return any(cls.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl for cls in own_functions(types))  # type: ignore[attr-defined]


def as_dispatched(func: Function, types: tuple[type, ...]) -> Function:
    """What to call for a function of tensors of these classes: where one of them computes itself, what torch does where no mode is
    entered."""
    return _without_modes(func) if computes_itself(types) else func


@functools.cache
def _without_modes(func: Function) -> Function:

    @functools.wraps(func)
    def called(*args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as modes:
            for _ in range(torch._C._len_torch_function_stack()):
                modes.enter_context(_pop_mode_temporarily())  # type: ignore[no-untyped-call]
            with torch._C._EnableTorchFunction():  # type: ignore[attr-defined]
                return func(*args, **kwargs)

    return called


class _AsSimulated(TorchFunctionMode):
    """Has torch's functions take tensors as a simulation does."""

    def __torch_function__(self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        with torch._C.DisableTorchFunction():
            return as_dispatched(func, types)(*args, **kwargs or {})


def lost_functions(model: nn.Module, examples: Sequence[Arguments], tape: Tape) -> list[str]:
    """A sentence if the model computes something else without the functions of the classes that were met."""
    names = ", ".join(sorted({f"'{cls.__name__}'" for cls in tape.subclasses}))
    if not names or runs_alike(model, examples, tape, _AsSimulated):
        return []
    return [
        Telling(
            f"tensors of the class {names} have a __torch_function__ that computes more than torch's functions, and a simulation runs "
            "these alone: the rest is missing. Give plain tensors, x.as_subclass(torch.Tensor), or call it as a function"
        )
    ]


def runs_alike(model: nn.Module, examples: Sequence[Arguments], tape: Tape, way: _Way) -> bool:
    """Whether a model returns the same, but for rounding, within a context. It runs twice for each example, in evaluation."""
    return all(_is_equal(*(_results(model, example, tape, each) for each in (contextlib.nullcontext, way))) for example in examples)


def _results(model: nn.Module, example: Arguments, tape: Tape, way: _Way) -> list[Tensor]:
    with plain_eager(), unchanged(model, whole=False), torch.set_grad_enabled(tape.needs_gradients):  # as it was recorded
        (args, kwargs), _ = own_arguments(model, example)
        with way():
            found = model.eval()(*args, **kwargs)
            return list(_plain(list(found) if isinstance(found, GeneratorType) else found))


def _plain(found: Any) -> Iterator[Tensor]:
    with torch._C.DisableTorchFunction():
        for t in tensors_in(found):
            if t.is_nested:
                yield from (part.detach() for part in t.unbind())
            elif not computes_itself((type(t),)):  # of others the class alone knows the numbers
                yield t.as_subclass(Tensor).detach()


def _is_equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(
        a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=1e-3, atol=1e-6, equal_nan=True)
        for a, b in zip(ours, theirs, strict=True)
    )
