"""Where in which file a value stands: what errors begin with."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from qsim.errors import FileFormatError

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80
_FEW = 4
_LISTED = 6


def shown(value: Any) -> str:
    """A value of JSON as an error shows it, in words where it has parts: a file can hold strings and lists of any length."""
    if isinstance(value, dict):
        return f"an object with {listed(value)}" if value else "an empty object"
    if isinstance(value, list | tuple):
        flat = all(part is None or isinstance(part, str | int | float) for part in value)
        return f"[{', '.join(map(shown, value))}]" if len(value) <= _FEW and flat else f"a list of {len(value)}"
    if isinstance(value, bytes):
        text = value.decode("ascii", "replace")
        return shown(text) if text.isprintable() and text.isascii() else f"the bytes {value[:16].hex(' ')}"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return _short.repr(value)


def listed(names: Iterable[Any]) -> str:
    """Names as an error lists them: the first few, and how many more."""
    names = list(names)
    first = ", ".join(map(shown, islice(names, _LISTED)))
    return f"{first} and {len(names) - _LISTED} more" if len(names) > _LISTED else first


@dataclass(frozen=True)
class FilePlace:
    """A file, and an entry of it.

    Parameters
    ----------
    file : str
        Its path, or what errors call it.
    entry : str, optional
        Name of a tensor.
    """

    file: str
    entry: str | None = None

    def at(self, entry: str) -> FilePlace:
        """An entry of the same file."""
        return replace(self, entry=entry)

    def error(self, message: str) -> FileFormatError:
        """What to raise."""
        where = "" if self.entry is None else f"entry {shown(self.entry)}: "
        return FileFormatError(f"qsim: '{self.file}': {where}{message}")

    def require(self, what: str, value: Any, known: Sequence[Any], more: str) -> None:
        """Raise unless a value of JSON is one that is known: 1 is not true. `more` goes on where these are listed."""
        if not any(type(value) is type(each) and value == each for each in known):
            raise self.wanted(what, value, f"{' or '.join(map(json.dumps, known))}{more}")

    def wanted(self, what: str, value: Any, expected: str) -> FileFormatError:
        """What to raise for a value that is not as expected."""
        return self.error(f"{what} is {shown(value)}; expected {expected}")
