"""Calls whose arguments do not fit the signature: errors that say what was got, and what is there."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Class = TypeVar("_Class", bound=type)
_KINDS = inspect.Parameter
_ANY_NUMBER = (_KINDS.VAR_POSITIONAL, _KINDS.VAR_KEYWORD)
_LONGEST = 30  # characters of a default in an error


def tells_arguments(name: str = "", advice: str = "") -> Callable[[_Function], _Function]:
    """A function whose TypeErrors of calls that do not fit say so in our words; a call that fits costs one call more.

    Parameters
    ----------
    name : str
        What it is called: "QuantSim.calibrate". By default its own name.
    advice : str
        What to do instead where a keyword is like none that there is.

    Examples
    --------
    >>> @tells_arguments("qsim.sum", "Numbers come as a list.")
    ... def added(values, *, start=0): ...
    >>> added([1], begin=2)
    Traceback (most recent call last):
        ...
    TypeError: qsim.sum: got the argument 'begin'; expected qsim.sum(values, *, start=0). Numbers come as a list.
    """

    def decorated(function: _Function) -> _Function:
        misfit = _misfit  # a variable of this one, since the globals below are others

        def told(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except TypeError:
                found = misfit(function, args, kwargs, name, advice)
                if found is None:
                    raise
                raise found from None

        code = told.__code__.replace()  # one of its own: Dynamo keeps what it compiled with it, and gives up at the ninth
        at_home = types.FunctionType(code, function.__globals__, closure=told.__closure__)  # type: ignore[attr-defined]
        return cast(_Function, functools.update_wrapper(at_home, function))  # where doctest and Sphinx look for it

    return decorated


def tells_construction(advice: str) -> Callable[[_Class], _Class]:
    """The same for what makes the objects of a class. `advice` as in `tells_arguments`.

    Examples
    --------
    >>> from dataclasses import dataclass
    >>> @tells_construction("")
    ... @dataclass
    ... class Point:
    ...     x: int
    ...     y: int = 0
    >>> Point(1, z=2)
    Traceback (most recent call last):
        ...
    TypeError: Point: got the argument 'z'; expected Point(x, y=0)
    """

    def decorated(cls: _Class) -> _Class:
        cls.__init__ = tells_arguments(cls.__name__, advice)(cls.__init__)  # type: ignore[misc]
        return cls

    return decorated


def _misfit(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], name: str, advice: str) -> TypeError | None:
    """The error in place of Python's; None where the arguments do fit, so that it was raised within."""
    signature = inspect.signature(function)
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        parameters = {key: p for key, p in signature.parameters.items() if key != "self"}
        name = name or function.__name__
        expected = f"expected {name}({', '.join(_shown(parameters))})"
        unknown = next((key for key in kwargs if key not in parameters), None)
        positional = [key for key, p in parameters.items() if p.kind in (_KINDS.POSITIONAL_ONLY, _KINDS.POSITIONAL_OR_KEYWORD)]
        given = len(args) - (len(parameters) < len(signature.parameters))
        if unknown is not None:
            return TypeError(f"{name}: got the argument {unknown!r}; {expected}{_close(unknown, parameters) or (advice and f'. {advice}')}")
        if given > len(positional):
            return TypeError(f"{name}: got {given} arguments by position; {expected}")
        needed = [key for key, p in parameters.items() if p.default is p.empty and p.kind not in _ANY_NUMBER]
        lacking = [f"no {key!r}" for key in needed if key not in (*kwargs, *positional[:given])]
        return TypeError(f"{name}: got {' and '.join(lacking) or 'an argument twice'}; {expected}")
    return None


def _shown(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    """Parameters as a call writes them."""
    found, keywords = [], False
    for key, p in parameters.items():
        if p.kind is _KINDS.KEYWORD_ONLY and not keywords:
            found.append("*")
            keywords = True
        keywords = keywords or p.kind is _KINDS.VAR_POSITIONAL
        default = "" if p.default is p.empty else repr(p.default)
        shown = default if len(default) <= _LONGEST else "..."
        sign = "*" if p.kind is _KINDS.VAR_POSITIONAL else "**" if p.kind is _KINDS.VAR_KEYWORD else ""
        found.append(sign + key + (f"={shown}" if default else ""))
    return found


def _close(name: str, names: Mapping[str, Any]) -> str:
    from difflib import get_close_matches  # takes time to import, and is for errors alone

    close = get_close_matches(name, list(names), n=1, cutoff=0.6)
    close = close or [key for key in names if name in key or key in name][:1]
    return f"; close to it: {close[0]!r}" if close else ""
