"""Bits under a budget: for each quantizer a number of bits, so that the model loses least."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from qsim.analysis.bit_choices import Bits, choices_of, config_with, trial
from qsim.analysis.bit_costs import Budget, CostModel
from qsim.analysis.bit_latency import Latencies
from qsim.analysis.bit_losses import Distance, estimated
from qsim.analysis.bit_operations import Product, UncountedError, products_of
from qsim.analysis.bit_probe import Assignment, BitProbe, grids_of, losses, measured
from qsim.analysis.bit_search_report import BitSearch, Point, dominates
from qsim.analysis.knapsack import Constraint, knapsack
from qsim.analysis.metric import Metric
from qsim.errors import CaptureError
from qsim.options import check_flag, check_whole, shown
from qsim.runs.batches import Forward
from qsim.runs.report_subject import subject_of
from qsim.runs.sharding import sharded_modules
from qsim.simulation.config_ranges import told_of_ranges
from qsim.simulation.simulation import Simulation

_STEPS = (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 1.0)  # of the way from the least that is possible to the most: budgets of the front
_NEAR = (2, 4, 8)  # how many choices a step of the refinement may change, besides all


@dataclass(frozen=True)
class Request:
    """What a search is asked for; see `QuantSim.search_bits`."""

    budget: Budget
    candidates: tuple[Bits, ...]
    metric: Metric | None
    higher_is_better: bool
    classes: int | None
    probes: int
    forward: Forward | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.budget, Budget):
            raise TypeError(f"QuantSim.search_bits: got budget={shown(self.budget)}; expected a qsim.Budget, such as qsim.Budget(size=0.2)")
        check_whole("QuantSim.search_bits", "probes", self.probes, least=0)
        check_flag("QuantSim.search_bits", "higher_is_better", self.higher_is_better)
        numbers = [bits for bits in self.candidates if bits != "float"]
        if any(isinstance(b, (bool, str)) or not isinstance(b, int) or not 2 <= b <= 16 for b in numbers) or len({*self.candidates}) < 2:
            raise ValueError(
                f"QuantSim.search_bits: got candidates={shown(self.candidates)}; expected two or more different ones of 2 to 16 and 'float'"
            )
        if not numbers:
            raise ValueError("QuantSim.search_bits: got no integers among the candidates")
        if len(numbers) < len(self.candidates) - 1 or len({*numbers}) < len(numbers):
            raise ValueError(f"QuantSim.search_bits: got candidates={shown(self.candidates)}, some of them twice")
        if self.classes is not None and (isinstance(self.classes, bool) or not isinstance(self.classes, int)):
            raise TypeError(f"QuantSim.search_bits: got classes={shown(self.classes)}; expected an axis of the logits, such as 1")
        if self.metric is not None and self.classes is not None:
            raise ValueError("QuantSim.search_bits: got a metric and classes; classes say what is measured where there is no metric")
        rising = sorted(self.candidates, key=lambda bits: math.inf if isinstance(bits, str) else bits)
        object.__setattr__(self, "candidates", tuple(rising))


def search_bits(sim: Simulation, data: Any, request: Request, *, show: bool) -> BitSearch:
    """See `QuantSim.search_bits`. The simulation is calibrated."""
    _check(sim, data)
    return _Search(sim, data, request, show).run()


def _check(sim: Simulation, data: Any) -> None:
    name = "QuantSim.search_bits"
    if isinstance(data, Iterator):
        raise TypeError(f"{name}: got data of type {type(data).__name__}, which is used up after one pass: give a list or a DataLoader")
    if sharded_modules(sim):
        raise ValueError(f"{name}: fully_shard holds the weights; search before sharding")
    quantizers = sim.quantizers()
    if off := [key for key, quantizer in quantizers.items() if not quantizer.enabled]:
        raise ValueError(f"{name}: {off[0]!r} is switched off, which no config says: enable it, or leave it in float by an override")
    if sim.quantization.formats:
        raise ValueError(f"{name}: operations fall back to float formats, which no config says: call sim.fallback after the search")
    for key, decided in sim.decisions.quantizers.items():
        if decided.spec.is_float or decided.spec.is_running or decided.spec.is_dynamic:
            got = decided.spec.dtype if decided.spec.is_float else f"method={decided.spec.method!r}"
            raise ValueError(f"{name}: {key!r} has {got}; expected integers whose ranges are calibrated: give such a config")
    if not quantizers:
        raise ValueError(f"{name}: nothing is quantized; see sim.summary()")


class _Search:
    def __init__(self, sim: Simulation, data: Any, request: Request, show: bool) -> None:
        self.sim, self.data, self.request, self.show = sim, data, request, show
        self.choices = choices_of(sim, request.candidates)
        self.notes = [f"the search goes by the ranges of the config; here {told}"] if (told := told_of_ranges(sim)) else []
        products, latencies = self._products(), None
        if request.budget.latency is not None and products is not None:
            latencies = Latencies(sim, products, request.candidates, show=show)
        self.model = CostModel(sim, self.choices, products, latencies)
        self.limits = self.model.limits(request.budget)
        self.grids = grids_of(sim, request.candidates)
        self.probe = BitProbe(sim, self.grids, data, request.metric, request.classes, show=show, forward=request.forward)

    def _products(self) -> list[Product] | None:
        try:
            return products_of(self.sim)
        except (CaptureError, UncountedError) as error:
            for name, unknown in (("bit_operations", "bit operations of the model are"), ("latency", "latency of the model is")):
                if getattr(self.request.budget, name) is not None:
                    raise ValueError(f"QuantSim.search_bits: the {unknown} not known: {error}") from error
            self.notes.append(f"bit operations are not known: {error}")
            return None

    def run(self) -> BitSearch:
        request = self.request
        if knapsack([[0.0] * len(choice.candidates) for choice in self.choices], self.limits) is None:
            least = self.model.costs([0] * len(self.choices))
            raise ValueError(
                f"QuantSim.search_bits: got {request.budget}; with {request.candidates[0]} bits everywhere the model costs {least}"
            )
        estimates = estimated(self.sim, self.choices, self.grids, self.data, request.classes, show=self.show, forward=request.forward)
        self.baseline = self.probe.measure([{}])[0] if request.metric is not None else 0.0
        if not math.isfinite(self.baseline):
            raise ValueError(
                f"QuantSim.search_bits: the metric is {self.baseline} in float, from which nothing can be lost; give one that is finite"
            )
        blend = 0.0 if request.metric is None else 0.5
        self.losses = losses(self.probe, self.choices, estimates, request.probes // 2, self.lost, blend=blend)
        found = [picked for limits in (self.limits, *self._ladder()) if (picked := knapsack(self.losses, limits)) is not None]
        points = [self._point(picked) for picked in _distinct([*found, self._refined(found[0])])]
        best = min((point for point in points if point.costs.within(request.budget)), key=lambda point: (point.loss, point.costs.size))
        front = [point for point in points if point is best or not any(dominates(other, point, request.budget) for other in points)]
        front.sort(key=lambda point: (point.costs.spent(request.budget), point.costs.size))
        baseline = None if request.metric is None else self.baseline
        unit = None if request.metric is not None else Distance(request.classes).unit
        about = subject_of(self.sim.model, self.sim.config)
        return BitSearch(front, best, request.budget, baseline, request.higher_is_better, "; ".join(self.notes), unit, subject=about)

    def lost(self, value: float) -> float:
        """How much worse than float a value of the metric is."""
        if self.request.metric is not None:
            value = (self.baseline - value) * (1 if self.request.higher_is_better else -1)
        return math.inf if math.isnan(value) else value

    def _ladder(self) -> list[list[Constraint]]:
        """The limits of the budgets between what the fewest bits cost and the most."""
        least, most = [0] * len(self.choices), [len(choice.candidates) - 1 for choice in self.choices]
        ends = [(limit, limit.cost(least), limit.cost(most)) for limit in self.limits]
        return [[replace(limit, most=low + step * (high - low)) for limit, low, high in ends] for step in _STEPS]

    def _refined(self, picked: list[int]) -> list[int]:
        """What is better with all others in place than what was chosen by the losses of each tensor alone.

        Each step measures what one candidate more or fewer does to the loss here, solves the knapsack for these differences, with few
        changes allowed and with many, and goes where the loss is measured to be least, as long as that is less than before.
        """
        here = math.inf
        while True:
            beside = [[*picked[:i], a, *picked[i + 1 :]] for i, at in enumerate(picked) for a in self._neighbours(i, at)]
            if self.probe.count + 1 + len(beside) + len(_NEAR) + 1 > self.request.probes:
                return picked
            if here == math.inf:
                here = self._lost([picked])[0]
            near = dict(zip(map(tuple, beside), self._lost(beside), strict=True))
            differences = self._differences(picked, near, here)
            moved = [[float(a != at) for a in range(len(row))] for at, row in zip(picked, self.losses, strict=True)]
            regions = [Constraint(moved, float(most)) for most in (*_NEAR, len(picked))]
            steps = [step for region in regions if (step := knapsack(differences, [*self.limits, region])) is not None]
            steps = [step for step in _distinct(steps) if step != picked and tuple(step) not in near]
            near |= zip(map(tuple, steps), self._lost(steps), strict=True)
            within = [step for step in near if all(limit.is_kept(step) for limit in self.limits)]
            best = min(within, key=lambda step: near[step], default=None)
            if best is None or not near[best] < here:
                return picked
            picked, here = list(best), near[best]

    def _lost(self, found: list[list[int]]) -> list[float]:
        """What is lost with each of these, measured."""
        return [self.lost(value) for value in self.probe.measure([self._assigned(picked) for picked in found])]

    def _neighbours(self, i: int, at: int) -> list[int]:
        return [a for a in (at - 1, at + 1) if 0 <= a < len(self.losses[i])]

    def _differences(self, picked: list[int], near: dict[tuple[int, ...], float], here: float) -> list[list[float]]:
        """What each candidate changes where all else is as picked: measured one step away, further by the losses alone."""
        found = []
        for i, (at, alone) in enumerate(zip(picked, self.losses, strict=True)):
            row = [0.0] * len(alone)
            for a in self._neighbours(i, at):
                beside = (*picked[:i], a, *picked[i + 1 :])
                step = near[beside] - here if math.isfinite(near[beside] - here) else 1e3 * max(map(max, self.losses))
                for further in range(a, len(alone)) if a > at else range(a + 1):
                    row[further] = step + alone[further] - alone[a]
            found.append(row)
        return found

    def _assigned(self, picked: Sequence[int]) -> Assignment:
        return {key: choice.candidates[a] for choice, a in zip(self.choices, picked, strict=True) for key in choice.keys}

    def _point(self, picked: Sequence[int]) -> Point:
        """With a simulation made and measured, so that what is written is what its config gives."""
        request = self.request
        bits = [choice.candidates[a] for choice, a in zip(self.choices, picked, strict=True)]
        config, assigned = config_with(self.sim, self.choices, bits), self._assigned(picked)
        value = measured(trial(self.sim, config, assigned), self.data, request.metric, request.classes, request.forward)
        predicted = sum(row[a] for row, a in zip(self.losses, picked, strict=True))
        roles = {key: choice.role for choice in self.choices for key in choice.keys}
        places = {key: (decided.operation, roles[key]) for key, decided in self.sim.decisions.quantizers.items() if key in roles}
        ordered = {key: assigned[key] for key in places}
        return Point(ordered, places, self.model.costs(picked), predicted, value, self.lost(value), config)


def _distinct(found: list[list[int]]) -> list[list[int]]:
    return [list(picked) for picked in dict.fromkeys(map(tuple, found))]
