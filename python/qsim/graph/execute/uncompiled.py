"""Keeps Dynamo off what a simulation runs in Python.

Behind a graph break Dynamo compiles functions one by one, as they are called. It would trace such a function under the mode of a container
whose forward it does not see, and Python would run the graph under that mode again. So a container is compiled as a whole, or runs in
Python as a whole: functions that the model has compiled itself run as the Python they were made from there.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch._C._dynamo.eval_frame import set_eval_frame


class _Stance:
    """torch's stance is one for all threads: the first that wants it "force_eager" sets it, the last puts it back."""

    def __init__(self) -> None:
        self._lock, self._wanted = threading.Lock(), 0
        self._stance: Any = None

    def enter(self) -> None:
        with self._lock:
            if self._wanted == 0:
                self._stance = torch.compiler.set_stance("force_eager")
            self._wanted += 1

    def leave(self) -> None:
        with self._lock:
            self._wanted -= 1
            if self._wanted == 0:
                self._stance.__exit__(None, None, None)


_stance = _Stance()


class Uncompiled:
    """Within the context Python runs without Dynamo; with `functions_too` also the functions that the model has compiled itself. For modes,
    which may be entered again inside."""

    def __init__(self, *, functions_too: bool) -> None:
        self._functions_too = functions_too
        self._before: list[Any] = []

    def __enter__(self) -> Uncompiled:
        self._before.append(set_eval_frame(None))
        if self._functions_too:
            _stance.enter()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._functions_too:
            _stance.leave()
        set_eval_frame(self._before.pop())

    @property
    def is_behind_a_break(self) -> bool:
        """Whether Dynamo was asked to compile what runs within."""
        return self._before[-1] not in (None, False)
