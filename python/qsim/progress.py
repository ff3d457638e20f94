"""Progress bars, where tqdm is installed and somebody is looking."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def progress(items: Iterable[T], *, total: int | None, title: str, unit: str, show: bool = True) -> Iterator[T]:
    """`items`, with a progress bar while they last; without one if not `show`, without tqdm, or where stderr is a pipe or a file."""
    if show and (sys.stderr.isatty() or "ipykernel" in sys.modules):
        try:
            from tqdm.auto import tqdm
        except ImportError:  # an optional extra: qsim[report]
            pass
        else:
            items = tqdm(items, total=total, desc=title, unit=unit, leave=False)
    yield from items
