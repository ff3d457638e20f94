"""Modules of a simulation that are compiled by themselves compute what they do in eager, wherever those of the float model do."""

from __future__ import annotations

import torch
from torch import nn

import qsim

from ..case import Case, Failure, Raised, Undecided
from ..loaded import Call
from ..results import by_name, near
from ..running import Outcome, quietly, run, same_state
from .compiled import asks_whether_compiled, is_random
from .hand_written import config_of, widths_of

Job = tuple[Call, str]


def compiled_parts_are_eager(case: Case) -> Failure | None:
    parts = [member.name for member in case.program.root.members if member.container]
    if not parts:
        raise Undecided("no module of a class of its own")
    sim = case.simulation(config_of(widths_of(case.program.seed), case.program.seed), torch.float64)
    call = case.calls[0]
    modes = [mode for mode in case.modes(call) if mode != "train" or not is_random(case)]
    expected = {mode: case.run(sim, call, mode, torch.float64) for mode in modes}
    problem = _problem(case, sim, parts, call, expected)
    if problem is not None and not _float_compiles(case, parts, call, modes):
        raise Undecided("modules of the float model do not compile, or compute something else then")
    return problem


def _compile(model: nn.Module, parts: list[str]) -> None:
    torch._dynamo.reset()
    for part in parts:
        model.get_submodule(part).compile(backend="eager")


def _problem(case: Case, sim: qsim.QuantSim, parts: list[str], call: Call, expected: dict[str, Outcome]) -> Failure | None:
    _compile(sim.model, parts)
    for mode, outcome in expected.items():
        try:
            found = case.run(sim, call, mode, torch.float64)
        except Raised as raised:
            if asks_whether_compiled(case, raised):
                return None
            return Failure("compiled parts", "raises", f"{mode}: {raised}")
        if difference := near(found.results, outcome.results, 1e-9):
            return Failure("compiled parts", mode, f"{parts}: {difference}")
        if difference := near(*by_name(found.gradients, outcome.gradients), 1e-6):
            return Failure("compiled parts", f"gradients, {mode}", f"{parts}: {difference}, of {list(outcome.gradients)}")
    return None


def _float_compiles(case: Case, parts: list[str], call: Call, modes: list[str]) -> bool:
    model = case.float_model(torch.float64)
    _compile(model, parts)
    for mode in modes:
        expected = case.float_outcome(call, mode, torch.float64)
        try:
            with quietly(), same_state(model):
                found = run(model, case.loaded, call, mode, torch.float64)
        except Exception:
            return False
        if not isinstance(expected, Outcome) or near(found.results, expected.results, 1e-9):
            return False
        if near(*by_name(found.gradients, expected.gradients), 1e-6):
            return False
    return True
