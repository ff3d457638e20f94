"""Where a program is while it runs: the calls that are under way, and what each of them has reached."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

Place = tuple[Any, ...]  # the module that runs, and the statements that lead there


class _Frame:
    """One call of one module, or of a part of it."""

    def __init__(self, owner: tuple[Any, ...]) -> None:
        self.owner, self.stack, self.passed, self.reached = owner, list[int](), Counter[Place](), set[Place]()


class Frames:
    """Attributes
    ----------
    leaf : int or None
        The layer that runs, by id.
    notes : bool
        Whether the calls that run now show what is always reached.
    skipped : set of Place
        What calls of a module did not reach, and each that was noted did.
    """

    def __init__(self) -> None:
        self.leaf: int | None = None
        self.notes = True
        self.skipped: set[Place] = set()
        self._always: dict[tuple[Any, ...], set[Place]] = {}
        self._frames: list[_Frame] = []

    @contextmanager
    def call(self, module: nn.Module, *parts: str) -> Iterator[None]:
        """Inside a call of a module; `parts` name a part of it that all its calls share, such as the cell of a recurrent layer."""
        self._frames.append(_Frame((id(module), *parts)))
        try:
            yield
        finally:
            frame = self._frames.pop()
            always = self._always.get(frame.owner, frame.reached if self.notes else set())
            if self.notes:
                self._always[frame.owner] = always & frame.reached
            else:
                self.skipped |= always - frame.reached

    @contextmanager
    def at(self, number: int) -> Iterator[None]:
        """Inside a statement."""
        stack = self._frames[-1].stack
        stack.append(number)
        try:
            yield
        finally:
            stack.pop()

    @contextmanager
    def layer(self, module: nn.Module) -> Iterator[None]:
        """Inside a call of a layer of one operation."""
        self.leaf = id(module)
        try:
            yield
        finally:
            self.leaf = None

    def key(self) -> tuple[Any, ...]:
        """The place of the operation that runs next: by the calls and statements that lead there, and how often they did before."""
        frame = self._frames[-1]
        place = (frame.owner, tuple(frame.stack))
        frame.passed[place] += 1
        frame.reached.add(place)
        return (*place, frame.passed[place] - 1)
