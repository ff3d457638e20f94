"""`QuantSim`: a model as it will compute once quantized.

Its methods lie in classes by topic, one for each module of this package; here are those that report.
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any

from qsim.clinic.plan import Plan
from qsim.clinic.search import Budget
from qsim.clinic.sim_plan import float_plan
from qsim.report.comparison import Comparison, compare
from qsim.report.progressive import Limits, Progressive, join
from qsim.report.scores import ScoreFile
from qsim.report.sensitivity import Metric, Sensitivity, measure, measured, output_sqnr
from qsim.sim.calibration import Forward
from qsim.sim.export import Export
from qsim.sim.files import Files


class QuantSim(Export, Files):
    """A model as it will compute once quantized. It is called, trained and saved like the model.

    The model is run once to see its operations, whatever Python they come from. BatchNorms are folded into the layers before them,
    or stay and train (`Config.batch_norm`);
    weights, inputs and the results of operations get quantizers, one at the end of each chain that inference engines fuse.

    Parameters
    ----------
    model : nn.Module
        Left as it is, unless `inplace`. In training mode its copy is put in eval mode, with a warning if it has BatchNorm.
    example_inputs : Tensor, tuple or dict
        One input, positional or keyword arguments. On the model's device.
    config : Config, optional
        What to quantize and how; `qsim.int8` by default.
    inplace : bool
        Simulate on `model` itself instead of a copy.

    Attributes
    ----------
    model : nn.Module
        The simulated model, with the original names of modules and parameters.
    config : Config

    Examples
    --------
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)).eval()
    >>> sim = QuantSim(model, torch.randn(1, 1, 8, 8))
    >>> list(sim.quantizers())
    ['input', '0.weight', '0.output', '4.weight', '4.output']
    >>> report = sim.calibrate([torch.randn(8, 1, 8, 8)], progress=False)
    >>> sim(torch.randn(2, 1, 8, 8)).shape
    torch.Size([2, 2])
    """

    def compare(self, batch: Any, forward: Forward | None = None, *, memory: int = 1 << 30) -> Comparison:
        """How far every tensor is from its float counterpart: by its own quantizer, and with everything before it quantized.

        Runs the model in eval mode on one batch, in float and simulated, and compares as it goes; nothing of the model changes. No other
        thread may use the sim meanwhile.

        Parameters
        ----------
        batch, forward : as in `calibrate`
        memory : int
            Bytes of float tensors to hold at a time. A batch with more is run several times: see `qsim.report.comparison.compare`.

        Returns
        -------
        Comparison

        Raises
        ------
        NoEncodingError
            Before calibration.

        Examples
        --------
        >>> from torch import nn
        >>> sim = QuantSim(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(1, 4))
        >>> report = sim.calibrate([torch.randn(32, 4)], progress=False)
        >>> comparison = sim.compare(torch.randn(32, 4))
        >>> comparison["2.output"].accumulated.sqnr > 20
        True
        """
        run = self._forward_batch if forward is None else forward
        with self._calibrated():
            return compare(self, self._planned, lambda: run(self._called(), batch), memory)

    def sensitivity(
        self,
        data: Any,
        metric: Metric | None = None,
        *,
        higher_is_better: bool = True,
        groups: str = "quantizer",
        path: str | PathLike[str] | None = None,
        progress: bool = True,
    ) -> Sensitivity:
        """What each quantizer costs by itself: the metric with that one on and all others in float.

        Parameters
        ----------
        data : anything that can be read repeatedly
            Handed to `metric`. Without a metric, batches as `calibrate` takes them.
        metric : callable, optional
            ``metric(sim, data) -> float``; the sim is called like the model, in eval mode and without gradients. By default the SQNR in
            dB of what the model returns beside what it returns in float, which needs no targets.
        higher_is_better : bool
            False for a metric that is a loss.
        groups : "quantizer" or "operation"
            One quantizer at a time, or all of an operation: its weight and its output.
        path : path-like, optional
            Keep the scores in this JSON file, and go on from what it holds: after an interruption, call again with the same arguments.
        progress : bool
            Show a progress bar where tqdm is installed.

        Returns
        -------
        Sensitivity
            ``sensitivity.worst(3)`` are names for `Config.override`.

        Raises
        ------
        ValueError
            The file holds scores of another config, other weights or encodings, other groups or another metric.
        NoEncodingError
            Before calibration.
        """
        metric = output_sqnr if metric is None else metric
        with self._calibrated():
            file = ScoreFile(path, measured(self, metric, groups) if path is not None else {})
            return measure(self, data, metric, higher_is_better=higher_is_better, groups=groups, file=file, show=progress)

    def float_plan(
        self,
        data: Any,
        metric: Metric | None = None,
        *,
        target: float,
        higher_is_better: bool = True,
        sensitivity: Sensitivity | None = None,
        probes: int | None = None,
        seconds: float | None = None,
        progress: bool = True,
    ) -> Plan:
        """The fewest operations to leave in float so that a metric reaches a target.

        Operations are taken out of the float set from the least sensitive end, many at a time, and what is left is verified: with any
        single one of them quantized as well, the metric misses the target. No other set may do with fewer, but none within this one does.

        Parameters
        ----------
        data, metric, higher_is_better
            As in `sensitivity`; by default the metric is the SQNR of the results, in dB.
        target : float
            What the metric is to reach: at least, or at most where lower is better.
        sensitivity : Sensitivity, optional
            From ``sensitivity(data, metric, groups="operation")``; measured if it is not given.
        probes, seconds : optional
            What the search may spend, in evaluations of the metric and in time. Where that is not enough, the plan holds the smallest
            set seen so far that reaches the target, and says so.
        progress : bool
            Show a progress bar while the sensitivity is measured.

        Returns
        -------
        Plan
            For ``config.with_plan(plan)``; nothing of this simulation changes. A config with it gives the operations that stay
            quantized the same ranges, but where they share a quantizer with one that is kept.

        Raises
        ------
        NoEncodingError
            Before calibration.

        Examples
        --------
        >>> from torch import nn
        >>> model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval(), torch.randn(64, 4)
        >>> sim = QuantSim(model, x, qsim.int4())
        >>> report = sim.calibrate([x], progress=False)
        >>> plan = sim.float_plan([x], target=1000.0, progress=False)
        >>> plan.keep, plan.irreducible
        (('input', '0', '2'), True)
        """
        found = sensitivity
        if found is None:
            found = self.sensitivity(data, metric, higher_is_better=higher_is_better, groups="operation", progress=progress)
        elif found.higher_is_better != higher_is_better:
            raise ValueError(
                f"QuantSim.float_plan: got a sensitivity with higher_is_better={found.higher_is_better}, and the opposite here"
            )
        with self._calibrated():
            return float_plan(self, data, output_sqnr if metric is None else metric, target, found, Budget(probes, seconds))

    def progressive(
        self,
        data: Any,
        metric: Metric | None = None,
        order: str | Sequence[str] = "sensitivity",
        *,
        higher_is_better: bool = True,
        max_drop: float | None = None,
        seconds: float | None = None,
        path: str | PathLike[str] | None = None,
        progress: bool = True,
    ) -> Progressive:
        """The metric while operations join one by one, from float to all that is on: where accuracy breaks.

        Parameters
        ----------
        data, metric, higher_is_better
            As in `sensitivity`; by default the metric is the SQNR of the results, in dB.
        order : "sensitivity", "forward", "backward" or sequence of str
            The least sensitive first, which is measured before; in the order of the model, or from its end; or names of operations, the
            others staying in float.
        max_drop : float, optional
            Stop at the first operation with which more than this is lost of the metric in float.
        seconds : float, optional
            Stop before the first operation that would begin later.
        path : path-like, optional
            Keep the scores in this JSON file, and go on from what it holds, as `sensitivity` does. An other order may go on from it too.
        progress : bool
            Show progress bars where tqdm is installed.

        Returns
        -------
        Progressive
            ``print`` shows each step, ``save`` writes a page. The quantizers are switched afterwards as they were.

        Raises
        ------
        ValueError
            An unknown order or operation; `max_drop` with a metric that is infinite in float; the file is of something else.
        NoEncodingError
            Before calibration.
        """
        metric = output_sqnr if metric is None else metric
        with self._calibrated():
            file = ScoreFile(path, measured(self, metric, "operation") if path is not None else {})
            limits = Limits(max_drop, seconds)
            return join(self, data, metric, order, higher_is_better=higher_is_better, limits=limits, file=file, show=progress)
