"""The part of `qsim.QuantSim` that chooses ranges."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import torch.distributed as dist

from qsim.errors import CalibrationError
from qsim.graph.actions import PlannedBias
from qsim.quantizers.bias import BiasQuantizer
from qsim.quantizers.observer import with_method
from qsim.quantizers.weights import encode_weights
from qsim.sim.calibration import CalibrationReport, Forward, failure, iterate, observe, report_of
from qsim.sim.distributed import merge
from qsim.sim.memory import MemoryWatch
from qsim.sim.sharding import sharded_around, whole
from qsim.sim.simulation import Simulation


class RangeChoice(Simulation):
    """Base of `qsim.QuantSim`: calibration, methods, and what several processes observed."""

    def calibrate(
        self, data: Iterable[Any], forward: Forward | None = None, *, max_batches: int | None = None, progress: bool = True
    ) -> CalibrationReport:
        """Observe data and choose all encodings. Repeated calls add up.

        The model computes in float, in eval mode and without gradients; its parameters, buffers (BatchNorm statistics among them),
        training flags and the random number generators are afterwards as they were. NaN and Inf never reach a range: they are
        counted and reported.

        Parameters
        ----------
        data : iterable of batches
            Tensor, tuple, list or dict each. A batch fills as many arguments as `example_inputs` had; what is left (targets) is ignored.
        forward : callable, optional
            ``forward(model, batch)`` for batches that need more than that. `model` is `self.model`, and the simulation itself where
            FSDP shards it.
        max_batches : int, optional
            Stop after so many.
        progress : bool
            Show a progress bar where tqdm is installed.

        Returns
        -------
        CalibrationReport

        Raises
        ------
        CalibrationError
            There was no batch, or quantizers have no range: the message lists them, and why. What was observed is kept.
        """
        quantizers = self.quantizers()
        memory = MemoryWatch(quantizer.scale.device for quantizer in quantizers.values())
        watched = [key for key, planned in self._planned.items() if planned.parameter is None]
        run = self._forward_batch if forward is None else forward
        called = self._called()
        with self._switch.turned(True, falls_back=False), sharded_around(self):
            noted = observe(
                self.model,
                quantizers,
                watched,
                iterate(data, max_batches, progress, "QuantSim.calibrate"),
                lambda batch: run(called, batch),
            )
        if noted.batches == 0:
            raise CalibrationError("QuantSim: calibrate got no batch. Is the iterator used up, or the data set empty?")
        with noted.seconds.stage("search"):
            problems = self._choose_encodings()
        return report_of(noted, quantizers, problems, memory.peaks(), self.summary)

    def set_method(self, method: str, *, percentile: float | None = None, gamma: float | None = None) -> None:
        """Choose all encodings anew with another method, from what was observed and from the weights. No data needed.

        Parameters
        ----------
        method : str
            "minmax", "percentile", "mse", "tf_enhanced" or "entropy". Weights that the model computes from parameters keep their
            observed minimum and maximum per channel, and running ranges (``method="ema"`` in the config) stay running.
        percentile, gamma : float, optional
            As in `TensorSpec`.

        Raises
        ------
        CalibrationError
            As `calibrate`: nothing was observed yet, or nothing finite.
        """
        self._choose_encodings(method, percentile=percentile, gamma=gamma)

    def synchronize(self, group: dist.ProcessGroup | None = None) -> None:
        """Merge what the ranks of `torch.distributed` observed, and choose all encodings from that. To be called on every rank.

        After each rank has called `calibrate` on its share of the data, counts, ranges, sketches and encodings are on all ranks those
        of one process that saw everything, bit for bit. A running range (``method="ema"``) depends on the order of batches; it becomes
        the mean of the ranges of those ranks that have one: the running range of the mean batch, if all saw equally many. Repeated
        calls count no value twice; a state dict that was loaded counts as observed by the rank that loaded it.

        Parameters
        ----------
        group : torch.distributed.ProcessGroup, optional
            The default group if None. Its backend has to serve the device of the quantizers.

        Raises
        ------
        RuntimeError
            There is no process group, or this rank is not in it.
        ValueError
            The simulations differ: the message names a rank and a quantizer.
        CalibrationError
            As `calibrate`: no rank has a range for some quantizers. On a single rank calibrate may raise that for what its share does
            not reach; what was observed is kept, so catch it there and synchronize.
        """
        merge(self.quantizers(), self._weights(), group)
        self._choose_encodings()

    def _choose_encodings(self, method: str | None = None, *, percentile: float | None = None, gamma: float | None = None) -> list[str]:
        """Give every quantizer its encoding. Returns a sentence for each that had to be changed afterwards."""
        quantizers = self.quantizers()
        problems: dict[str, CalibrationError] = {}
        parameters = {key: whole(weight) for key, weight in self._weights().items()}
        of_weights = [quantizers[key] for key in parameters]
        specs = [with_method(s, None if s.is_running else method, percentile=percentile, gamma=gamma) for s in (q.spec for q in of_weights)]
        for key, found in zip(parameters, encode_weights(of_weights, list(parameters.values()), specs), strict=True):
            if isinstance(found, CalibrationError):
                problems[key] = found
        for key, quantizer in quantizers.items():
            if key in parameters or self._planned[key].range is not None:
                continue
            spec = quantizer.spec
            chosen = None if spec.is_running or spec.axis is not None else method
            try:
                quantizer.compute_encoding(chosen, percentile=percentile, gamma=gamma)
            except CalibrationError as error:
                problems[key] = error
        needed = self._needed()
        unmet = [key for key, quantizer in quantizers.items() if key in problems and quantizer.enabled and key in needed]
        if unmet:
            raise failure([str(problems[key]) for key in unmet])
        unneeded = [f"{problems[key]} (not needed: all that use it fall back)" for key in quantizers if key in problems.keys() - needed]
        return [*unneeded, *self._fit_biases(self._biases)]

    def _fit_biases(self, biases: Iterable[PlannedBias]) -> list[str]:
        """Raise weight scales where a bias would not fit into int32. Returns a sentence for each weight."""
        quantizers = self.quantizers()
        raised = {
            b: BiasQuantizer(quantizers[b.input], quantizers[b.weight]).fit(whole(attrgetter(b.parameter)(self.model))) for b in biases
        }
        return [f"'{b.weight}': {n} scales raised so that the bias '{b.parameter}' fits into int32" for b, n in raised.items() if n]
