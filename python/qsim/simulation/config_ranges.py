"""Whether a simulation quantizes by the ranges that its config gives: a new one that is made with the config has those."""

from __future__ import annotations

import contextlib

import torch

from qsim.errors import CalibrationError
from qsim.numbers.encoding import Encoding
from qsim.simulation.bank import QuantizerBank
from qsim.simulation.range_choice import choose_encodings
from qsim.simulation.simulation import Simulation

_SHOWN = 3


def other_ranges(sim: Simulation) -> list[str]:
    """The enabled quantizers that have other encodings than the config gives for what was observed and for the weights as they are: after
    `set_method`, ranges that were searched, loaded, learned or set, and training. Running ranges are not looked at.

    Examples
    --------
    >>> x = torch.randn(64, 3)
    >>> sim = qsim.QuantSim(torch.nn.Linear(3, 2), x)
    >>> report = sim.calibrate([x], progress=False)
    >>> other_ranges(sim)
    []
    >>> sim.set_method("percentile", percentile=90.0)
    >>> other_ranges(sim)
    ['input', 'weight', 'linear.output']
    """
    planned, known = sim.decisions.quantizers, sim.quantizers()
    fresh = QuantizerBank(sim.model, sim.decisions, {}).by_key()
    asked = [key for key, decided in planned.items() if known[key].enabled and not (decided.spec.is_running or decided.spec.is_dynamic)]
    for key in asked:
        if planned[key].parameter is None and planned[key].range is None:
            fresh[key].merge(known[key])
    with torch.no_grad(), contextlib.suppress(CalibrationError):  # what has nothing to choose from has no encoding
        choose_encodings(sim, quantizers=fresh)
    return [key for key in asked if not _are_equal(known[key].encoding, fresh[key].encoding)]


def told_of_ranges(sim: Simulation) -> str:
    """The sentence about `other_ranges`; "" where there are none."""
    found = other_ranges(sim)
    if not found:
        return ""
    shown = ", ".join(map(repr, found[:_SHOWN])) + (", ..." if len(found) > _SHOWN else "")
    bound = set(sim.bound_scales()).intersection(found)
    back = "sim.set_method(None) goes back to the config's"
    if bound:
        theirs = f"the {'one' if len(bound) == 1 else len(bound)} that restoration found"
        back = f"sim.set_method(None) keeps {theirs}" if len(bound) == len(found) else f"{back}, but for {theirs}"
    return (
        f"{len(found)} quantizer{' has' if len(found) == 1 else 's have'} ranges that the config does not give for what was observed "
        f"({shown}): a new simulation with the config has others; {back}"
    )


def _are_equal(one: Encoding | None, other: Encoding | None) -> bool:
    if one is None or other is None:
        return one is other
    pairs = ((one.scale, other.scale), (one.zero_point, other.zero_point))
    return all(torch.equal(a, b.to(a.device)) for a, b in pairs)
