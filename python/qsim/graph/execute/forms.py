"""In which form a function mode is given the arguments of torch's functions that are written in Python.

`F.layer_norm(x, shape, weight)` arrives at an eager mode as `layer_norm` makes the call anew: the weight by its keyword. Dynamo does not
run the function, and hands on what the model wrote. Plans are of eager calls, so a compiled one is brought into their form.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from qsim.runs.arguments import Arguments

Form = tuple[tuple[str, ...], int]

# Functions that Dynamo goes through: what it shows is their function in C++, which takes the same arguments in this order.
GONE_THROUGH = (F.rms_norm,)


@functools.cache
def form_of(function: Callable[..., Any]) -> Form | None:
    """The names of a function's parameters, and how many of them an eager mode is given by position, the rest by keyword. None where it is
    given what the model wrote.

    Examples
    --------
    >>> import torch.nn.functional as F
    >>> form_of(F.layer_norm)
    (('input', 'normalized_shape', 'weight', 'bias', 'eps'), 2)
    >>> form_of(F.linear)
    """
    if not isinstance(function, FunctionType) or "handle_torch_function" not in function.__code__.co_names:
        return None
    try:
        parameters = inspect.signature(function).parameters
        names, given = tuple(parameters), [object() for _ in parameters]
        with _Caught():
            args, kwargs = function(*given)
    except Exception:  # a method in C++, or one that looks at its arguments before it asks
        return None
    if any(p.kind is not p.POSITIONAL_OR_KEYWORD for p in parameters.values()):
        return None
    same = list(args) == given[: len(args)] and all(kwargs.get(name) in (None, value) for name, value in zip(names, given, strict=True))
    return (names, len(args)) if same else None


class _Caught(TorchFunctionMode):
    """Returns what it is given."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        return args, kwargs or {}


def in_form(form: Form, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """The arguments of a call as an eager mode is given them."""
    names, positions = form
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    first = []
    for name in names[:positions]:
        if name not in given:
            break
        first.append(given.pop(name))
    return tuple(first), given


def drops_nothing(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False, *, train: bool = True) -> bool:
    """Whether a dropout, called with these arguments, returns its operand: torch.nn.functional says `training`, torch `train`."""
    return p == 0 or not (training and train)
