"""Where in which file a value stands: what errors begin with."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass, replace
from typing import Any

from qsim.errors import FileFormatError

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80


def shown(value: Any) -> str:
    """`value` as an error shows it: a file can hold strings of any length."""
    return _short.repr(value)


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

    def wanted(self, what: str, value: Any, expected: str) -> FileFormatError:
        """What to raise for a value that is not as expected."""
        return self.error(f"{what} is {shown(value)}; expected {expected}")
