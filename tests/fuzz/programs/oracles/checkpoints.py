"""Recomputation changes neither results nor gradients: the simulation with checkpoints is the one without."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

import qsim

from ..case import Case, Failure, Undecided
from ..ir import Block, Branch, Container, Program, Remember, Repeat, Run, all_statements, map_blocks, statements_in
from ..layers import LAYERS
from ..loaded import Call, loaded
from ..results import by_name, near, same_bits
from ..running import Outcome

_TOLERANCE = 1e-5


def without_checkpoints(case: Case) -> Failure | None:
    ways = {getattr(s, "checkpoint", "") for s in all_statements(case.program)}
    if not any(ways):
        raise Undecided("no checkpoint")
    if "segments" in ways:
        raise Undecided("checkpoint_sequential calls layers past the module that they are in, and past its hooks")
    if any(_hands_on(container) for container in case.program.containers):
        raise Undecided("a reentrant checkpoint of what hands on its argument: to torch a view of it with gradients, itself without")
    remembers = any(isinstance(s, Remember) for s in all_statements(case.program))  # what runs again reads what it wrote
    sim = case.simulation(qsim.int8())
    with loaded(_stripped(case.program)) as other:
        plain_case = Case(case.program, other)
        plain = plain_case.simulation(qsim.int8())
        if {*plain.summary().left} - {*sim.summary().left}:
            raise Undecided("what a checkpoint asks for is met there, and stays in float, said, without it")
        pairs = [
            (call, mode, case.float_outcome(call, mode), plain_case.float_outcome(call, mode))
            for call in case.calls
            for mode in case.modes(call, train=False)
        ]
        # A reentrant one whose inputs need no gradient gives its parameters none, on some path: quantized data may decide for that.
        apart = {mode for _, mode, *both in pairs if not _agree(*both)}
        for call, mode, in_float, plainly in pairs:
            if mode in apart:
                continue
            assert isinstance(in_float, Outcome)
            assert isinstance(plainly, Outcome)
            exact = not same_bits(in_float.results, plainly.results)  # a recurrent layer has another kernel without gradients
            found, expected = case.run(sim, call, mode), plain_case.run(plain, call, mode)
            path = "the example's path" if call.recorded else "another path"
            if problem := (same_bits if exact else _nearly)(found.results, expected.results):
                return Failure("checkpoints", f"{path}, {mode}", f"{call.name}: {problem}")
            if not remembers and (problem := _of_gradients(found, expected)) and _of_gradients(*_in_double(case, plain_case, call, mode)):
                return Failure("checkpoints", f"gradients, {path}", f"{call.name}: {problem}, of {list(expected.gradients)}")
    return None


def _hands_on(container: Container) -> bool:
    """Whether it has a reentrant checkpoint of a layer that may return what it takes."""
    handing_on = {f"self.{m.name}" for m in container.members for layer in LAYERS if layer.aliases and m.source == layer.source}
    return any(isinstance(s, Run) and s.checkpoint == "reentrant" and s.module in handing_on for s in statements_in(container.block))


def _nearly(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> str:
    return near(ours, theirs, _TOLERANCE)


def _of_gradients(found: Outcome, expected: Outcome) -> str:
    return near(*by_name(found.gradients, expected.gradients), _TOLERANCE)


def _in_double(case: Case, plain_case: Case, call: Call, mode: str) -> list[Outcome]:
    """A call in float64: a sum in which large numbers cancel shows in float32 the order that it was added up in."""
    return [each.run(each.simulation(qsim.int8(), torch.float64), call, mode, torch.float64) for each in (case, plain_case)]


def _agree(outcome: Outcome | Exception, other: Outcome | Exception) -> bool:
    """Whether two float models have the same results and gradients. Without gradients torch's encoders have zeros where it is padded."""
    if not (isinstance(outcome, Outcome) and isinstance(other, Outcome)) or _nearly(outcome.results, other.results):
        return False
    return not near(list(outcome.gradients.values()), list(other.gradients.values()), _TOLERANCE)


def _stripped(program: Program) -> Program:
    return map_blocks(program, lambda block, _: _plain(block))


def _plain(block: Block) -> Block:
    found = []
    for s in block:
        if isinstance(s, Branch):
            s = dataclasses.replace(s, then=_plain(s.then), other=_plain(s.other))
        elif isinstance(s, Repeat):
            s = dataclasses.replace(s, body=_plain(s.body))
        elif getattr(s, "checkpoint", ""):
            s = dataclasses.replace(s, checkpoint="")  # type: ignore[call-arg]
        found.append(s)
    return tuple(found)
