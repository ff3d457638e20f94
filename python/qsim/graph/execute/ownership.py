"""Whether the memory of a tensor is nobody else's, asked in the very call that would write into it.

A recording shows who read a tensor, not who may: a branch that no example took, a list, a hook, a backward pass. Here nothing is assumed.
References are counted, and compared with how many there are when one variable holds the tensor and nothing else does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FrameType, MethodDescriptorType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qsim.graph.execute.liveness import is_given_away
from qsim.graph.record.call_sites import call_site, kind_of_code
from qsim.graph.record.resume import checkpoint_hooks

SMALLEST = 1 << 14  # elements: below, writing in place saves less than asking takes


def is_alone(t: Tensor) -> bool:
    """Whether a tensor lies in memory that no other tensor shares, that no backward pass keeps, and that is no view's.

    Never under a checkpoint: that keeps nothing the first time and a tensor the second, and wants both runs to do the same."""
    if type(t) is not Tensor or t.numel() < SMALLEST or t._is_view() or t._use_count() != 1:  # type: ignore[attr-defined]
        return False
    if torch._C._storage_Use_Count(t.untyped_storage()._cdata) != 2:  # the tensor, and the object that was asked
        return False
    return checkpoint_hooks() is None


def dies(args: tuple[Any, ...], kwargs: dict[str, Any], func: Callable[..., Any], frame: FrameType) -> bool:
    """Whether nothing reads the first argument of a call again.

    Parameters
    ----------
    args, kwargs
        As `__torch_function__` got them. The method of a mode that asks, and the frames above it, have no other reference to what is
        in it.
    func : callable
    frame : frame
        The one above `__torch_function__`.
    """
    if sys.gettrace() is not None or not args or not is_alone(args[0]):  # a debugger looks at variables
        return False
    way: list[FrameType] = []
    while frame.f_back is not None and _leads(frame):
        if frame.f_code.co_name == "inner":  # of `nn.Module.__call__`, which shows arguments to hooks
            return False
        way.append(frame)
        frame = frame.f_back
    is_method = not way and isinstance(func, MethodDescriptorType)
    held = is_given_away(frame.f_code, frame.f_lasti, len(args) + len(kwargs) if is_method else None)
    if held is None:
        return False
    key: tuple[int | CodeType, ...] = (_handed_down(object()), *(step.f_code for step in way))
    if key not in _least:
        leaf = next((step.f_locals["self"] for step in way if kind_of_code(step.f_code) == "kept"), None)
        _least[key] = _references(func, args[1:]) if leaf is None else _references(leaf)
    return sys.getrefcount(args[0]) == _least[key] - (not held)


_least: dict[tuple[int | CodeType, ...], int] = {}  # references on a way to a mode, where one variable alone holds the tensor


def _leads(frame: FrameType) -> bool:
    """Whether a function only leads from what a program calls to the mode: `nn.Module.__call__`, the forward of a leaf, `F.relu` ..."""
    kind, above = kind_of_code(frame.f_code), frame.f_back
    if kind == "kept" and above is not None and frame.f_code is not nn.Sequential.forward.__code__:
        return kind_of_code(above.f_code) in ("module call", "layer")
    return kind in ("dropped", "module call", "layer")


def _references(call: Callable[..., Any], others: tuple[Any, ...] = ()) -> int:
    """How many references there are to the first argument of a call where one variable alone holds it, counted as `dies` does. `others`:
    further arguments, for functions that want some: spread out, they would be counted in another way. -1 if that cannot be told."""
    x = torch.empty(1)
    with torch._C._EnableTorchFunction(), _Counting() as counting:
        try:
            call(x)
        except TypeError:
            if len(others) != 1:
                return -1
            call(x, others[0])
    return int(counting.found)


class _Counting(TorchFunctionMode):
    """Counts where `dies` does, and computes nothing."""

    found = 0

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        call_site(sys._getframe(1))  # as a mode does, which before Python 3.13 leaves references behind
        return self.met(args)

    def met(self, args: tuple[Any, ...]) -> Any:
        self.found = _count(args)
        return args[0]


def _handed_down(x: object) -> int:
    """How many references there are to what one function hands to another: fewer where Python runs both in one loop, which it does not
    once Dynamo looks at frames."""
    return sys.getrefcount(x)


def _count(args: tuple[Any, ...]) -> int:
    return sys.getrefcount(args[0])
