"""What all functions of a program share: fresh names and numbers, and which operations may stand in it."""

from __future__ import annotations

from collections import Counter


class Numbers:
    """Numbers for statements, names for variables and classes: each once in a program. `has_rarer`: of the rarer operations too."""

    def __init__(self, *, has_rarer: bool = False) -> None:
        self.has_rarer = has_rarer
        self._given = Counter[str]()

    def number(self) -> int:
        self._given["statement"] += 1
        return self._given["statement"]

    def name(self, stem: str) -> str:
        self._given[stem] += 1
        return f"{stem}{self._given[stem] - 1}"
