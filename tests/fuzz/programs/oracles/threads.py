"""Two threads that share a simulation compute what one does."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

import qsim

from ..case import Case, Failure, Raised, Undecided
from ..ir import Hold, Remember, all_statements
from ..loaded import Call
from ..results import same_bits, tensors_of
from ..running import quietly

_TURNS = 4


def threads_do_not_meet(case: Case) -> Failure | None:
    if any(isinstance(s, Remember) or (isinstance(s, Hold) and s.how == "attribute") for s in all_statements(case.program)):
        raise Undecided("threads share the model's state")
    sim = case.simulation(qsim.int8())
    sim.eval()
    calls = [case.calls[0], case.calls[-1]]

    def results(call: Call) -> list[Tensor]:
        found = []
        with torch.no_grad():
            for _ in range(_TURNS):
                args, kwargs = case.loaded.arguments(call, torch.float32)
                found += tensors_of(sim(*args, **kwargs))
        return found

    interval = sys.getswitchinterval()
    with quietly():
        expected = [results(call) for call in calls]
        sys.setswitchinterval(1e-5)
        try:
            with ThreadPoolExecutor(2) as pool:
                found = list(pool.map(results, calls))
        except Exception as error:
            raise Raised("threads", error) from error
        finally:
            sys.setswitchinterval(interval)
    for call, ours, theirs in zip(calls, found, expected, strict=True):
        if problem := same_bits(ours, theirs):
            return Failure("threads", "eager", f"{call.name}: {problem}")
    return None
