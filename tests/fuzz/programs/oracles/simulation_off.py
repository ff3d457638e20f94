"""With simulation off the model computes as it does in float, to the bit: results and gradients, in evaluation and in training."""

from __future__ import annotations

import qsim

from ..case import Case, Failure, in_float, kept_batch_norms
from ..results import by_name, same_bits
from ..running import Outcome


def off_is_float(case: Case) -> Failure | None:
    sim = case.simulation(kept_batch_norms(qsim.int8()))
    for call in case.calls:
        for mode in case.modes(call):
            expected = case.float_outcome(call, mode)
            assert isinstance(expected, Outcome)
            with in_float(sim):
                found = case.run(sim, call, mode)
            if problem := same_bits(found.results, expected.results):
                return Failure("off", f"{mode}", f"{call.name}: {problem}")
            if problem := same_bits(*by_name(found.gradients, expected.gradients)):
                return Failure("off", f"gradients, {mode}", f"{call.name}: {problem}, of {list(expected.gradients)}")
    return None
