"""A hook that changes nothing of the model changes nothing of the simulation, whenever it is put on."""

from __future__ import annotations

import dataclasses

import qsim

from ..case import Case, Failure, Undecided
from ..loaded import loaded
from ..results import by_name, near, same_bits


def hooks_change_nothing(case: Case) -> Failure | None:
    observing = tuple(hook for hook in case.program.hooks if hook.kind.startswith("observe"))
    if not observing:
        raise Undecided("no hook that only looks")
    rest = tuple(hook for hook in case.program.hooks if hook not in observing)
    early = any(not hook.late for hook in observing)
    config = dataclasses.replace(qsim.int8(), batch_norm="keep" if early else "fold")  # with hooks on it a BatchNorm is not folded
    sim = case.simulation(config)
    with loaded(dataclasses.replace(case.program, hooks=rest, seed=case.program.seed)) as other:
        plain_case = Case(case.program, other)
        plain = plain_case.simulation(config)
        for call in case.calls:
            for mode in case.modes(call):
                found, expected = case.run(sim, call, mode), plain_case.run(plain, call, mode)
                late = "early" if early else "late"
                if problem := same_bits(found.results, expected.results):
                    return Failure("hooks", late, f"{call.name}, {mode}: {problem}")
                if problem := near(*by_name(found.gradients, expected.gradients), 1e-5):
                    return Failure("hooks", f"gradients, {late}", f"{call.name}, {mode}: {problem}, of {list(expected.gradients)}")
    return None
