"""Warnings that point at the user's line, however many of our own and of torch's calls lie between."""

from __future__ import annotations

import contextlib
import sys
import warnings
from types import FrameType

from qsim.folders import QSIM, TORCH

_BETWEEN = TORCH, QSIM, contextlib.__file__  # the last: `with` blocks made of generators


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """`warnings.warn`, at the innermost line that is neither torch's nor ours."""
    distance = 1
    frame: FrameType | None = sys._getframe(0)
    while frame is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        distance, frame = distance + 1, frame.f_back
    warnings.warn(message, category, stacklevel=distance)
