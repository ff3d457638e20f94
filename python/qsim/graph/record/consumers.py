"""Who asks a generator for its next element, which Dynamo does not tell: it takes a generator expression for a call of the function that it
is written in, and what a generator function returns for a call where that was called."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import CodeType
from typing import TypeVar

T = TypeVar("T")
_COMPREHENSIONS = "<listcomp>", "<setcomp>", "<dictcomp>"  # functions of their own, before Python 3.12


def without_consumers(spots: Sequence[T], codes: Sequence[CodeType]) -> tuple[T, ...]:
    """The expressions on a stack, innermost first, without those that stand between a generator expression and the function that it is
    written in, such as the list of ``[f(y) for y in (g(x) for g in gs)]``, and without comprehensions over what generator functions return.
    `codes`: what each is in.

    One whose function has returned, or does not stand there, keeps all.
    """
    kept, at = [], 0
    while at < len(spots):
        kept.append(spots[at])
        at += 1
        code = codes[at - 1]
        if not code.co_flags & inspect.CO_GENERATOR:
            continue
        if code.co_name == "<genexpr>":
            at = next((above for above in range(at, len(codes)) if any(code is constant for constant in codes[above].co_consts)), at)
        else:
            while at < len(codes) and codes[at].co_name in _COMPREHENSIONS:
                at += 1
    return tuple(kept)
