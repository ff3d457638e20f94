"""What is known of functions wherever a model calls them, and the calls of a container that are followed without Python."""

from __future__ import annotations

import functools
from typing import Any

from torch._ops import HigherOrderOperator

from qsim._library import KnownCalls
from qsim.graph.execute.inputs import with_outputs
from qsim.graph.execute.shortcuts import Shortcut
from qsim.graph.record.tape import options
from qsim.operations.functions import (
    ALIAS,
    COMPOSITE,
    LEFT_OUTSIDE,
    METRICS,
    RANDOM,
    SOMETIMES_SUMS,
    TRANSPARENT,
    Function,
    adds_up,
    name_of,
    route_name,
)

QUIET_NAMES = TRANSPARENT | RANDOM | METRICS
FUNCTION_NAMES: dict[Function, str] = {}  # as keys have them; looking one up is cheaper than making it
_quiet: set[Function] = set()  # those of which no result needs a quantizer, whatever the arguments, and which run as they are


def note_function(func: Function) -> str:
    """The function's name, as keys have it, from now on in `FUNCTION_NAMES`."""
    name = FUNCTION_NAMES[func] = route_name(func).strip("_")
    is_special = name in COMPOSITE or name in LEFT_OUTSIDE or name in ALIAS or isinstance(func, HigherOrderOperator)
    if (quiet := _quiet_name(func)) is not None and quiet not in SOMETIMES_SUMS and not is_special:
        _quiet.add(func)
    return name


def is_quiet(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether what a function returns need not be quantized, wherever it is called."""
    name = _quiet_name(func)
    return name is not None and not (name in SOMETIMES_SUMS and adds_up(name, dict(options(args, kwargs))))


@functools.cache
def _quiet_name(func: Function) -> str | None:
    return name if (name := name_of(func)) in QUIET_NAMES else None


def known_calls(
    asked: set[str], nodes_of: list[list[int | None]], width: int, floats: list[Any], weights: list[Any], looked_at: set[int]
) -> KnownCalls:
    """Of a `Place`, whose attributes these are: `names`, and others by their names. `looked_at`: nodes that Python meets all the same."""
    return KnownCalls(FUNCTION_NAMES, asked, _quiet, nodes_of, width, floats, weights, looked_at, with_outputs, Shortcut)
