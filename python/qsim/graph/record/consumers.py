"""Who asks a generator expression for its next element, which Dynamo does not tell: it takes the expression for a call of the function
that it is written in."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import CodeType
from typing import TypeVar

T = TypeVar("T")


def without_consumers(spots: Sequence[T], codes: Sequence[CodeType]) -> tuple[T, ...]:
    """The expressions on a stack, innermost first, without those that stand between a generator expression and the function that it is
    written in, such as the list of ``[f(y) for y in (g(x) for g in gs)]``. `codes`: what each is in.

    One whose function has returned, or does not stand there, keeps all.
    """
    kept, at = [], 0
    while at < len(spots):
        kept.append(spots[at])
        at += 1
        code = codes[at - 1]
        if code.co_flags & inspect.CO_GENERATOR and code.co_name == "<genexpr>":
            at = next((above for above in range(at, len(codes)) if any(code is constant for constant in codes[above].co_consts)), at)
    return tuple(kept)
