"""What bits cost, measured: the model with other quantizers in the places of its own, one assignment after another."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch

from qsim.analysis.bit_choices import Bits, Choice
from qsim.analysis.bit_losses import Distance, Grids
from qsim.analysis.deviation import float_tensors, kept_floats
from qsim.analysis.metric import Metric, value_of
from qsim.progress import progress
from qsim.quantizers.observer import encoding_of_range
from qsim.quantizers.quantizer import Quantizer
from qsim.quantizers.weights import search_encodings
from qsim.runs.batches import Forward
from qsim.runs.snapshot import beginning_alike, unchanged
from qsim.simulation.simulation import Simulation

_CALLER = "QuantSim.search_bits"

Assignment = dict[str, Bits]  # by key; what is missing stays in float


def grids_of(sim: Simulation, candidates: Sequence[Bits]) -> Grids:
    """For each number of bits a quantizer in every place, with the range that calibration would choose from what was observed."""
    return {bits: _grids(sim, bits) for bits in candidates if not isinstance(bits, str)}


def _grids(sim: Simulation, bits: int) -> dict[str, Quantizer]:
    planned, known = sim.decisions.quantizers, sim.quantizers()
    specs = {key: replace(decided.spec, bits=bits) for key, decided in planned.items()}
    weights = {key: attrgetter(decided.parameter)(sim.model) for key, decided in planned.items() if decided.parameter}
    chosen = dict(zip(weights, search_encodings(list(weights.values()), [specs[key] for key in weights]), strict=True))
    made = {}
    for key, decided in planned.items():
        made[key] = Quantizer(specs[key], weights[key].shape if key in weights else None, key).to(known[key].scale.device)
        if decided.range is not None:
            low, high = map(torch.tensor, decided.range)
            encoding = encoding_of_range(low, high, specs[key])
        else:
            encoding = chosen.get(key) or known[key].observer.encoding(specs[key])
        made[key].set_encoding(encoding)
        made[key].eval()
    return made


class BitProbe:
    """Measures assignments of bits on one simulation, whose quantizers take over spec and encoding of others while it lasts.

    Where a bias would not fit into int32, the scale of its weight is not raised, as `choose_encodings` does.

    Parameters
    ----------
    sim : Simulation
    grids : mapping
        From `grids_of`.
    data : any
        Batches, which `metric` is handed too.
    metric : callable, optional
        ``metric(sim, data) -> float``; None: the `Distance`, lower is better.
    classes : int, optional
        As in `Distance`.
    forward : callable, optional
        As in `QuantSim.calibrate`.
    show : bool
        Show a progress bar.

    Attributes
    ----------
    count : int
        Assignments that were measured.
    """

    def __init__(
        self,
        sim: Simulation,
        grids: Grids,
        data: Any,
        metric: Metric | None,
        classes: int | None,
        *,
        show: bool,
        forward: Forward | None = None,
    ) -> None:
        self._sim, self._grids, self._data, self._metric, self._classes, self._show = sim, grids, data, metric, classes, show
        self._run = sim.runner(forward)
        self._quantizers = sim.quantizers()
        self._own = {key: dict(vars(quantizer)) for key, quantizer in self._quantizers.items()}
        self.count = 0

    def measure(self, assignments: Sequence[Assignment]) -> list[float]:
        """The metric, or the distance, with each of them."""
        self.count += len(assignments)
        sim, data, metric = self._sim, self._data, self._metric
        with unchanged(sim), sim.switch.turned(True), torch.no_grad():
            sim.eval()
            if metric is not None:
                values = []
                for assignment in progress(assignments, total=len(assignments), title="search_bits", unit="probe", show=self._show):
                    self._take(assignment)
                    values.append(value_of(metric, sim, data, _CALLER))
                return values
            distances = [Distance(self._classes) for _ in assignments]
            for batch in progress(data, total=None, title="search_bits", unit="batch", show=self._show):
                with beginning_alike(sim.model), sim.in_float():
                    expected = kept_floats(self._run(batch))
                for assignment, distance in zip(assignments, distances, strict=True):
                    self._take(assignment)
                    with beginning_alike(sim.model):
                        distance.add(expected, float_tensors(self._run(batch)))
            return [distance.value for distance in distances]

    def _take(self, assignment: Assignment) -> None:
        """Have the quantizers quantize so: as the others' state, since all that refers to a quantizer refers to it still."""
        for key, quantizer in self._quantizers.items():
            bits = assignment.get(key, "float")
            state = self._own[key] if isinstance(bits, str) else vars(self._grids[bits][key])
            vars(quantizer).clear()
            vars(quantizer).update(state)
            quantizer.enabled = not isinstance(bits, str)


def measured(sim: Simulation, data: Any, metric: Metric | None, classes: int | None, forward: Forward | None = None) -> float:
    """The metric, or the distance, of a simulation as it is."""
    sim.eval()
    with torch.no_grad():
        if metric is not None:
            return value_of(metric, sim, data, _CALLER)
        distance, run = Distance(classes), sim.runner(forward)
        for batch in data:
            with beginning_alike(sim.model), sim.in_float():
                expected = kept_floats(run(batch))
            with beginning_alike(sim.model):
                distance.add(expected, float_tensors(run(batch)))
        return distance.value


def losses(
    probe: BitProbe,
    choices: Sequence[Choice],
    estimates: dict[tuple[int, Bits], float],
    count: int,
    lost: Callable[[float], float],
    *,
    blend: float,
) -> list[list[float]]:
    """What each choice costs by itself, by candidate: measured for the `count` that are estimated to cost most, estimated for the others.

    Estimates are brought to the unit of what is measured by one factor for weights and one for activations: the sums of both over what was
    measured.

    Parameters
    ----------
    lost : callable
        What a value of the metric is worse than float.
    blend : float
        Weight of the estimate beside what was measured: a metric over few data is noise beside what one tensor does to it.
    """
    ranked = sorted((place for place in estimates if place[1] != "float"), key=lambda place: -estimates[place])[:count]
    values = probe.measure([dict.fromkeys(choices[i].keys, bits) for i, bits in ranked])
    found = {place: max(lost(value), 0.0) for place, value in zip(ranked, values, strict=True)}
    known = [place for place in found if math.isfinite(found[place])]
    factors = {}
    for role in ("weight", "activation"):
        places = [place for place in known if choices[place[0]].role == role] or known
        total = sum(estimates[place] for place in places)
        factors[role] = sum(found[place] for place in places) / total if total > 0 else 1.0

    def loss(i: int, bits: Bits) -> float:
        estimate = estimates[i, bits] * factors[choices[i].role]
        return (1 - blend) * found[i, bits] + blend * estimate if (i, bits) in found else estimate

    table = [[loss(i, bits) for bits in choice.candidates] for i, choice in enumerate(choices)]
    worst = max((value for row in table for value in row if math.isfinite(value)), default=0.0)
    return [[value if math.isfinite(value) else 1e3 * worst + 1.0 for value in row] for row in table]  # NaN: where nothing else fits
