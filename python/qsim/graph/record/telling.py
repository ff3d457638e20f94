"""Notes that are more than notes."""

from __future__ import annotations


class Telling(str):
    """A sentence on what changes a number and was not asked for: a report lists it like any other, and it is warned of once.

    Examples
    --------
    >>> [note for note in ("a", Telling("b")) if isinstance(note, Telling)]
    ['b']
    """
