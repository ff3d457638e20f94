"""Progress bars, where tqdm is installed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def progress(items: Iterable[T], *, total: int | None, title: str, unit: str, show: bool = True) -> Iterator[T]:
    """`items`, with a progress bar while they last; without one if not `show`, or without tqdm."""
    if show:
        try:
            from tqdm.auto import tqdm
        except ImportError:  # an optional extra: qsim[report]
            pass
        else:
            items = tqdm(items, total=total, desc=title, unit=unit, leave=False)
    yield from items
