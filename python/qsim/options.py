"""What options may be: errors that say what was got, what was expected, and from whom."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from numbers import Integral, Real
from typing import Any

_LONGEST = 100  # characters of a value in an error


def check_whole(caller: str, name: str, value: Any, *, least: int, otherwise: str = "") -> None:
    """Raise a TypeError unless `value` is an integer, which True is not, and a ValueError where it is less than `least`.

    Parameters
    ----------
    caller : str
        Who was called: "QuantSim.restore".
    name : str
        Of the option.
    otherwise : str
        What else may be given: "None for all".

    Examples
    --------
    >>> check_whole("QuantSim.restore", "steps", -1, least=0)
    Traceback (most recent call last):
        ...
    ValueError: QuantSim.restore: got steps=-1; expected at least 0
    """
    _check(caller, name, value, isinstance(value, Integral) and not isinstance(value, bool), "an integer, ", least, otherwise)


def check_number(caller: str, name: str, value: Any, *, least: float, otherwise: str = "") -> None:
    """The same for any number that is not NaN.

    Examples
    --------
    >>> check_number("qsim.quantize", "seconds", "60", least=0, otherwise="None for no limit")
    Traceback (most recent call last):
        ...
    TypeError: qsim.quantize: got seconds='60'; expected a number, at least 0, or None for no limit
    """
    _check(caller, name, value, isinstance(value, Real) and not isinstance(value, bool), "a number, ", least, otherwise)


def check_function(caller: str, name: str, value: Any, call: str) -> None:
    """Raise a TypeError unless `value` can be called. `call`: how it is: "forward(model, batch)".

    Examples
    --------
    >>> check_function("QuantSim.distill", "loss", None, "loss(got, wanted) -> Tensor")
    Traceback (most recent call last):
        ...
    TypeError: QuantSim.distill: got loss=None; expected a function, loss(got, wanted) -> Tensor
    """
    if not callable(value):
        raise TypeError(f"{caller}: got {name}={shown(value)}; expected a function, {call}")


def shown(value: Any, longest: int = _LONGEST) -> str:
    """A value as an error shows it: as Python writes it where that is short, otherwise its type.

    Examples
    --------
    >>> shown("60"), shown([0.5] * 1000)
    ("'60'", 'a list')
    """
    text = repr(value)
    return text if len(text) <= longest and "\n" not in text else f"a {type(value).__name__}"


def check_flag(caller: str, name: str, value: Any) -> None:
    """Raise a TypeError unless `value` is True or False: "no" is as true as "yes" to Python.

    Examples
    --------
    >>> check_flag("QuantSim.sensitivity", "higher_is_better", "no")
    Traceback (most recent call last):
        ...
    TypeError: QuantSim.sensitivity: got higher_is_better='no'; expected True or False
    """
    if not isinstance(value, bool):
        raise TypeError(f"{caller}: got {name}={shown(value)}; expected True or False")


def check_patterns(caller: str, patterns: Iterable[Any]) -> None:
    """Raise a TypeError unless all are names or globs.

    Examples
    --------
    >>> check_patterns("QuantSim.disable", [["head"]])
    Traceback (most recent call last):
        ...
    TypeError: QuantSim.disable: got the pattern ['head']; expected a name or glob, such as 'layer4.*'
    """
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"{caller}: got the pattern {shown(pattern)}; expected a name or glob, such as 'layer4.*'")


def _check(caller: str, name: str, value: Any, fits: bool, kind: str, least: float, otherwise: str) -> None:
    error: Callable[[str], Exception] = ValueError if fits else TypeError
    if not fits or math.isnan(value) or value < least:
        more = f", or {otherwise}" if otherwise else ""
        raise error(f"{caller}: got {name}={shown(value)}; expected {'' if fits else kind}at least {least}{more}")
