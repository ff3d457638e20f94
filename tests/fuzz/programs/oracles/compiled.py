"""Compiled, the simulation computes what it does in eager, forward and backward, wherever the float model does."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import qsim

from ..case import Case, Failure, Raised, Undecided
from ..ir import all_statements
from ..loaded import Call
from ..results import by_name, near
from ..running import Outcome, quietly, run, same_state
from .hand_written import config_of, widths_of


def compiled_is_eager(case: Case) -> Failure | None:
    rng = random.Random(f"compiled {case.program.seed}")
    backend = "aot_eager" if rng.random() < 0.2 else "eager"
    sim = case.simulation(config_of(widths_of(case.program.seed), case.program.seed), torch.float64)
    calls = [case.calls[0], *rng.sample(case.calls[1:], min(2, len(case.calls) - 1))]
    jobs = [(call, rng.choice([mode for mode in case.modes(call) if mode != "train" or not is_random(case)])) for call in calls]
    problem = _problem(case, sim, jobs, backend, fullgraph=True)
    if problem is None:
        return None
    if not _float_compiles(case, jobs, backend, fullgraph=True):
        problem = _problem(case, sim, jobs, backend, fullgraph=False)
        if problem is not None and not _float_compiles(case, jobs, backend, fullgraph=False):
            raise Undecided("the float model does not compile, or computes something else then")
    if problem is not None and "[torch.LongTensor []]" in problem.detail and "modified by an inplace" in problem.detail:
        raise Undecided("a BatchNorm that counts batches under a checkpoint, compiled: torch's own version error")
    return problem


def is_random(case: Case) -> bool:
    """Whether training draws random numbers."""
    return "ropout" in str(case.program)


def asks_whether_compiled(case: Case, raised: Raised) -> bool:
    """Whether a model that takes another branch when it is compiled is refused: its graph would hold other quantizers than the plan."""
    tests = [getattr(s, "test", None) for s in all_statements(case.program)]
    return any(test is not None and test.kind == "compiling" for test in tests) and "asks whether it is being compiled" in str(raised)


def _compiled(function: Callable[..., Any], backend: str, *, fullgraph: bool) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, backend=backend, fullgraph=fullgraph)


def _problem(case: Case, sim: qsim.QuantSim, jobs: list[tuple[Call, str]], backend: str, *, fullgraph: bool) -> Failure | None:
    made = _compiled(sim, backend, fullgraph=fullgraph)
    for call, mode in jobs:
        expected = case.run(sim, call, mode, torch.float64)
        path = "the example's path" if call.recorded else "another path"
        try:
            found = case.run(made, call, mode, torch.float64, of=sim)
        except Raised as raised:
            if asks_whether_compiled(case, raised):
                return None
            return Failure("compiled", f"raises, {path}", f"{call.name}, {mode}, {backend}, fullgraph={fullgraph}: {raised}")
        if difference := near(found.results, expected.results, 1e-9):
            return Failure("compiled", f"{path}, {mode}", f"{call.name}, {backend}, fullgraph={fullgraph}: {difference}")
        if difference := near(*by_name(found.gradients, expected.gradients), 1e-6):
            return Failure("compiled", f"gradients, {path}, {mode}", f"{call.name}, {backend}: {difference}, of {list(expected.gradients)}")
    return None


class _Inside(nn.Module):
    """A model inside another one, as it is in a simulation: of a forward that is a generator, torch.compile traces only what calls it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


def _float_compiles(case: Case, jobs: list[tuple[Call, str]], backend: str, *, fullgraph: bool) -> bool:
    model = case.float_model(torch.float64)
    made = _compiled(_Inside(model), backend, fullgraph=fullgraph)
    for call, mode in jobs:
        expected = case.float_outcome(call, mode, torch.float64)
        assert isinstance(expected, Outcome)
        try:
            with quietly(), same_state(model):
                found = run(made, case.loaded, call, mode, torch.float64, of=model)
        except Exception:
            return False
        if near(found.results, expected.results, 1e-9):
            return False
        if near(*by_name(found.gradients, expected.gradients), 1e-6):
            return False
    return True
