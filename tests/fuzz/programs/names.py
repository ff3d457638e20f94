"""Fresh names and numbers."""

from __future__ import annotations

from collections import Counter


class Numbers:
    """Numbers for statements, names for variables and classes: each once in a program."""

    def __init__(self) -> None:
        self._given = Counter[str]()

    def number(self) -> int:
        self._given["statement"] += 1
        return self._given["statement"]

    def name(self, stem: str) -> str:
        self._given[stem] += 1
        return f"{stem}{self._given[stem] - 1}"
