"""Runs of a model that stop in the middle and go on when somebody says so.

Each run is a thread, because only a thread can stop inside somebody else's Python; exactly one of them runs at any time, so that results
do not depend on scheduling.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from qsim.runs.random_numbers import RandomNumbers

_MOST_WORKERS = 512  # threads of all pools together


class _Abandoned(BaseException):
    """Ends a run that nobody goes on with; no `except Exception` of a model's catches it."""


class PausedRun:
    """One run, in a thread of its own, without gradients.

    Parameters
    ----------
    call : callable
        What runs, and returns the results.
    name : str
        Of the thread.
    workers : int
        Threads inside operations: OpenMP keeps a pool of its own for each thread that has operations.

    Attributes
    ----------
    result
        What `call` returned.
    error : BaseException or None
        What it raised.
    is_over : bool
    """

    def __init__(self, call: Callable[[], Any], name: str, workers: int) -> None:
        self.result: Any = None
        self.error: BaseException | None = None
        self.is_over = False
        self._call, self._name, self._workers = call, name, workers
        self._abandoned = False
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._context = _context_of_this_thread()
        self._thread: threading.Thread | None = None
        self.random = RandomNumbers()

    def resume(self) -> None:
        """Run until the next `pause`, or to the end."""
        if self.is_over:
            return
        outside = RandomNumbers()
        self.random.put_back()  # it draws the numbers that it would draw alone
        try:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            else:
                self._go.release()
            self._stopped.acquire()
        finally:
            self.random = RandomNumbers()
            outside.put_back()

    def pause(self) -> None:
        """Called in the run's own thread: stop until somebody calls `resume`."""
        self._stopped.release()
        self._go.acquire()
        if self._abandoned:
            raise _Abandoned

    def abandon(self) -> None:
        """End the run where it is."""
        self._abandoned = True
        if self._thread is not None and not self.is_over:
            self._go.release()
            self._thread.join()
        self.is_over = True

    def _run(self) -> None:
        _here.run = self
        if self._workers < torch.get_num_threads():
            torch.set_num_threads(self._workers)
        try:
            with self._context():
                self.result = self._call()
        except _Abandoned:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self._call = _nothing  # with what it holds
            self.is_over = True
            self._stopped.release()


class _Here(threading.local):
    run: Any = None


_here = _Here()


def current_run() -> Any:
    """The `PausedRun` whose thread asks; None in other threads."""
    return _here.run


def workers_of(runs: int) -> int:
    """How many threads the operations of each of so many runs may have."""
    return max(1, min(torch.get_num_threads(), _MOST_WORKERS // max(runs, 1)))


def _nothing() -> None:
    return None


def _context_of_this_thread() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """What makes another thread compute as this one does, without gradients: autocast, default device and CUDA stream belong to threads."""
    casts = [
        (kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)
    ]  # of no other device is there a simulation
    device = torch.get_default_device()
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            for kind, dtype in casts:
                stack.enter_context(torch.autocast(kind, dtype))
            if device.type != "cpu":
                stack.enter_context(device)
            if stream is not None:
                stack.enter_context(torch.cuda.stream(stream))
            yield

    return context
