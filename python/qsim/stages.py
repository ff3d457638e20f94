"""Seconds by stage, for reports on work of several steps."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping


class Stages(dict[str, float]):
    """Seconds by the name of a stage, in the order in which the stages began; a dict that measures.

    Every moment counts for one stage: one inside another is not counted for the outer one.

    Parameters
    ----------
    *names : str
        Stages to list, with 0 s as long as they did not run.

    Examples
    --------
    >>> stages = Stages("trace", "write")
    >>> with stages.stage("trace"):
    ...     pass
    >>> list(stages), stages["write"]
    (['trace', 'write'], 0.0)
    """

    def __init__(self, *names: str) -> None:
        super().__init__(dict.fromkeys(names, 0.0))
        self._running: list[str] = []
        self._since = 0.0

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """The time inside the context counts for `name`, also when an exception ends it."""
        outer = len(self._running)
        self.begin(name)
        try:
            yield
        finally:
            self._count()
            del self._running[outer:]  # with what was begun inside, and not ended because of an exception

    def begin(self, name: str) -> None:
        """From here to `end` the time counts for `name`: for hooks, which cannot hold a context open."""
        self._count()
        self.setdefault(name, 0.0)
        self._running.append(name)

    def end(self) -> None:
        """The stage that began last is over; the one around it goes on."""
        self._count()
        self._running.pop()

    def _count(self) -> None:
        now = time.perf_counter()
        if self._running:
            self[self._running[-1]] += now - self._since
        self._since = now

    def __str__(self) -> str:
        return seconds_text(self)


def seconds_text(seconds: Mapping[str, float]) -> str:
    """Seconds by stage as text.

    Examples
    --------
    >>> seconds_text({"trace": 1.234, "write": 0.5})
    'trace 1.23 s, write 0.50 s'
    """
    return ", ".join(f"{name} {elapsed:.2f} s" for name, elapsed in seconds.items())
