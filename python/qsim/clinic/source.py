"""Which line of a user's program made a call."""

from __future__ import annotations

import linecache
import os
import sys
from types import FrameType
from typing import NamedTuple

from qsim.folders import QSIM, TORCH

_ENTRANCE = "run"  # of ExaminedModel: what called that is no part of the model


class SourceLine(NamedTuple):
    """A line of a file; `str` reads it."""

    path: str
    line: int

    def __str__(self) -> str:
        shown = os.path.relpath(self.path)
        text = linecache.getline(self.path, self.line).strip()
        return f"{self.path if shown.startswith(os.pardir) else shown}:{self.line}: {text}"


def calling_line() -> SourceLine | None:
    """The innermost line on the stack that is neither torch's nor ours; None where there is none inside the model."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith((TORCH, QSIM)) and not path.startswith("<"):
            return SourceLine(path, frame.f_lineno)
        if frame.f_code.co_name == _ENTRANCE and path.endswith("examined_model.py"):
            return None
        frame = frame.f_back
    return None
