"""Many runs of one model at a time, each stopped before every operation that reads a weight.

What the operations of a network read depends on those before them. With all batches stopped at the same operation, in float and
simulated, its weight can be solved for, and every run goes on with what was found: one pass over the data, whatever the depth, and
in memory what lives at one place in the network. Each run is a thread, because only a thread can stop inside somebody else's Python;
exactly one of them runs at any time, so that results do not depend on scheduling.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from qsim.graph.execute.tapped import SharedWeights, WeightedCall, tapped_mode
from qsim.quantizers.quantizer import Quantizer
from qsim.runs.arguments import Arguments
from qsim.runs.memory import large_ones_handed_back
from qsim.simulation.simulation import Simulation

_WORKERS = 512  # threads of all pools together


class _Abandoned(BaseException):
    """Ends a run that nobody goes on with; no `except Exception` of a model's catches it."""


class Run:
    """One run of the model, in a thread of its own.

    Parameters
    ----------
    call : callable
        Runs the model on a batch and returns its results.
    batch : int
        Which batch, for messages and random numbers.
    simulates : bool
        Whether the simulation is on.
    workers : int
        Threads inside operations: OpenMP keeps a pool of its own for each thread that has operations.
    silent : sequence of Quantizer
        Those that are off while it runs: of the model's inputs, which stand before any operation, in a run in float.
    weights : SharedWeights
        Those of all runs.

    Attributes
    ----------
    reached : WeightedCall or None
        Where the run has stopped; None before it began and after its end.
    result
        What the model returned.
    error : BaseException or None
        What the model raised.
    is_over : bool
    """

    def __init__(
        self,
        call: Callable[[], Any],
        batch: int,
        *,
        simulates: bool,
        workers: int,
        silent: Sequence[Quantizer],
        weights: SharedWeights,
    ) -> None:
        self.batch, self.simulates, self.weights = batch, simulates, weights
        self._workers, self._silent = workers, silent
        self.reached: WeightedCall | None = None
        self.result: Any = None
        self.error: BaseException | None = None
        self.is_over = False
        self._call = call
        self._answer: Arguments | None = None
        self._abandoned = False
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._context = _context_of_this_thread()
        self._thread: threading.Thread | None = None
        self._random = torch.get_rng_state()

    def advance(self, answer: Arguments | None = None) -> None:
        """Run until the next operation that reads a weight, or to the end. `answer`: what the one that it stopped at runs with."""
        if self.is_over:
            return
        self._answer = answer
        on = [quantizer for quantizer in self._silent if quantizer.enabled]
        for quantizer in on:
            quantizer.enabled = False
        outside = torch.get_rng_state()
        torch.set_rng_state(self._random)  # the same batch draws the same numbers in float and simulated
        try:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"qsim batch {self.batch}", daemon=True)
                self._thread.start()
            else:
                self._go.release()
            self._stopped.acquire()
        finally:
            self._random = torch.get_rng_state()
            torch.set_rng_state(outside)
            for quantizer in on:
                quantizer.enabled = True

    def abandon(self) -> None:
        """End the run where it is."""
        self._abandoned = True
        if self._thread is not None and not self.is_over:
            self._go.release()
            self._thread.join()
        self.is_over, self.reached = True, None

    def reach(self, call: WeightedCall) -> Arguments:
        """Called in the run's own thread: stop until somebody calls `advance`."""
        self.reached = call
        self._stopped.release()
        self._go.acquire()
        if self._abandoned:
            raise _Abandoned
        self.reached = None
        answer, self._answer = self._answer, None
        return (call.args, call.kwargs) if answer is None else answer

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
            self.is_over, self.reached = True, None
            self._stopped.release()


class _Here(threading.local):
    run: Run


_here = _Here()


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


@contextlib.contextmanager
def lockstep(sim: Simulation, calls: Sequence[Callable[[], Any]]) -> Iterator[list[tuple[Run, Run]]]:
    """For each of `calls`, which run the model on one batch, a run in float and one that is simulated, none of them begun.

    Within the context `Run.advance` drives them; on leaving, whatever still runs is abandoned.
    """
    threads = torch.get_num_threads()
    workers = max(1, min(threads, _WORKERS // max(2 * len(calls), 1)))
    quantizers = sim.quantizers()
    inputs = list({quantizers[post.key]: None for post in sim.decisions.posts if post.operation == "input"})

    weights = SharedWeights()

    def made(call: Callable[[], Any], batch: int, simulates: bool) -> Run:
        return Run(call, batch, simulates=simulates, workers=workers, silent=[] if simulates else inputs, weights=weights)

    runs = [(made(call, i, False), made(call, i, True)) for i, call in enumerate(calls)]
    switch, was = sim.switch, (sim.switch.mode, sim.switch.saves)
    switch.mode, switch.saves = tapped_mode(lambda: _here.run), False
    try:
        with large_ones_handed_back():
            yield runs
    finally:
        for pair in runs:
            for run in pair:
                run.abandon()
        switch.mode, switch.saves = was
        torch.set_num_threads(threads)
