"""The part of `qsim.QuantSim` that chooses ranges."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist

from qsim.numbers.range_methods import check_read
from qsim.runs.batches import Forward
from qsim.simulation.calibration import CalibrationReport, calibrate
from qsim.simulation.range_choice import choose_encodings
from qsim.simulation.simulation import Simulation
from qsim.simulation.synchronize import forget_outdated, merge, read_by_any
from qsim.warning import warn


class RangeChoice(Simulation):
    """Base of `qsim.QuantSim`: calibration, methods, and what several processes observed."""

    def calibrate(
        self,
        data: Iterable[Any],
        forward: Forward | None = None,
        *,
        max_batches: int | None = None,
        progress: bool = True,
        blocks: str | Sequence[str] | None = None,
        folder: str | os.PathLike[str] | None = None,
    ) -> CalibrationReport:
        """Observe data and choose all encodings. Repeated calls add up; what was observed with other parameters (another
        checkpoint, before training) is forgotten. Weights that `restore` and its kin replaced keep the scales that were found for
        them, as long as they are those weights, and the report says so.

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
        blocks : str or sequence of str, optional
            Globs for the paths of modules, "model.layers.*". All batches pass one of them before any goes on to the next, so that of a
            model that is offloaded to disk each weight is read once, and not once a batch. Ranges are the same, bit for bit. All batches
            are held at a time, each with what lives between two blocks.
        folder : path-like, optional
            With `blocks`: where the tensors that blocks are called with are kept meanwhile, in place of memory.

        Returns
        -------
        CalibrationReport

        Raises
        ------
        CalibrationError
            There was no batch, or quantizers have no range: the message lists them, and why. What was observed is kept. Or the model would
            compute other numbers block by block: it draws random numbers, writes to its buffers, or shares a quantizer between blocks.
        ValueError
            The model does not run on a batch that is not as the example inputs: the message has the batch, what was expected and the layer.
            What the batches before it showed is kept, and nothing of that one.

        Examples
        --------
        >>> from torch import nn
        >>> sim = qsim.QuantSim(nn.Linear(4, 2), torch.zeros(1, 4))
        >>> report = sim.calibrate([torch.tensor([[1.0, 2.0, 3.0, torch.nan], [0.0, 1.0, 2.0, 3.0]])], progress=False)
        >>> report.counts["input"].nans, sim.quantizers()["input"].max.item()
        (1, 3.0)
        >>> batches = [{"images": torch.randn(8, 4), "labels": torch.zeros(8)}]
        >>> report = sim.calibrate(batches, forward=lambda model, batch: model(batch["images"]), progress=False)
        """
        return calibrate(self, data, forward, max_batches=max_batches, progress=progress, blocks=blocks, folder=folder)

    def set_method(self, method: str | None, *, percentile: float | None = None, gamma: float | None = None) -> None:
        """Choose all encodings anew with another method, from what was observed and from the weights. No data needed.

        `calibrate`, `synchronize` and `retarget` go on with it. `config` stays: a new simulation made with that has the methods it names.

        Parameters
        ----------
        method : str or None
            "minmax", "percentile", "mse", "tf_enhanced" or "entropy"; None for what the config says of each tensor. Weights that the model
            computes from parameters keep their observed minimum and maximum per channel, and running ranges (``method="ema"`` in the
            config) stay running. Weights that `restore` and its kin replaced keep their scales, with a warning.
        percentile, gamma : float, optional
            As in `TensorSpec`.

        Raises
        ------
        CalibrationError
            As `calibrate`: nothing was observed yet, or nothing finite.

        Examples
        --------
        >>> from torch import nn
        >>> sim = qsim.QuantSim(nn.Linear(4, 2), torch.zeros(1, 4))
        >>> report = sim.calibrate([torch.randn(512, 4)], progress=False)
        >>> sim.set_method("minmax")
        >>> widest = sim.encodings()["input"].scale
        >>> sim.set_method("percentile", percentile=99.0)
        >>> bool(sim.encodings()["input"].scale < widest)
        True
        """
        configured = {key: decided.spec for key, decided in self.decisions.quantizers.items()}
        methods = {spec.method for spec in configured.values()} if method is None else [method]
        check_read("QuantSim.set_method", sorted(methods), percentile=percentile, gamma=gamma)
        choose_encodings(self, method, percentile=percentile, gamma=gamma, specs=configured)
        if told := self.told_of_bound():
            warn(f"QuantSim.set_method: {told}")

    def synchronize(self, group: dist.ProcessGroup | None = None) -> None:
        """Merge what the ranks of `torch.distributed` observed, and choose all encodings from that. To be called on every rank.

        After each rank has called `calibrate` on its share of the data, counts, ranges, sketches and encodings are on all ranks those
        of one process that saw everything, bit for bit. A running range (``method="ema"``) depends on the order of batches; it becomes
        the mean of the ranges of those ranks that have one: the running range of the mean batch, if all saw equally many. Repeated
        calls count no value twice; a state dict that was loaded counts as observed by the rank that loaded it. Restored weights
        keep their scales, as in `calibrate`.

        Parameters
        ----------
        group : torch.distributed.ProcessGroup, optional
            The default group if None. Its backend has to serve the device of the quantizers.

        Raises
        ------
        RuntimeError
            There is no process group, or this rank is not in it. Or what a rank observed is gone: DistributedDataParallel, around a module
            that holds the simulation, gave all ranks what rank 0 observed. Synchronize before that.
        ValueError
            The simulations differ: the message names a rank and a quantizer.
        CalibrationError
            As `calibrate`: no rank has a range for some quantizers. On a single rank calibrate may raise that for what its share does
            not reach; what was observed is kept, so catch it there and synchronize.

        Examples
        --------
        >>> import torch.distributed as dist
        >>> sim = qsim.QuantSim(torch.nn.Linear(4, 2), torch.zeros(1, 4))
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # torchrun starts as many as there are devices
        >>> report = sim.calibrate([torch.randn(8, 4)], progress=False)  # each rank its share
        >>> sim.synchronize()
        >>> dist.destroy_process_group()
        """
        forget_outdated(self.quantizers(), self.observed_with.outdated, group)
        merge(self.quantizers(), self.weights(), group)
        self.observed_with.waits = False
        self.read = read_by_any(self.read, group)
        choose_encodings(self)
