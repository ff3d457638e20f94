"""The fewest operations of a simulation to leave in float, so that a metric reaches a target."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from qsim.analysis.evidence import Evidence
from qsim.analysis.metric import Metric, broken_in
from qsim.analysis.search import Effort, search
from qsim.analysis.sensitivity import Sensitivity, members_of, value_with
from qsim.deploy.engine_plan import Plan
from qsim.runs.sharding import sharded_around
from qsim.runs.snapshot import unchanged
from qsim.simulation.simulation import Simulation

if TYPE_CHECKING:
    from qsim.config.config import Config


class Reached(NamedTuple):
    """The metric with some operations in float; `sqnr` is higher where it is better."""

    ok: bool
    sqnr: float
    nonfinite: int = 0


def float_plan(
    sim: Simulation, data: Any, metric: Metric, target: float, sensitivity: Sensitivity, budget: Effort, ranges: str = ""
) -> Plan:
    """See `QuantSim.float_plan`. The metric is that of the sensitivity, whose groups are operations."""
    if isinstance(data, Iterator):
        raise TypeError(
            f"QuantSim.float_plan: got data of type {type(data).__name__}, which is used up after one pass; every probe needs one: "
            "give a list or a DataLoader"
        )
    sign = 1 if sensitivity.higher_is_better else -1
    quantizers = {key: quantizer for key, quantizer in sim.quantizers().items() if quantizer.enabled}
    members = {score.name: score.keys for score in sensitivity.scores}
    operations = {key: sim.decisions.quantizers[key].operation for key in quantizers}
    if members != {name: tuple(keys) for name, keys in members_of(operations, "operation").items()}:
        raise ValueError(
            "QuantSim.float_plan: the sensitivity is not that of the operations whose quantizers are on; measure it anew, with "
            "groups='operation'"
        )

    def probe(keep: frozenset[str]) -> Reached:
        on = {key for name, keys in members.items() if name not in keep for key in keys}
        value = value_with(sim, quantizers, on, metric, data, "QuantSim.float_plan")
        return Reached(not broken_in(value) and sign * value >= sign * target, sign * value, broken_in(value))

    suspicion = {score.name: math.inf if math.isnan(score.value) else -sign * score.value for score in sensitivity.scores}
    with sharded_around(sim), unchanged(sim), torch.no_grad():
        sim.eval()
        found = search(Evidence(list(members), suspicion=suspicion), probe, budget)
    reached = sign * found.outcome.sqnr
    profile = sim.config.profile.name
    return Plan(found.keep, _format(sim.config), profile, found.irreducible, found.probes, reached, found.note, ranges=ranges)


def _format(config: Config) -> str:
    spec = config.activation or config.weight
    return "float32" if spec is None else spec.dtype if spec.is_float else f"int{spec.bits}"
