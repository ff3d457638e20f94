"""A guard: what a simulation asks for where it assumes something, as the change that takes the question out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

Change = tuple[Any, str, Any]  # of an attribute: its owner, its name, what is there instead


@dataclass(frozen=True)
class Guard:
    """`premise`: what is asked; `changes`: take the question out; `oracles`: that may see it; `wants`: what the text of programs
    has that may need it."""

    premise: str
    changes: tuple[Change, ...]
    oracles: tuple[str, ...]
    wants: str = ""

    @contextlib.contextmanager
    def out(self) -> Iterator[None]:
        """Within the context nobody asks."""
        with contextlib.ExitStack() as undo:
            for owner, name, value in self.changes:
                undo.enter_context(patch.object(owner, name, value))
            yield

    @contextlib.contextmanager
    def watched(self) -> Iterator[list[bool]]:
        """Within the context it is asked, and noted whether the answer is ever another than nobody's."""
        answers: list[bool] = []
        with contextlib.ExitStack() as undo:
            for owner, name, value in self.changes:
                if isinstance(value, Answer):
                    undo.enter_context(patch.object(owner, name, value.beside(getattr(owner, name), answers)))
                else:
                    answers.append(True)
            yield answers


class Answer:
    """A function that gives one answer, whatever it is asked. `acts`: what it stands for is called for what it does."""

    def __init__(self, make: Callable[[], Any], *, acts: bool = False) -> None:
        self.make, self.acts = make, acts

    def __get__(self, instance: Any, owner: Any = None) -> Answer:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.make()

    def beside(self, asked: Callable[..., Any], answers: list[bool]) -> Callable[..., Any]:
        """What asks, and notes where this is not the answer."""

        def both(*args: Any, **kwargs: Any) -> Any:
            found, nobodys = asked(*args, **kwargs), self.make()
            if not answers and (self.acts or type(found) is not type(nobodys) or found != nobodys):
                answers.append(True)
            return found

        return both
