"""Many runs of one model at a time, each stopped before every operation that reads a weight.

What the operations of a network read depends on those before them. With all batches stopped at the same operation, in float and
simulated, its weight can be solved for, and every run goes on with what was found: one pass over the data, whatever the depth, and
in memory what lives at one place in the network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from qsim.graph.execute.tapped import SharedWeights, WeightedCall, tapped_mode
from qsim.quantizers.quantizer import Quantizer
from qsim.runs.arguments import Arguments
from qsim.runs.memory import large_ones_handed_back
from qsim.runs.paused import PausedRun, current_run, workers_of
from qsim.runs.snapshot import Snapshot
from qsim.simulation.simulation import Simulation


class Run(PausedRun):
    """One run of the model, in a thread of its own.

    Parameters
    ----------
    call : callable
        Runs the model on a batch and returns its results.
    batch : int
        Which batch, for messages and random numbers: the same batch draws the same in float and simulated.
    simulates : bool
        Whether the simulation is on.
    workers : int
        As of `PausedRun`.
    model : nn.Module or None
        Whose state each run has for itself, if a run changes it.
    silent : sequence of Quantizer
        Those that are off while it runs: of the model's inputs, which stand before any operation, in a run in float.
    weights : SharedWeights
        Those of all runs.

    Attributes
    ----------
    reached : WeightedCall or None
        Where the run has stopped; None before it began and after its end.
    """

    def __init__(
        self,
        call: Callable[[], Any],
        batch: int,
        *,
        simulates: bool,
        workers: int,
        model: nn.Module | None,
        silent: Sequence[Quantizer],
        weights: SharedWeights,
    ) -> None:
        super().__init__(call, f"qsim batch {batch}", workers)
        self.batch, self.simulates, self.weights = batch, simulates, weights
        self._model, self._state = model, None if model is None else Snapshot(model, parameters=False)
        self._silent = silent
        self.reached: WeightedCall | None = None
        self._answer: Arguments | None = None

    def advance(self, answer: Arguments | None = None) -> None:
        """Run until the next operation that reads a weight, or to the end. `answer`: what the one that it stopped at runs with."""
        self._answer = answer
        on = [quantizer for quantizer in self._silent if quantizer.enabled]
        for quantizer in on:
            quantizer.enabled = False
        try:
            with self._own_state():
                self.resume()
        finally:
            for quantizer in on:
                quantizer.enabled = True
        if self.is_over:
            self.reached = None

    @contextmanager
    def _own_state(self) -> Iterator[None]:
        """The model is in the state in which this run left it; afterwards in that in which it was."""
        if self._model is None or self._state is None:
            yield
            return
        outside = Snapshot(self._model, parameters=False)
        self._state.restore()
        try:
            yield
        finally:
            self._state = Snapshot(self._model, parameters=False)
            outside.restore()

    def abandon(self) -> None:
        super().abandon()
        self.reached = None

    def reach(self, call: WeightedCall) -> Arguments:
        """Called in the run's own thread: stop until somebody calls `advance`."""
        self.reached = call
        self.pause()
        self.reached = None
        answer, self._answer = self._answer, None
        return (call.args, call.kwargs) if answer is None else answer


@contextmanager
def lockstep(sim: Simulation, calls: Sequence[Callable[[], Any]], *, stateful: bool = True) -> Iterator[list[tuple[Run, Run]]]:
    """For each of `calls`, which run the model on one batch, a run in float and one that is simulated, none of them begun. All begin in the
    state in which the model is; if it is `stateful`, one that a run changes, each goes on in its own.

    Within the context `Run.advance` drives them; on leaving, whatever still runs is abandoned.
    """
    threads = torch.get_num_threads()
    workers = workers_of(2 * len(calls))
    quantizers = sim.quantizers()
    inputs = list({quantizers[post.key]: None for post in sim.decisions.posts if post.operation == "input"})

    weights = SharedWeights()

    def made(call: Callable[[], Any], batch: int, simulates: bool) -> Run:
        home, silent = sim.model if stateful else None, [] if simulates else inputs
        return Run(call, batch, simulates=simulates, workers=workers, model=home, silent=silent, weights=weights)

    runs = [(made(call, i, False), made(call, i, True)) for i, call in enumerate(calls)]
    switch, was = sim.switch, (sim.switch.mode, sim.switch.saves)
    switch.mode, switch.saves = tapped_mode(current_run), False
    try:
        with large_ones_handed_back():
            yield runs
    finally:
        for pair in runs:
            for run in pair:
                run.abandon()
        switch.mode, switch.saves = was
        torch.set_num_threads(threads)
