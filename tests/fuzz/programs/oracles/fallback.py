"""What falls back computes in its format, and hands that on by whatever name it is known: the rest is near float as before."""

from __future__ import annotations

import random

import torch

import qsim

from ..case import Case, Failure, kept_batch_norms
from ..results import by_name, near
from ..running import Outcome
from .sixteen_bits import near_float

_BAR = 50.0  # half precision keeps 11 bits of every number
_LESS = 40.0  # dB: five bits, and what several operations add
_TOLERANCE = 1e-5  # other kernels may compute it


def fallback_is_near(case: Case) -> Failure | None:
    if failure := _all_of_it(case):
        return failure
    return near_float(case, "fallback", lambda sim: _some_of_it(case, sim), _BAR, less=_LESS, format=torch.float16)


def _all_of_it(case: Case) -> Failure | None:
    """With everything in float32 nothing is quantized."""
    problem = _difference(case, torch.float32)
    return problem and _difference(case, torch.float64)  # large numbers that cancel show in float32 the order that they were added up in


def _difference(case: Case, dtype: torch.dtype) -> Failure | None:
    sim = case.simulation(kept_batch_norms(qsim.int8()), dtype)
    if not sim.decisions.operations:
        return None
    sim.fallback("*", to="float32")
    for call in (call for call in case.calls if call.recorded):
        for mode in case.modes(call):
            expected, found = case.float_outcome(call, mode, dtype), case.run(sim, call, mode, dtype)
            assert isinstance(expected, Outcome)
            if problem := near(found.results, expected.results, _TOLERANCE):
                return Failure("fallback", f"all of it, {mode}", f"{call.name}: {problem}")
            if problem := near(*by_name(found.gradients, expected.gradients), _TOLERANCE):
                return Failure("fallback", f"all of it, gradients, {mode}", f"{call.name}: {problem}, of {list(expected.gradients)}")
    return None


def _some_of_it(case: Case, sim: qsim.QuantSim) -> None:
    rng = random.Random(f"fallback {case.program.seed}")
    chosen = [name for name in sim.decisions.operations if rng.random() < 0.5]
    if chosen:
        sim.fallback(chosen, to="fp16")
