"""The part of `qsim.QuantSim` that reports what quantization costs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from os import PathLike
from typing import Any

from qsim.analysis.bit_choices import Bits
from qsim.analysis.bit_costs import Budget
from qsim.analysis.bit_search import Request, search_bits
from qsim.analysis.bit_search_report import BitSearch
from qsim.analysis.comparison import Comparison, compare
from qsim.analysis.fewest_in_float import float_plan
from qsim.analysis.metric import Metric, metric_of
from qsim.analysis.progressive import Limits, Progressive, join
from qsim.analysis.scores import ScoreFile
from qsim.analysis.search import Effort
from qsim.analysis.sensitivity import Sensitivity, measure, measured
from qsim.deploy.engine_plan import Plan
from qsim.options import check_flag, check_function, check_number, check_whole, shown
from qsim.runs.batches import Forward
from qsim.simulation.config_ranges import told_of_ranges
from qsim.simulation.simulation import Simulation


class Reports(Simulation):
    """Base of `qsim.QuantSim`: comparison, sensitivity, float plans, bits under a budget and progressive quantization."""

    def compare(self, batch: Any, forward: Forward | None = None, *, memory: int = 1 << 30) -> Comparison:
        """How far every tensor is from its float counterpart: by its own quantizer, and with everything before it quantized.

        Runs the model in eval mode on one batch, in float and simulated, and compares as it goes; nothing of the model changes. No other
        thread may use the sim meanwhile.

        Parameters
        ----------
        batch, forward : as in `calibrate`
        memory : int
            Bytes of float tensors to hold at a time. A batch with more is run several times: see `qsim.analysis.comparison.compare`.

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
        if forward is not None:
            check_function("QuantSim.compare", "forward", forward, "forward(model, batch)")
        run = self.forward_batch if forward is None else forward
        self.tell_of_restored()
        with self.calibrated():
            check_whole("QuantSim.compare", "memory", memory, least=1)
            return compare(self, self.decisions.quantizers, lambda: run(self.called(), batch), memory)

    def sensitivity(
        self,
        data: Any,
        metric: Metric | None = None,
        *,
        higher_is_better: bool = True,
        groups: str = "quantizer",
        forward: Forward | None = None,
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
        forward : callable, optional
            As in `calibrate`, where there is no metric: what it returns is compared.
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

        Examples
        --------
        >>> from torch import nn
        >>> sim = QuantSim(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(1, 4), qsim.w4a8())
        >>> report = sim.calibrate([torch.randn(32, 4)], progress=False)
        >>> sensitivity = sim.sensitivity([torch.randn(32, 4)], progress=False)
        >>> sorted(score.name for score in sensitivity.ranked())
        ['0.output', '0.weight', '2.output', '2.weight', 'input']
        """
        self.tell_of_restored()
        unit = "dB" if metric is None else ""
        metric = metric_of(metric, forward, "QuantSim.sensitivity")
        with self.calibrated():
            file = ScoreFile(path, measured(self, metric, groups) if path is not None else {})
            found = measure(self, data, metric, higher_is_better=higher_is_better, groups=groups, file=file, show=progress, unit=unit)
            return dataclasses.replace(found, ranges=told_of_ranges(self))

    def float_plan(
        self,
        data: Any,
        metric: Metric | None = None,
        *,
        target: float,
        higher_is_better: bool = True,
        sensitivity: Sensitivity | None = None,
        forward: Forward | None = None,
        probes: int | None = None,
        seconds: float | None = None,
        progress: bool = True,
    ) -> Plan:
        """The fewest operations to leave in float so that a metric reaches a target.

        Operations are taken out of the float set from the least sensitive end, many at a time, and what is left is verified: with any
        single one of them quantized as well, the metric misses the target. No other set may do with fewer, but none within this one does.

        Parameters
        ----------
        data, metric, higher_is_better, forward
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
            quantized the same ranges, but where they share a quantizer with one that is kept, and where ``plan.ranges`` says that this
            simulation has other ranges than its config gives.

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
        caller = "QuantSim.float_plan"
        check_number(caller, "target", target, least=-math.inf)
        check_flag(caller, "higher_is_better", higher_is_better)
        found, by, effort = sensitivity, metric_of(metric, forward, caller), Effort(probes, seconds)
        if found is None:
            found = self.sensitivity(
                data, metric, higher_is_better=higher_is_better, groups="operation", forward=forward, progress=progress
            )
        elif found.higher_is_better != higher_is_better:
            raise ValueError(
                f"QuantSim.float_plan: got a sensitivity with higher_is_better={found.higher_is_better}, and the opposite here"
            )
        with self.calibrated():
            return float_plan(self, data, by, target, found, effort, found.ranges if sensitivity is None else told_of_ranges(self))

    def search_bits(
        self,
        data: Any,
        metric: Metric | None = None,
        *,
        budget: Budget,
        candidates: Sequence[Bits] = (4, 6, 8, "float"),
        higher_is_better: bool = True,
        classes: int | None = None,
        forward: Forward | None = None,
        probes: int = 512,
        progress: bool = True,
    ) -> BitSearch:
        """Bits for every quantizer, so that the model loses least within a budget. Needs SciPy: ``pip install "qsim[search]"``.

        What each tensor loses with each candidate is estimated by one backward pass a batch, and measured for those that seem to lose most;
        a knapsack is solved exactly for what they lose together, and its answer is improved step by step with all others in place
        (docs/bits.md). Nothing of this simulation changes; its ranges come from what it observed, as its config chooses them.

        Parameters
        ----------
        data : iterable of batches that can be read repeatedly
            As `calibrate` takes them; handed to `metric` too. A few hundred samples do. Without targets: no label is asked for.
        metric : callable, optional
            ``metric(sim, data) -> float``, as in `sensitivity`. By default the distance of what the model returns from what it returns in
            float: the mean squared error over the mean square, or the divergence of classes.
        budget : Budget
            Size, bit operations, and the share of tensors above the fewest bits: all that is given holds.
        candidates : sequence of int or "float"
            Bits from 2 to 16, and "float" to leave a tensor in float. Tensors with one shared scale stay in integers.
        higher_is_better : bool
            False for a metric that is a loss.
        classes : int, optional
            The axis of what the model returns along which there are logits of classes: 1, or -1. The distance is then the mean
            Kullback-Leibler divergence of their softmax, in nats.
        forward : callable, optional
            As in `calibrate`; what it returns is compared where there is no metric.
        probes : int
            Passes over the data besides the backward one, at most but for a few; half of them measure single tensors. 0: estimates alone.
        progress : bool
            Show progress bars where tqdm is installed.

        Returns
        -------
        BitSearch
            ``search.config`` for a new simulation of the model, ``search.front`` for other budgets; ``print``, ``search.save``.

        Raises
        ------
        ValueError
            The budget cannot be met, quantizers are off, fall back or are of float formats, or bit operations are not known.
        ImportError
            SciPy is not installed.
        NoEncodingError
            Before calibration.

        Examples
        --------
        >>> from torch import nn
        >>> model, x = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).eval(), torch.randn(64, 16)
        >>> sim = QuantSim(model, x, qsim.int4())
        >>> report = sim.calibrate([x], progress=False)
        >>> search = sim.search_bits([x], budget=qsim.Budget(tensors=0.2), candidates=(4, 8), progress=False)
        >>> sorted(set(search.best.bits.values())), search.best.costs.tensors <= 0.2
        ([4, 8], True)
        """
        if metric is not None:
            metric_of(metric, None, "QuantSim.search_bits")
        if isinstance(candidates, str) or not isinstance(candidates, Sequence):
            raise TypeError(f"QuantSim.search_bits: got candidates={shown(candidates)}; expected a list, such as (4, 8, 'float')")
        request = Request(budget, tuple(candidates), metric, higher_is_better, classes, probes, forward)
        self.tell_of_restored()
        with self.calibrated():
            return search_bits(self, data, request, show=progress)

    def progressive(
        self,
        data: Any,
        metric: Metric | None = None,
        order: str | Sequence[str] = "sensitivity",
        *,
        higher_is_better: bool = True,
        max_drop: float | None = None,
        seconds: float | None = None,
        forward: Forward | None = None,
        path: str | PathLike[str] | None = None,
        progress: bool = True,
    ) -> Progressive:
        """The metric while operations join one by one, from float to all that is on: where accuracy breaks.

        Parameters
        ----------
        data, metric, higher_is_better, forward
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

        Examples
        --------
        >>> from torch import nn
        >>> sim = QuantSim(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(1, 4))
        >>> report = sim.calibrate([torch.randn(32, 4)], progress=False)
        >>> progressive = sim.progressive([torch.randn(32, 4)], order="forward", progress=False)
        >>> [step.operation for step in progressive.steps]
        ['input', '0', '2']
        """
        self.tell_of_restored()
        metric = metric_of(metric, forward, "QuantSim.progressive")
        with self.calibrated():
            file = ScoreFile(path, measured(self, metric, "operation") if path is not None else {})
            limits = Limits(max_drop, seconds)
            found = join(self, data, metric, order, higher_is_better=higher_is_better, limits=limits, file=file, show=progress)
            return dataclasses.replace(found, ranges=told_of_ranges(self))
