"""The part of `qsim.QuantSim` that serves training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from qsim.batch_norm.fold_report import FoldReport
from qsim.runs.batches import Forward
from qsim.simulation.batch_norms import fold_batch_norms, freeze_batch_norms, reestimate_batch_norms
from qsim.simulation.simulation import Simulation
from qsim.training.monitor import Monitor
from qsim.training.param_groups import param_groups
from qsim.training.schedule import Schedule
from qsim.training.watch import Watch


class Training(Simulation):
    """Base of `qsim.QuantSim`: BatchNorm, groups for optimizers, schedules, a monitor for loggers, and a watch for NaN."""

    def reestimate_batch_norms(
        self, data: Iterable[Any], forward: Forward | None = None, *, max_batches: int | None = None, progress: bool = True
    ) -> dict[str, int]:
        """Set the running statistics of all BatchNorms to what the simulated model gives them: the average over batches.

        Weights and activations are quantized as the switches say (``with sim.in_float():`` for none). A batch with NaN or Inf where a
        BatchNorm reads it does not count there. Everything else is afterwards as it was: training flags, ranges, random numbers.

        Parameters
        ----------
        data, forward, max_batches, progress
            As in `calibrate`.

        Returns
        -------
        dict of str to int
            How many batches counted, for each BatchNorm.

        Raises
        ------
        CalibrationError
            There was no batch, or a BatchNorm, which it names, met none that counts. No statistics are changed then.

        Examples
        --------
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)).eval()
        >>> sim = qsim.QuantSim(model, torch.randn(1, 3, 8, 8), qsim.Config(batch_norm="keep"))
        >>> batches = [torch.randn(4, 3, 8, 8) for _ in range(2)]
        >>> report = sim.calibrate(batches, progress=False)
        >>> sim.reestimate_batch_norms(batches, progress=False)
        {'1': 2}
        """
        return reestimate_batch_norms(self, data, forward, max_batches=max_batches, progress=progress)

    def freeze_batch_norms(self, *patterns: str, affine: bool = False) -> None:
        """From now on the BatchNorms that match any glob normalize with their running statistics in training mode too.

        Parameters
        ----------
        *patterns : str
            Globs for the paths of modules: ``"*"`` for all. One that matches no BatchNorm is an error.
        affine : bool
            Stop the training of their weight and bias as well.

        Examples
        --------
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)).eval()
        >>> sim = qsim.QuantSim(model, torch.randn(1, 3, 8, 8), qsim.Config(batch_norm="keep"))
        >>> sim.freeze_batch_norms("*")
        >>> sim.train().model[1].training
        False
        """
        if not patterns:
            raise TypeError("QuantSim.freeze_batch_norms: got no pattern; expected globs for paths of BatchNorms, '*' for all")
        freeze_batch_norms(self, patterns, affine=affine)

    def fold_batch_norms(self) -> FoldReport:
        """Fold the BatchNorms that stayed (``Config(batch_norm="keep")``) into the layers before them, after training.

        A weight with a scale for each output channel keeps its integers: the scale absorbs BatchNorm's factor. Where that factor is
        negative the integers change their sign, and where it is zero they become zero. A scale that spans channels cannot absorb
        it; the range of such a weight is chosen anew. BatchNorms before their layer stay: their results are quantized.

        Returns
        -------
        FoldReport
            Its `warnings` name each weight whose integers changed.

        Raises
        ------
        ValueError
            The simulation is sharded by FSDP.

        Examples
        --------
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)).eval()
        >>> sim = qsim.QuantSim(model, torch.randn(1, 3, 8, 8), qsim.Config(batch_norm="keep"))
        >>> report = sim.calibrate([torch.randn(4, 3, 8, 8)], progress=False)
        >>> sim.fold_batch_norms().folded
        {'1': '0'}
        """
        return fold_batch_norms(self)

    def param_groups(
        self, lr: float | None = None, *, scale_lr: float | None = None, weight_decay: float | None = None, bias_decay: float | None = None
    ) -> list[dict[str, Any]]:
        """All parameters in groups for an optimizer of `torch.optim`: each in exactly one, tied ones once.

        Parameters
        ----------
        lr : float, optional
            Learning rate of all; the optimizer's own by default.
        scale_lr : float, optional
            That of learned scales; `lr` by default.
        weight_decay : float, optional
            Of weights; the optimizer's own by default. Scales never decay.
        bias_decay : float, optional
            Of biases and of the parameters of normalizations: all with one dimension or none; `weight_decay` by default.

        Returns
        -------
        list of dict
            Those that have members of "weights", "biases" and "scales", with the keys `name`, `params`, and, where given, `lr` and
            `weight_decay`. (LBFGS takes one group only, Muon only matrices: their kinds of optimizer want lists of their own.)

        Examples
        --------
        >>> from torch import nn
        >>> sim = qsim.QuantSim(nn.Linear(3, 2), torch.zeros(1, 3))
        >>> optimizer = torch.optim.AdamW(sim.param_groups(1e-3, weight_decay=0.01, bias_decay=0.0))
        >>> [(group["name"], group["weight_decay"]) for group in optimizer.param_groups]
        [('weights', 0.01), ('biases', 0.0)]
        """
        return param_groups(self, self.quantizers().values(), lr, scale_lr, weight_decay, bias_decay)

    def schedule(
        self,
        *,
        quantize_from: int | Mapping[str, int] = 0,
        observe_until: int | None = None,
        freeze_batch_norms_from: int | None = None,
    ) -> Schedule:
        """Switches by step: call the schedule's ``step()`` after each ``optimizer.step()``.

        Parameters
        ----------
        quantize_from : int, or mapping of glob to int
            Quantizers are off before this step. Globs as in `enable`; the last match wins. What is off already stays off.
        observe_until : int, optional
            From this step on running ranges (``method="ema"``) rest.
        freeze_batch_norms_from : int, optional
            From this step on all BatchNorms use their running statistics.

        Returns
        -------
        Schedule
            With `state_dict` and `load_state_dict`.

        Examples
        --------
        >>> sim = qsim.QuantSim(torch.nn.Linear(4, 2), torch.zeros(1, 4))
        >>> schedule = sim.schedule(quantize_from={"*": 2})
        >>> schedule.step()
        >>> sim.quantizers()["weight"].enabled
        False
        """
        return Schedule(self, quantize_from, observe_until, freeze_batch_norms_from)

    def watch(self) -> Watch:
        """``with sim.watch() as watch:`` finds where NaN and Inf begin; call ``watch.step()`` after each ``loss.backward()``.

        The first operation that makes NaN or Inf out of finite numbers, forward or backward, raises a NonFiniteError that names it,
        its module and the step. Each operation is followed by a look at its results, so that a step takes several times as long,
        and one wait for the device a step; outside the context nothing is different. Not under `torch.compile`.

        Examples
        --------
        >>> sim = qsim.QuantSim(torch.nn.Linear(4, 2), torch.zeros(1, 4))
        >>> report = sim.calibrate([torch.randn(8, 4)], progress=False)
        >>> with sim.watch() as watch:
        ...     (sim(torch.randn(8, 4)).sum() * 1e38 * 1e38).backward()
        ...     try:
        ...         watch.step()
        ...     except qsim.NonFiniteError as error:
        ...         error.events[0].op, error.events[0].what
        ('mul', 'Inf')
        """
        return Watch(self.model)

    def monitor(self, to: Any, *, every: int = 1, histograms: bool = False) -> Monitor:
        """``with sim.monitor(writer) as monitor:`` logs what quantization does while it trains; call ``monitor.step()`` after each
        ``loss.backward()``.

        Of every quantizer: the ends of its range, the share of finite values of the step that are clipped, NaN and Inf; of every
        parameter the norm of its gradient, and of all gradients the norm and the elements that are NaN or Inf. Of a running range what is
        clipped is told by the range before the batch. Steps that are not written cost nothing; one that is costs about a second
        quantization of each tensor, and waits for the device. Not under `torch.compile`: hooks break graphs.

        Parameters
        ----------
        to : object
            A SummaryWriter of `torch.utils.tensorboard`, a run of W&B, the module mlflow, a logger of Lightning, or any object with
            ``log(dict)`` (docs/logging.md).
        every : int
            Write each step that this divides, the first among them.
        histograms : bool
            Write the histogram of each quantized tensor too, where the logger has a way.

        Examples
        --------
        >>> class Last:
        ...     def log(self, figures, step):
        ...         self.figures = figures
        >>> sim, last = qsim.QuantSim(torch.nn.Linear(4, 2), torch.randn(1, 4)), Last()
        >>> report = sim.calibrate([torch.randn(32, 4)], progress=False)
        >>> with sim.train().monitor(last, every=100) as monitor:
        ...     sim(torch.randn(32, 4)).sum().backward()
        ...     monitor.step()
        >>> last.figures["range_low/input"] == sim.encodings()["input"].min.item(), last.figures["gradient/nonfinite"]
        (True, 0.0)
        """
        return Monitor(self, to, every, histograms)
