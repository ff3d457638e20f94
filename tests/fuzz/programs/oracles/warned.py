"""Where a call goes another way than the examples, a warning says so; where it does not, none does."""

from __future__ import annotations

import copy

import torch

from ..case import Case, Failure, Undecided
from ..dataflow import NotUnderstood
from ..interpret import Interpreter
from ..placement import is_read_by_older_names_alone
from .hand_written import both, by_hand

_SAYS = ("ran where the example inputs did not show it", "ran more often than", "was not reached where", "ran on what the example inputs")


def other_ways_are_told(case: Case) -> Failure | None:
    sim, interpreter = both(case)
    try:
        copy.deepcopy(sim)
    except Exception as error:
        raise Undecided(f"no copy: {error}") from error
    understood = False
    for call in case.calls:
        try:
            by_hand(interpreter, call, "no_grad")
        except NotUnderstood:
            continue
        fresh = copy.deepcopy(sim)  # says everything once
        fresh.switch.noticed.clear()
        case.run(fresh, call, "no_grad", torch.float64)
        understood = True
        told = [text for text in case.warned if text.startswith("QuantSim:") and any(says in text for says in _SAYS)]
        missed, skipped = interpreter.m.missed, _skipped(interpreter)
        if (missed or skipped) and not told:
            what = f"{missed[:3]} ran where the example did not" if missed else f"{skipped[:3]} did not run"
            return Failure("warned", "missed" if missed else "skipped", f"{call.name}: {what}, without a word")
        if told and call.recorded and not (missed or interpreter.m.skipped):
            return Failure("warned", "without a reason", f"{call.name}: {told[0]}")
    if not understood:
        raise Undecided("no call is understood")
    return None


def _skipped(interpreter: Interpreter) -> list[str]:
    """Types of the operations that have a quantizer, and did not run where all calls of the example reached them."""
    machine = interpreter.m
    sites = [machine.sites[(*place, 0)] for place in machine.skipped if (*place, 0) in machine.sites]
    return [
        s.kind.type for s in sites if s in machine.rounded and not (s.kind.hidden or s.changed_again or is_read_by_older_names_alone(s))
    ]
