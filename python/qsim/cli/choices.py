"""Arguments that are one of some names, which lie in modules that take torch: imported when a name was given, not for --help; numbers."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from importlib import import_module


def one_of(module: str, name: str) -> Callable[[str], str]:
    """For ``type=`` of `argparse`: a key of the mapping, or a member of the collection, that is called `name` in `module`.

    Examples
    --------
    >>> one_of("qsim.trace.runtimes", "RUNTIMES")("tensorrt")
    'tensorrt'
    """

    def checked(given: str) -> str:
        names = list(getattr(import_module(module), name))
        if given not in names:
            raise argparse.ArgumentTypeError(f"got {given!r}; expected one of {', '.join(map(repr, names))}")
        return given

    return checked


def number(given: str) -> float:
    """For ``type=`` of `argparse`: a number that others can be compared with, so not NaN, beside which nothing is larger.

    Examples
    --------
    >>> number("1e-3")
    0.001
    """
    try:
        found = float(given)
    except ValueError:
        found = math.nan
    if math.isnan(found):
        raise argparse.ArgumentTypeError(f"got {given!r}; expected a number")
    return found
